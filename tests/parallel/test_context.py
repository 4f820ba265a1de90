"""Zig-zag parts of a sequence: who holds what, and the gather with its gradient against the whole tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallel.context import chunk_spans, context_part, gather_context, places_of_chunks
from parallel.mesh import Axis, Layout, Mesh

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_parts_are_the_sequence_and_cost_attention_the_same(ranks: int) -> None:
    length = 2 * ranks * 5
    held, pairs = [], set()
    for rank in range(ranks):
        positions = [i for start, end in chunk_spans(length, ranks, rank) for i in range(start, end)]
        assert positions == sorted(positions) and len(positions) == length // ranks
        held += positions
        pairs.add(sum(i + 1 for i in positions))  # position i attends to i + 1 keys
    assert sorted(held) == list(range(length))
    assert len(pairs) == 1


def test_the_chunks_of_two_and_three_ranks() -> None:
    assert [chunk_spans(8, 2, rank) for rank in range(2)] == [[(0, 2), (6, 8)], [(2, 4), (4, 6)]]
    assert chunk_spans(12, 3, 1) == [(2, 4), (8, 10)]
    # Rank order of the chunks on three ranks: 0 5 | 1 4 | 2 3.
    assert places_of_chunks(3) == [0, 2, 4, 5, 3, 1]


def test_a_sequence_that_cannot_be_cut_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"10 tokens isn't divisible into the 4 chunks of .* 2: use a multiple of 4"):
        chunk_spans(10, 2, 0)


def test_on_one_rank_nothing_is_copied() -> None:
    axis, x = Axis("cp", (0,), 0), torch.randn(7, 3)
    assert context_part(x, axis, dim=0) is x
    assert gather_context([x, x], axis)[1] is x


def gather_pair(seed: int) -> dict[str, float]:
    """The largest differences to the whole: each rank weighs the gathered sequence otherwise."""
    mesh = Mesh.create(Layout(cp=torch.distributed.get_world_size()))
    cp = mesh.cp
    torch.manual_seed(seed)
    whole = [torch.randn(6 * cp.size, 2, width, dtype=torch.float64) for width in (5, 3)]
    weights = [torch.randn(cp.size, *x.shape, dtype=torch.float64) for x in whole]
    mine = [context_part(x, cp, dim=0).requires_grad_() for x in whole]
    gathered = gather_context([x.tanh() for x in mine], cp)
    sum((weight[cp.rank] * x).sum() for weight, x in zip(weights, gathered, strict=True)).backward()  # type: ignore[union-attr]

    found = {}
    for name, x, weight, part, got in zip(("latent", "key"), whole, weights, mine, gathered, strict=True):
        leaf = x.clone().requires_grad_()
        (weight.sum(0) * leaf.tanh()).sum().backward()
        assert leaf.grad is not None and part.grad is not None
        found[name] = float((got - x.tanh()).detach().abs().max())
        found[f"{name}'s gradient"] = float((part.grad - context_part(leaf.grad, cp, dim=0)).abs().max())
    size = whole[0].shape[0] // cp.size * 2 * (5 + 3) * 8
    sent = {key: (entry.calls, entry.bytes) for key, entry in mesh.ledger.entries.items()}
    assert sent == {
        ("cp", "all_gather"): (1, size * (cp.size - 1)),
        ("cp", "reduce_scatter"): (1, size * (cp.size - 1)),
    }
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_gather_restores_the_order_and_sums_gradients(run_ranks: RunRanks, seed: int, ranks: int) -> None:
    for rank, differences in enumerate(run_ranks(ranks, gather_pair, seed)):
        for name, difference in differences.items():
            assert difference < 1e-12, f"{name} on rank {rank}"
