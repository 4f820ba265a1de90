"""The grid of ranks: every axis cuts the world into the groups it should, as data and as real communicators."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel.comm import all_reduce_
from parallel.mesh import Layout, Mesh

AXES = ("world", "tp", "cp", "dp", "pp", "dp_cp", "stage", "sequence", "ep", "edp")

CHANNELS: list[tuple[Any, bool]] = [(what, rising) for what in ("activations", "gradients") for rising in (True, False)]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, int]:
    tp, pp, cp, dp = (draw(st.integers(1, 5)) for _ in range(4))
    ep = draw(st.sampled_from([n for n in range(1, tp * cp * dp + 1) if tp * cp * dp % n == 0]))
    return Layout(tp, pp, cp, ep), tp * pp * cp * dp


def place_in(partition: list[list[int]]) -> dict[int, tuple[int, int]]:
    """rank -> (number of its group, its index there)."""
    return {rank: (g, i) for g, group in enumerate(partition) for i, rank in enumerate(group)}


@given(layouts())
def test_every_axis_cuts_the_world_into_equal_groups(layout_world: tuple[Layout, int]) -> None:
    layout, world = layout_world
    dp, stage = layout.dp(world), world // layout.pp
    sizes = {
        "world": world,
        "tp": layout.tp,
        "cp": layout.cp,
        "dp": dp,
        "pp": layout.pp,
        "dp_cp": dp * layout.cp,
        "stage": stage,
        "sequence": layout.cp * layout.tp,
        "ep": layout.ep,
        "edp": stage // layout.ep,
    }
    groups = layout.groups(world)
    assert groups.keys() == sizes.keys()
    for name, partition in groups.items():
        assert sorted(rank for group in partition for rank in group) == list(range(world)), name
        assert {len(group) for group in partition} == {sizes[name]}, name


@given(layouts())
def test_axes_are_the_coordinates_of_one_grid(layout_world: tuple[Layout, int]) -> None:
    """Tensor fastest, then context, data, pipeline; a combined axis runs over the product, the earlier name slowest."""
    layout, world = layout_world
    dp, tp, cp = layout.dp(world), layout.tp, layout.cp
    places = {name: place_in(partition) for name, partition in layout.groups(world).items()}
    for rank in range(world):
        index = {name: place[rank][1] for name, place in places.items()}
        assert rank == ((index["pp"] * dp + index["dp"]) * cp + index["cp"]) * tp + index["tp"]
        assert index["dp_cp"] == index["dp"] * cp + index["cp"]
        assert index["sequence"] == index["cp"] * tp + index["tp"]
        assert index["stage"] == (index["dp"] * cp + index["cp"]) * tp + index["tp"]
    varying = {"dp_cp": ("dp", "cp"), "sequence": ("cp", "tp"), "stage": ("dp", "cp", "tp")}
    grid = ("pp", "dp", "cp", "tp")
    for name in (*grid, *varying):
        fixed = [axis for axis in grid if axis not in varying.get(name, (name,))]
        for group in layout.groups(world)[name]:
            assert len({tuple(places[axis][rank][1] for axis in fixed) for rank in group}) == 1, (name, group)


@given(layouts())
def test_expert_axes_are_a_second_grid_inside_each_stage(layout_world: tuple[Layout, int]) -> None:
    layout, world = layout_world
    groups = layout.groups(world)
    stage_of, ep_of, edp_of = (place_in(groups[name]) for name in ("stage", "ep", "edp"))
    for name in ("ep", "edp"):
        for group in groups[name]:
            assert len({stage_of[rank][0] for rank in group}) == 1, f"{name} group {group} leaves its stage"
    # (stage, place on ep, place on edp) names a rank: the two axes span the stage and cross in one rank.
    assert len({(stage_of[r][0], ep_of[r][1], edp_of[r][1]) for r in range(world)}) == world
    for rank in range(world):
        assert set(groups["ep"][ep_of[rank][0]]) & set(groups["edp"][edp_of[rank][0]]) == {rank}
    # Expert-parallel ranks are neighbours: their all-to-all is the layout's largest traffic.
    assert all(group == list(range(group[0], group[0] + layout.ep)) for group in groups["ep"])


def test_the_published_layout_of_v3_is_computed_in_milliseconds() -> None:
    """2,048 GPUs, PP 16, EP 64 over 8 nodes, no tensor parallelism (2412.19437, section 3.2)."""
    layout = Layout(pp=16, ep=64)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        groups = layout.groups(2048)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.1
    assert layout.dp(2048) == 128
    assert groups["stage"][3] == list(range(384, 512))
    assert groups["ep"][7] == list(range(448, 512))
    assert [384 + 5, 448 + 5] in groups["edp"]
    assert groups["pp"][0] == list(range(0, 2048, 128))


@pytest.mark.parametrize(
    "layout, world, words",
    [
        (Layout(tp=4), 6, ["world size 6", "tp 4 x pp 1 x cp 1 = 4", "start 4 ranks"]),
        (Layout(tp=2, pp=3, cp=2), 25, ["world size 25", "tp 2 x pp 3 x cp 2 = 12", "start 24 ranks"]),
        (Layout(pp=8), 1, ["world size 1 ", "start 8 ranks"]),
        (Layout(tp=2, pp=2, ep=3), 8, ["ep 3", "4 ranks of a pipeline stage", "world 8 / pp 2", "divisors of 4"]),
        (Layout(tp=0), 4, ["tp is 0", "at least 1"]),
        (Layout(ep=-2), 4, ["ep is -2", "at least 1"]),
    ],
)
def test_a_layout_that_does_not_fit_names_the_numbers_and_the_fix(layout: Layout, world: int, words: list[str]) -> None:
    for refuse in (layout.validate, layout.dp, layout.groups):
        with pytest.raises(ValueError) as error:
            refuse(world)
        assert all(word in str(error.value) for word in words), error.value


def test_one_rank_needs_no_process_group() -> None:
    mesh = Mesh.create(Layout())
    assert mesh.coordinates() == {"pp": 0, "dp": 0, "cp": 0, "tp": 0, "ep": 0}
    for name in AXES:
        axis = getattr(mesh, name)
        assert (axis.ranks, axis.rank, axis.size, axis.group, axis.is_first, axis.is_last) == (
            (0,),
            0,
            1,
            None,
            True,
            True,
        )
    assert mesh.copies((0,)).size == 1
    with pytest.raises(ValueError, match="world size 1 is not divisible by tp 2"):
        Mesh.create(Layout(tp=2))


def members_by_all_reduce(mesh: Mesh, axis: Any) -> int:
    """A set of ranks as bits: the sum of 2**rank over the axis."""
    x = torch.tensor([2**mesh.rank])
    all_reduce_(x, axis)
    return int(x)


def groups_on_real_ranks() -> list[dict[str, Any]]:
    found = []
    for layout in (Layout(tp=2, cp=2, ep=4), Layout(pp=4)):
        mesh = Mesh.create(layout)
        axes = {name: getattr(mesh, name) for name in AXES}
        axes["copies"] = mesh.copies((layout.pp - 1, 0))
        for what, rising in CHANNELS:
            axes[f"{what} {rising}"] = mesh.channel(what, rising)
        seen: dict[str, Any] = {name: members_by_all_reduce(mesh, axis) for name, axis in axes.items()}
        seen["places"] = {name: (axis.ranks, axis.rank) for name, axis in axes.items()}
        seen["communicators"] = {name: id(axis.group) for name, axis in axes.items() if axis.group is not None}
        # Asked for again, by one rank only: had it to communicate, this would hang.
        if mesh.rank == 0:
            assert mesh.copies((0, layout.pp - 1)) is axes["copies"]
            assert mesh.channel("gradients", True) is axes["gradients True"]
        found.append(seen)
    return found


def test_communicators_join_the_ranks_of_their_axis(run_ranks: Callable[..., list[Any]]) -> None:
    results = run_ranks(8, groups_on_real_ranks)
    for number, layout in enumerate((Layout(tp=2, cp=2, ep=4), Layout(pp=4))):
        groups = layout.groups(8)
        groups |= {f"{what} {rising}": groups["pp"] for what, rising in CHANNELS}
        ends = [sorted({column[0], column[-1]}) for column in groups["pp"]]
        groups["copies"] = ends + [[r] for r in range(8) if not any(r in pair for pair in ends)]
        for rank in range(8):
            seen = results[rank][number]
            for name, partition in groups.items():
                group = next(group for group in partition if rank in group)
                assert seen[name] == sum(2**r for r in group), f"{layout}, rank {rank}, {name}"
                assert seen["places"][name] == (tuple(group), group.index(rank)), f"{layout}, rank {rank}, {name}"

    first, second = (results[5][number]["communicators"] for number in (0, 1))
    # Layout(tp=2, cp=2, ep=4) on 8 ranks: one stage; experts span tp x cp; what is left for both is dp.
    assert first["world"] == first["stage"]
    assert first["ep"] != first["sequence"], "the same ranks, but rows must not queue behind gathers"
    assert first["edp"] == first["dp"]
    assert len(set(first.values())) == 7, "world, tp, cp, dp, dp_cp, sequence, ep"
    # Layout(pp=4): one tp rank, so dp, dp_cp, stage and edp are the same pairs; messages that cross have their own.
    assert second["dp"] == second["dp_cp"] == second["stage"] == second["edp"]
    assert len({second[name] for name in ("pp", *(f"{what} {rising}" for what, rising in CHANNELS))}) == 5
