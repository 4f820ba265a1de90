"""Blocks of parameters: each value lies on one rank, and starts the same whatever the layout.

Pure: a mesh is stood in for by its axes, without groups.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import parallel.sharding as sharding_module
from parallel.mesh import Axis, Layout
from parallel.sharding import Sharding, global_slice, init_normal_, initialise, shard_slice, sharding_of, valid_part


def mesh_of(layout: Layout, world: int, rank: int) -> Any:
    axes = {}
    for name, partition in layout.groups(world).items():
        ranks = next(group for group in partition if rank in group)
        axes[name] = Axis(name, tuple(ranks), ranks.index(rank))
    return SimpleNamespace(**axes)


def block_shape(shape: tuple[int, ...], sharding: Sharding, ranks: int) -> tuple[int, ...]:
    if sharding.split_dim is None:
        return shape
    return tuple(-(-n // ranks) if dim == sharding.split_dim else n for dim, n in enumerate(shape))


def drawn(
    shape: tuple[int, ...], split_dim: int | None, axis: str | None, ranks: int, name: str, seed: int, std: float
) -> torch.Tensor:
    """The global tensor, put together from what each of `ranks` ranks draws; padding must be zero."""
    full = None if split_dim is None else shape[split_dim]
    sharding = Sharding(split_dim, axis, full, expert=axis == "ep")  # type: ignore[arg-type]
    parts = []
    for rank in range(ranks):
        mesh = mesh_of(Layout(**{axis: ranks} if axis else {}), ranks, rank)
        parameter = torch.nn.Parameter(torch.full(block_shape(shape, sharding, ranks), torch.nan))
        parameter.sharding = sharding  # type: ignore[attr-defined]
        init_normal_(parameter, name, mesh, seed, std)
        part = valid_part(parameter.detach(), sharding, mesh)
        parts.append(part.clone())
        part.zero_()
        assert torch.equal(parameter.detach(), torch.zeros_like(parameter)), f"padding of rank {rank} of {ranks}"
        if split_dim is None:
            assert torch.equal(parts[0], parts[-1])
    return parts[0] if split_dim is None else torch.cat(parts, split_dim)


@given(st.integers(1, 200), st.integers(1, 40))
def test_blocks_cover_everything_once(size: int, ranks: int) -> None:
    """Also with more ranks than rows: the last ranks then hold nothing."""
    blocks = [shard_slice(size, ranks, rank) for rank in range(ranks)]
    assert list(itertools.chain.from_iterable(range(size)[block] for block in blocks)) == list(range(size))
    longest = -(-size // ranks)
    assert all(0 <= block.stop - block.start <= longest for block in blocks)
    # Only the end is short: rank r's first row is r * longest wherever it holds any, so a token id finds its rank.
    assert all(block.start == rank * longest for rank, block in enumerate(blocks) if block.stop > block.start)


@pytest.mark.parametrize(
    "shape, split_dim, axis",
    [((37, 11), 0, "tp"), ((37, 11), 1, "tp"), ((2, 9, 7), 1, "tp"), ((5, 6, 7), 0, "ep"), ((3, 50), 0, "tp")],
)
@pytest.mark.parametrize("chunk", [1, 64, 1 << 20])
def test_initial_values_do_not_depend_on_the_split(
    shape: tuple[int, ...], split_dim: int, axis: str, chunk: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """chunk 1: every row is a chunk of its own (or larger than one); 64: boundaries in the middle of blocks."""
    monkeypatch.setattr(sharding_module, "_INIT_CHUNK", chunk)
    whole = drawn(shape, None, None, 1, "layers.3.weight", seed, 0.02)
    assert whole.unique().numel() == whole.numel(), "chunks repeat each other"
    for ranks in (1, 2, 3, 4, 5):
        assert torch.equal(drawn(shape, split_dim, axis, ranks, "layers.3.weight", seed, 0.02), whole), ranks


def test_values_of_a_tensor_of_several_chunks_are_normal_and_independent_of_the_split(seed: int) -> None:
    shape, std = (1031, 2053), 0.006
    assert torch.Size(shape).numel() > 2 * sharding_module._INIT_CHUNK
    whole = drawn(shape, None, None, 1, "w", seed, std)
    assert torch.equal(drawn(shape, 0, "tp", 3, "w", seed, std), whole)
    assert torch.equal(drawn(shape, 1, "tp", 2, "w", seed, std), whole)
    count = whole.numel()
    # Six standard errors: of the mean 1/sqrt(n), of the deviation 1/sqrt(2n), of the kurtosis sqrt(24/n).
    values = whole.double() / std
    assert abs(values.mean()) < 6 / count**0.5
    assert abs(values.std() - 1) < 6 / (2 * count) ** 0.5
    assert abs(values.pow(4).mean() - 3) < 6 * (96 / count) ** 0.5
    # Each row against the one before: neighbours are unlike, also across a chunk's boundary.
    likeness = (values[1:] * values[:-1]).mean(1).abs().max()
    assert likeness < 7 / shape[1] ** 0.5


def test_names_and_seeds_give_independent_values(seed: int) -> None:
    shape = (300, 70)
    variants = [("layers.1.weight", seed), ("layers.11.weight", seed), ("layers.1.weight", seed + 1), ("1", seed)]
    tensors = [drawn(shape, None, None, 1, name, number, 1.0).flatten() for name, number in variants]
    assert torch.equal(drawn(shape, None, None, 1, *variants[0], 1.0).flatten(), tensors[0])
    for a, b in itertools.combinations(tensors, 2):
        assert abs(torch.dot(a, b)) / a.numel() < 6 / a.numel() ** 0.5


def test_matrices_are_drawn_and_norm_weights_are_one(seed: int) -> None:
    names = {"norm.weight": (7,), "proj.weight": (5, 7), "experts": (2, 3, 7), "meta": (4, 4)}
    device = {name: "meta" if name == "meta" else "cpu" for name in names}
    parameters = {n: torch.nn.Parameter(torch.full(shape, torch.nan, device=device[n])) for n, shape in names.items()}
    for parameter in parameters.values():
        parameter.sharding = Sharding()  # type: ignore[attr-defined]
    initialise(parameters.items(), mesh_of(Layout(), 1, 0), seed, 0.5)
    assert torch.equal(parameters["norm.weight"].detach(), torch.ones(7))
    for name in ("proj.weight", "experts"):
        assert torch.equal(parameters[name].detach(), drawn(names[name], None, None, 1, name, seed, 0.5))


KINDS = {
    "column": Sharding(0, "tp", 10),
    "norm": Sharding(sequence_fed=True),
    "whole": Sharding(),
    "expert": Sharding(0, "ep", 10, expert=True),
    "embedding copy": Sharding(0, "tp", 10, pipeline_ranks=(0, 2)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout, world", [(Layout(2, 3, 2, 4), 24), (Layout(pp=3), 6), (Layout(tp=4, pp=3, ep=2), 12)])
def test_one_rank_counts_each_value_and_gradients_meet_those_that_hold_it(
    kind: str, layout: Layout, world: int
) -> None:
    sharding = KINDS[kind]
    meshes = [mesh_of(layout, world, rank) for rank in range(world)]
    holders: dict[Any, list[int]] = {}  # (stage, block) -> ranks; copies on other stages count as the same
    for rank, mesh in enumerate(meshes):
        if sharding.pipeline_ranks and mesh.pp.rank not in sharding.pipeline_ranks:
            continue
        stage = "copies" if sharding.pipeline_ranks else mesh.pp.rank
        part = global_slice(sharding, mesh)
        holders.setdefault((stage, part.start, part.stop), []).append(rank)
    for block, ranks in holders.items():
        assert sum(sharding.owned(meshes[rank]) for rank in ranks) == 1, block
        for rank in ranks:
            reached = set(sharding.gradient_axis(meshes[rank]).ranks)
            here = {r for r in ranks if meshes[r].pp.rank == meshes[rank].pp.rank}
            # A parameter that is whole and sees the whole sequence has the full gradient on each tp rank already.
            assert reached == (
                {r for r in here if meshes[r].tp.rank == meshes[rank].tp.rank} if kind == "whole" else here
            )


def test_a_parameter_without_annotation_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"shape \(3, 5\) has no `sharding`"):
        sharding_of(torch.nn.Parameter(torch.ones(3, 5)))
