"""The model, a pipeline stage at a time: embedding, blocks, head, multi-token prediction, and its losses.

Lives here: DeepSeek-V2/V3 put together from attention, mlp and moe. May import `parallel` and `kernels`. Parameter
names are global and are Hugging Face's without "model."; MTP depth k (from 1) is layer num_hidden_layers + k - 1.
Shapes: s sequence, l = s/(cp·tp) this rank's part of it, b batch, h hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from model.attention import LatentAttention, document_mask
from model.config import DeepSeekConfig
from model.microbatch import MicroBatch
from model.mlp import DenseMLP
from model.moe import MoE
from model.options import ModelOptions
from model.rotary import rotary_frequencies, rotation
from parallel.context import context_part
from parallel.cross_entropy import vocabulary_parallel_cross_entropy
from parallel.mesh import Mesh
from parallel.pipeline.placement import ModelCosts, as_ranges, balanced, check_counts
from parallel.recompute import discard, recomputed
from parallel.sharding import initialise
from parallel.tensor import ReplicatedLinear, SequenceRMSNorm, VocabularyParallelEmbedding, VocabularyParallelHead


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): [l, b, h] -> [l, b, h].

    Of the options' recomputed parts: "layernorm" the outputs of both norms, "mlp" a dense MLP,
    "mlp_act" its activation only, "moe" a mixture of experts, and those of `LatentAttention` and `MoE`.
    """

    def __init__(self, config: DeepSeekConfig, mesh: Mesh, layer: int, options: ModelOptions):
        super().__init__()
        self.input_layernorm = SequenceRMSNorm(config.hidden_size, config.rms_norm_eps)
        recompute = options.recomputed_parts
        self.self_attn = LatentAttention(config, mesh, layer, recompute)
        self.post_attention_layernorm = SequenceRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: MoE | DenseMLP
        if config.is_moe_layer(layer):
            self.mlp = MoE(config, mesh, layer, options)
        else:
            discard_inner = "mlp_act" in recompute and "mlp" not in recompute
            self.mlp = DenseMLP(config.hidden_size, config.intermediate_size, mesh, discard_inner)
        self.discard_normed = "layernorm" in recompute
        self.recompute_mlp = ("moe" if isinstance(self.mlp, MoE) else "mlp") in recompute

    def forward(self, x_lbh: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        mlp = partial(self.mlp, batch=batch) if isinstance(self.mlp, MoE) else self.mlp
        x_lbh = self._add(x_lbh, self.input_layernorm, partial(self.self_attn, batch=batch))
        return self._add(x_lbh, self.post_attention_layernorm, partial(recomputed, mlp) if self.recompute_mlp else mlp)

    def _add(
        self, x_lbh: torch.Tensor, norm: SequenceRMSNorm, layer: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        normed_lbh = norm(x_lbh)
        output_lbh = layer(normed_lbh)
        if self.discard_normed:
            discard([normed_lbh], lambda: [norm(x_lbh)], consumed=output_lbh)
        return x_lbh + output_lbh


class SharedHead(nn.Module):
    """The norm before the main head that an MTP layer has of its own."""

    def __init__(self, config: DeepSeekConfig):
        super().__init__()
        self.norm = SequenceRMSNorm(config.hidden_size, config.rms_norm_eps)


class MTPBlock(Block):
    """One depth of multi-token prediction (2412.19437, eq. 21–23): joins states and next tokens, then a block.

    "layernorm" is for the norms that join, too. The one before the head is kept, as is the main head's:
    on the last stage backward begins where forward ends.
    """

    def __init__(self, config: DeepSeekConfig, mesh: Mesh, layer: int, options: ModelOptions):
        super().__init__(config, mesh, layer, options)
        self.enorm = SequenceRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = SequenceRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = ReplicatedLinear(2 * config.hidden_size, config.hidden_size)
        self.shared_head = SharedHead(config)

    def join(self, hidden_lbh: torch.Tensor, embedded_lbh: torch.Tensor) -> torch.Tensor:
        """The block's input: eh_proj(cat[enorm(embedding), hnorm(hidden)])."""

        def normed() -> torch.Tensor:
            return torch.cat([self.enorm(embedded_lbh), self.hnorm(hidden_lbh)], dim=-1)

        both_lbi = normed()
        joined_lbh = self.eh_proj(both_lbi)
        if self.discard_normed:
            discard([both_lbi], lambda: [normed()], consumed=joined_lbh)
        return joined_lbh


class DeepSeekStage(nn.Module):
    """The part of the model that one pipeline stage computes.

    layers: numbers of its blocks, maybe none on the first and the last stage; first: has the embedding; last: has the
    final norm, the head and all MTP layers. Those need the embedding too: the first stage's where that lies on the same
    rank (embedding), else a copy, kept alike by the gradient reducer. embedding_ranks: pipeline ranks with one.
    """

    inv_freq: torch.Tensor

    def __init__(
        self,
        config: DeepSeekConfig,
        mesh: Mesh,
        layers: range,
        first: bool,
        last: bool,
        options: ModelOptions,
        embedding_ranks: tuple[int, ...] = (),
        embedding: VocabularyParallelEmbedding | None = None,
    ):
        super().__init__()
        self.config, self.options, self.tp, self.cp = config, options, mesh.tp, mesh.cp
        self.first, self.last = first, last
        inv_freq, self.rotary_factor = rotary_frequencies(config)
        self.register_buffer("inv_freq", inv_freq.to(mesh.device), persistent=False)
        mtp_layers = range(config.num_hidden_layers, config.num_layers_with_mtp) if last else range(0)
        self.embed_tokens: VocabularyParallelEmbedding | None = None
        if first or mtp_layers:
            self.embed_tokens = embedding or VocabularyParallelEmbedding(
                config.vocab_size, config.hidden_size, mesh, embedding_ranks
            )
        self.layers = nn.ModuleDict({str(i): Block(config, mesh, i, options) for i in layers})
        if last:
            self.norm = SequenceRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.lm_head = VocabularyParallelHead(config.vocab_size, config.hidden_size, mesh)
        self.layers.update({str(i): MTPBlock(config, mesh, i, options) for i in mtp_layers})
        self._main, self._mtp = [str(i) for i in layers], [str(i) for i in mtp_layers]

    def forward(self, x_lbh: torch.Tensor | None, batch: MicroBatch) -> torch.Tensor:
        """Activations for the next stage [l, b, h]; on the last stage the loss, a scalar to differentiate.

        x_lbh: the previous stage's output, None on the first. The loss is this micro-batch's part of the global
        batch's, of this context rank's positions; parts that are reported are in `batch.losses` (on one tp rank where
        all have the same).
        """
        hidden = self.hidden(x_lbh, batch)
        return self.loss(hidden, batch) if self.last else hidden

    def parameters_in_forward_order(self) -> list[tuple[str, nn.Parameter]]:
        """Global name and parameter by first use: MTP layers after the head, which the main loss has used before them.

        Backward completes gradients in the reverse of this order.
        """
        mtp = tuple(f"layers.{name}." for name in self._mtp)
        return sorted(self.named_parameters(), key=lambda named: named[0].startswith(mtp))

    def hidden(self, x_lbh: torch.Tensor | None, batch: MicroBatch) -> torch.Tensor:
        """Through the blocks of this stage: [l, b, h]."""
        if batch.k_rotation is None:
            batch.k_rotation = rotation(batch.positions, self.inv_freq, self.rotary_factor)
            batch.q_rotation = context_part(batch.k_rotation, self.cp, dim=0)
            if batch.documents is not None:
                batch.attention_mask = document_mask(batch.documents, self.cp)
        if x_lbh is None:
            x_lbh = self._embed(batch.tokens)
        for name in self._main:
            x_lbh = self._block(self.layers[name], x_lbh, batch)
        return x_lbh

    def loss(self, x_lbh: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Next-token loss plus λ/D times the MTP losses, each a sum divided by the global batch's count."""
        assert batch.denominators is not None, "set_denominators runs before the first forward"
        hidden_lbh = self.norm(x_lbh)
        total = self._token_loss("lm", hidden_lbh, batch.labels, batch.loss_mask, batch.denominators.tokens, batch)
        if self.options.mtp_hidden == "before-norm":
            hidden_lbh = x_lbh
        for depth, name in enumerate(self._mtp, start=1):
            layer = self.layers[name]
            assert isinstance(layer, MTPBlock)
            joined = layer.join(hidden_lbh, self._embed(batch.mtp_tokens(depth)))
            output_lbh = self._block(layer, joined, batch)
            normed_lbh = layer.shared_head.norm(output_lbh)
            hidden_lbh = normed_lbh if self.options.mtp_hidden == "after-norm" else output_lbh
            depth_loss = self._token_loss(
                f"mtp_{depth}",
                normed_lbh,
                batch.mtp_labels(depth),
                batch.mtp_mask(depth),
                batch.denominators.mtp_tokens[depth - 1],
                batch,
            )
            total = total + self.options.mtp_loss_scaling_factor / len(self._mtp) * depth_loss
        return total

    def _embed(self, tokens_bs: torch.Tensor) -> torch.Tensor:
        """This rank's part [l, b, h] of the whole sequence's embedding."""
        assert self.embed_tokens is not None
        return self.embed_tokens(context_part(tokens_bs, self.cp, dim=1))

    def _block(self, block: nn.Module, x_lbh: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return recomputed(block, x_lbh, batch) if self.options.recompute == "full" else block(x_lbh, batch)

    def _token_loss(
        self,
        name: str,
        hidden_lbh: torch.Tensor,
        labels_bs: torch.Tensor,
        mask_bs: torch.Tensor,
        count: torch.Tensor,
        batch: MicroBatch,
    ) -> torch.Tensor:
        labels_bs, mask_bs = (context_part(x_bs, self.cp, dim=1) for x_bs in (labels_bs, mask_bs))
        logits_nv = self.lm_head(hidden_lbh).flatten(0, 1)
        loss_n = vocabulary_parallel_cross_entropy(
            logits_nv, labels_bs.t().flatten(), self.lm_head.valid.start, self.tp
        )
        loss = (loss_n * mask_bs.t().flatten()).sum() / count
        if self.tp.is_first:
            batch.record(name, loss)
        return loss


def build_stages(
    config: DeepSeekConfig,
    mesh: Mesh,
    placement: tuple[int, ...],
    options: ModelOptions,
    seed: int,
    layer_counts: tuple[int, ...] | None = None,
) -> dict[int, DeepSeekStage]:
    """The stages of this rank, initialised from `seed` and global names. Collective (copies of the embedding meet).

    placement: the pipeline rank of every stage; layer_counts: blocks of every stage, evenly when None. Parameters
    are fp32 on the mesh's device. Raises ValueError where the counts don't fit the model.
    """
    layers = config.num_hidden_layers
    if layer_counts is None:
        layer_counts = balanced(ModelCosts((1.0,) * layers, 0.0, 0.0), placement)
    check_counts(layer_counts, layers, len(placement), f"a pipeline of {list(layer_counts)} layers")
    embedding_ranks = tuple(dict.fromkeys((placement[0], placement[-1]))) if config.num_mtp_layers else ()
    if len(embedding_ranks) < 2:
        embedding_ranks = ()
    else:
        mesh.copies(embedding_ranks)
    stages: dict[int, DeepSeekStage] = {}
    for stage, numbers in enumerate(as_ranges(layer_counts)):
        if placement[stage] != mesh.pp.rank:
            continue
        first, last = stage == 0, stage == len(placement) - 1
        shared = stages[0].embed_tokens if last and 0 in stages else None
        with torch.device(mesh.device):
            module = DeepSeekStage(config, mesh, numbers, first, last, options, embedding_ranks, shared)
        initialise(module.named_parameters(), mesh, seed, config.initializer_range)
        stages[stage] = module
    return stages
