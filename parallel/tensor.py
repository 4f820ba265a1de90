"""Tensor- and sequence-parallel layers: column, row and replicated linears, vocabulary-parallel embedding and head.

Lives here: layers that own a split parameter and say how it is split. Imports `kernels` and `parallel`. Follows
Megatron-LM (1909.08053) and its sequence parallelism (2205.05198). Activations are sequence first, [s, b, h], so that
collectives over the sequence move contiguous blocks. Shapes: s sequence, or of it a context-parallel rank's part, b
batch, h hidden; `_l` marks a tp-local size.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from kernels import matmul
from kernels.rms_norm import rms_norm
from parallel.comm import gather_sequence, scatter_sequence_sum
from parallel.mesh import Mesh
from parallel.sharding import Sharding, shard_slice
from parallel.weight_gradient import linear, will_add_its_gradient


def _parameter(shape: tuple[int, ...], sharding: Sharding) -> nn.Parameter:
    """An uninitialised fp32 parameter with its annotation; `sharding.initialise` fills it."""
    parameter = nn.Parameter(torch.empty(shape))
    parameter.sharding = sharding  # type: ignore[attr-defined]
    return parameter


def _divide(size: int, mesh: Mesh, what: str) -> int:
    if size % mesh.tp.size:
        raise ValueError(f"{what} {size} is not divisible by tensor-model-parallel-size {mesh.tp.size}")
    return size // mesh.tp.size


class ColumnParallelLinear(nn.Module):
    """y = x Wᵀ with W's rows (outputs) split over tp: [s, b, in] -> [s, b, out_l]. x has the whole sequence.

    stacked n: n matrices that share an input, [n, out, in] split on dimension 1, so that rank r holds block r of each
    (gate and up); the output is then [s, b, n * out_l], matrix after matrix. No communication of its own.
    """

    def __init__(self, in_features: int, out_features: int, mesh: Mesh, stacked: int = 0):
        super().__init__()
        local = _divide(out_features, mesh, "output features")
        shape = (stacked, local, in_features) if stacked else (local, in_features)
        split_dim = 1 if stacked else 0
        sharding = Sharding(split_dim=split_dim, axis="tp", full_size=out_features)
        self.weight = will_add_its_gradient(_parameter(shape, sharding))

    def forward(self, x_sbh: torch.Tensor) -> torch.Tensor:
        return linear(x_sbh, self.weight)


class RowParallelLinear(nn.Module):
    """y = x Wᵀ with W's columns (inputs) split over tp: [s, b, in_l] -> [s/tp, b, out], reduce-scattered over tp."""

    def __init__(self, in_features: int, out_features: int, mesh: Mesh):
        super().__init__()
        self.tp = mesh.tp
        local = _divide(in_features, mesh, "input features")
        sharding = Sharding(split_dim=1, axis="tp", full_size=in_features)
        self.weight = will_add_its_gradient(_parameter((out_features, local), sharding))

    def forward(self, x_sbi: torch.Tensor) -> torch.Tensor:
        return scatter_sequence_sum(linear(x_sbi, self.weight), self.tp)


class ReplicatedLinear(nn.Module):
    """y = x Wᵀ with the whole W on every tp rank, each fed its part of the sequence: [s/tp, b, in] -> [s/tp, b, out].

    stacked n: n matrices that share an input, [n, out, in]; the output is [s/tp, b, n * out], matrix after matrix.
    """

    def __init__(self, in_features: int, out_features: int, stacked: int = 0):
        super().__init__()
        shape = (stacked, out_features, in_features) if stacked else (out_features, in_features)
        self.weight = will_add_its_gradient(_parameter(shape, Sharding(sequence_fed=True)))

    def forward(self, x_sbh: torch.Tensor) -> torch.Tensor:
        return linear(x_sbh, self.weight)


class SequenceRMSNorm(nn.Module):
    """RMSNorm over the last dimension of this rank's part of the sequence; the weight is replicated over tp."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = _parameter((size,), Sharding(sequence_fed=True))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class VocabularyParallelEmbedding(nn.Module):
    """Rows of the table split over tp in blocks of ceil(V/tp): token ids [b, s] -> [s/tp, b, h].

    pipeline_ranks: the pipeline ranks that hold a copy (empty: one place). Ids outside the vocabulary raise IndexError.
    """

    def __init__(self, vocab_size: int, hidden: int, mesh: Mesh, pipeline_ranks: tuple[int, ...] = ()):
        super().__init__()
        self.tp = mesh.tp
        self.vocab_size = vocab_size
        rows = -(-vocab_size // mesh.tp.size)
        self.valid = shard_slice(vocab_size, mesh.tp.size, mesh.tp.rank)
        sharding = Sharding(0, "tp", vocab_size, pipeline_ranks=pipeline_ranks, role="embedding")
        self.weight = _parameter((rows, hidden), sharding)

    def forward(self, tokens_bs: torch.Tensor) -> torch.Tensor:
        ids_sb = tokens_bs.t()
        if self.tp.size == 1:
            return F.embedding(ids_sb, self.weight)
        elsewhere_sb = (ids_sb < self.valid.start) | (ids_sb >= self.valid.stop)
        local_sb = (ids_sb - self.valid.start).masked_fill(elsewhere_sb, 0)
        # An id that no rank holds: -1, which every rank's lookup refuses, so that none waits for another.
        local_sb = local_sb.masked_fill((ids_sb < 0) | (ids_sb >= self.vocab_size), -1)
        partial_sbh = F.embedding(local_sb, self.weight).masked_fill(elsewhere_sb.unsqueeze(-1), 0.0)
        return scatter_sequence_sum(partial_sbh, self.tp)


class VocabularyParallelHead(nn.Module):
    """Logits of this rank's block of the vocabulary: [s/tp, b, h] -> [s, b, V_l], V_l without padding (it may be 0).

    The padding rows of the weight take no part, so they never get probability or gradient.
    """

    def __init__(self, vocab_size: int, hidden: int, mesh: Mesh, pipeline_ranks: tuple[int, ...] = ()):
        super().__init__()
        self.tp = mesh.tp
        rows = -(-vocab_size // mesh.tp.size)
        self.valid = shard_slice(vocab_size, mesh.tp.size, mesh.tp.rank)
        sharding = Sharding(0, "tp", vocab_size, pipeline_ranks=pipeline_ranks, role="head")
        self.weight = _parameter((rows, hidden), sharding)

    def forward(self, x_sbh: torch.Tensor) -> torch.Tensor:
        return self.of_whole(gather_sequence(x_sbh, self.tp))

    def of_whole(self, x_sbh: torch.Tensor) -> torch.Tensor:
        """The same from hidden states that every tp rank has whole: [s, b, h] -> [s, b, V_l]. Doesn't communicate."""
        rows = self.valid.stop - self.valid.start
        # A slice's gradient is a whole weight of zeros first: only where there is padding.
        weight = self.weight if rows == self.weight.shape[0] else self.weight[:rows]
        return matmul.linear(x_sbh, weight)
