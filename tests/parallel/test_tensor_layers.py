"""Tensor-parallel layers split over 2 and 4 ranks against plain torch functions of the whole weight on one.

Each rank compares its own part; a test then looks at the largest difference by name. Everything is fp64, so that a
difference is a fault and not rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parallel.comm import all_reduce_, gather_sequence
from parallel.cross_entropy import vocabulary_parallel_cross_entropy
from parallel.mesh import Layout, Mesh
from parallel.sharding import global_slice, sharding_of, valid_part
from parallel.tensor import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    SequenceRMSNorm,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
)

RunRanks = Callable[..., list[Any]]
IN, OUT, BATCH = 7, 12, 3
# 13: the last rank is short. 5 over 4 ranks (blocks of 2), 1 over 2: the last holds none.
VOCABULARIES = (13, 5, 1)


def off(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    assert found is not None and expected is not None and found.shape == expected.shape
    return float((found - expected).abs().max()) if found.numel() else 0.0


def load(layer: nn.Module, whole: torch.Tensor, mesh: Mesh) -> None:
    """This rank's block of the whole weight; padding gets what would show at once."""
    weight = layer.weight
    with torch.no_grad():
        weight.fill_(1e3)
        valid_part(weight, sharding_of(weight), mesh).copy_(block_of(whole, weight, mesh))
    assert sharding_of(weight).global_shape(weight.shape) == tuple(whole.shape)


def block_of(whole: torch.Tensor, weight: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    sharding = sharding_of(weight)
    part = global_slice(sharding, mesh)
    return whole if sharding.split_dim is None else whole.narrow(sharding.split_dim, part.start, part.stop - part.start)


def weight_gradient_off(layer: nn.Module, expected: torch.Tensor | None, mesh: Mesh) -> float:
    """After the sum that the annotation asks for; a gradient in the padding counts as infinitely wrong."""
    weight = layer.weight
    assert expected is not None and weight.grad is not None
    sharding = sharding_of(weight)
    all_reduce_(weight.grad, sharding.gradient_axis(mesh))
    valid = valid_part(weight.grad, sharding, mesh)
    difference = off(valid, block_of(expected, weight, mesh))
    valid.zero_()
    return float("inf") if weight.grad.any() else difference


def linears_and_norm(seed: int) -> dict[str, float]:
    mesh = Mesh.create(Layout(tp=torch.distributed.get_world_size()))
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float64)
    tp = mesh.tp
    length = 2 * tp.size
    rows = slice(2 * tp.rank, 2 * tp.rank + 2)
    out = OUT // tp.size
    columns = slice(out * tp.rank, out * tp.rank + out)
    found = {}

    # Column: the input is gathered, each rank has a block of outputs (of each matrix, where two are stacked).
    for stacked in (0, 2):
        x = torch.randn(length, BATCH, IN, requires_grad=True)
        whole = torch.randn(*([stacked] if stacked else []), OUT, IN, requires_grad=True)
        y = F.linear(x, whole.flatten(0, -2)).unflatten(-1, (-1, OUT))
        grad = torch.randn_like(y)
        y.backward(grad)
        layer = ColumnParallelLinear(IN, OUT, mesh, stacked)
        load(layer, whole, mesh)
        mine = x.detach()[rows].clone().requires_grad_()
        y_local = layer(gather_sequence(mine, tp))
        y_local.backward(grad[..., columns].flatten(-2))
        name = "stacked column" if stacked else "column"
        found[name] = off(y_local, y[..., columns].flatten(-2))
        found[f"{name}, input gradient"] = off(mine.grad, x.grad[rows])  # type: ignore[index]
        found[f"{name}, weight gradient"] = weight_gradient_off(layer, whole.grad, mesh)

    # Row: each rank has a block of inputs for the whole sequence, and gets its part of the summed output.
    x = torch.randn(length, BATCH, OUT, requires_grad=True)
    whole = torch.randn(IN, OUT, requires_grad=True)
    y = F.linear(x, whole)
    grad = torch.randn_like(y)
    y.backward(grad)
    row = RowParallelLinear(OUT, IN, mesh)
    load(row, whole, mesh)
    mine = x.detach()[..., columns].clone().requires_grad_()
    y_local = row(mine)
    y_local.backward(grad[rows])
    found["row"] = off(y_local, y[rows])
    found["row, input gradient"] = off(mine.grad, x.grad[..., columns])  # type: ignore[index]
    found["row, weight gradient"] = weight_gradient_off(row, whole.grad, mesh)

    # Whole on every rank, fed a part of the sequence.
    for name, layer, shape in (
        ("replicated", ReplicatedLinear(IN, 5), (5, IN)),
        ("stacked replicated", ReplicatedLinear(IN, 5, stacked=2), (2, 5, IN)),
        ("norm", SequenceRMSNorm(IN, 1e-6), (IN,)),
    ):
        x = torch.randn(length, BATCH, IN, requires_grad=True)
        whole = torch.randn(shape, requires_grad=True)
        if name == "norm":
            y = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * whole
        else:
            y = torch.einsum("sbi,oi->sbo", x, whole.reshape(-1, IN))
        grad = torch.randn_like(y)
        y.backward(grad)
        load(layer, whole, mesh)
        mine = x.detach()[rows].clone().requires_grad_()
        y_local = layer(mine)
        y_local.backward(grad[rows])
        found[name] = off(y_local, y[rows])
        found[f"{name}, input gradient"] = off(mine.grad, x.grad[rows])  # type: ignore[index]
        found[f"{name}, weight gradient"] = weight_gradient_off(layer, whole.grad, mesh)
    return found


def vocabulary_layers(seed: int) -> dict[str, float]:
    mesh = Mesh.create(Layout(tp=torch.distributed.get_world_size()))
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float64)
    tp = mesh.tp
    length = 2 * tp.size
    rows = slice(2 * tp.rank, 2 * tp.rank + 2)
    found = {}
    for vocabulary in VOCABULARIES:
        tokens = torch.randint(vocabulary, (BATCH, length))
        whole = torch.randn(vocabulary, IN, requires_grad=True)
        y = F.embedding(tokens.t(), whole)
        grad = torch.randn_like(y)
        y.backward(grad)
        embedding = VocabularyParallelEmbedding(vocabulary, IN, mesh)
        load(embedding, whole, mesh)
        y_local = embedding(tokens)
        y_local.backward(grad[rows])
        found[f"embedding of {vocabulary}"] = off(y_local, y[rows])
        found[f"embedding of {vocabulary}, weight gradient"] = weight_gradient_off(embedding, whole.grad, mesh)

        # Head and loss together: the padding's weights of 1e3 would take all probability, had they a part in it.
        x = torch.randn(length, BATCH, IN, requires_grad=True)
        whole = torch.randn(vocabulary, IN, requires_grad=True)
        targets = torch.randint(vocabulary, (length * BATCH,))
        logits = F.linear(x, whole)
        loss = F.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
        grad = torch.randn_like(loss)
        loss.backward(grad)
        head = VocabularyParallelHead(vocabulary, IN, mesh)
        load(head, whole, mesh)
        mine = x.detach()[rows].clone().requires_grad_()
        logits_local = head(mine)
        loss_local = vocabulary_parallel_cross_entropy(logits_local.flatten(0, 1), targets, head.valid.start, tp)
        loss_local.backward(grad.float())
        found[f"logits of {vocabulary}"] = off(logits_local, logits[..., head.valid])
        # The loss is computed in fp32, whatever comes in.
        for name, difference in (
            ("loss", off(loss_local.double(), loss)),
            ("head, input gradient", off(mine.grad, x.grad[rows])),  # type: ignore[index]
            ("head, weight gradient", weight_gradient_off(head, whole.grad, mesh)),
        ):
            found[f"{name} of {vocabulary}"] = difference * 1e-7
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("layers", [linears_and_norm, vocabulary_layers])
def test_split_layers_equal_the_dense_ones(
    run_ranks: RunRanks, seed: int, layers: Callable[[int], dict[str, float]], ranks: int
) -> None:
    for rank, differences in enumerate(run_ranks(ranks, layers, seed)):
        assert differences
        for name, difference in differences.items():
            assert difference < 1e-11, f"{name} on rank {rank} is off by {difference:.1e}"


def refused() -> dict[str, str]:
    mesh = Mesh.create(Layout(tp=torch.distributed.get_world_size()))
    embedding = VocabularyParallelEmbedding(5, 3, mesh)
    tries: dict[str, Callable[[], object]] = {
        "column": lambda: ColumnParallelLinear(4, 7, mesh),
        "row": lambda: RowParallelLinear(9, 4, mesh),
        # 5 lies in the padding of the last rank's block; 6 in no block.
        **{str(token): lambda token=token: embedding(torch.tensor([[1, token]])) for token in (5, 6, -1)},
    }
    errors = {}
    for name, attempt in tries.items():
        try:
            attempt()
        except (ValueError, IndexError) as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def test_sizes_that_do_not_divide_and_ids_beyond_the_vocabulary_are_refused(run_ranks: RunRanks) -> None:
    """By every rank: one that went on would wait for the others for ever."""
    for ranks in (1, 2):
        for errors in run_ranks(ranks, refused):
            assert {name for name, text in errors.items() if text.startswith("IndexError")} == {"5", "6", "-1"}
            if ranks == 2:
                assert "output features 7 is not divisible by tensor-model-parallel-size 2" in errors["column"]
                assert "input features 9 is not divisible by tensor-model-parallel-size 2" in errors["row"]
