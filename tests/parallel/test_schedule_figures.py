"""Every named schedule is legal at any size, keeps no more than it promises, and idles as published."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.pipeline.catalogue import MINIMUM_MICROBATCHES, SCHEDULES, placement_of
from parallel.pipeline.check import check
from parallel.pipeline.make import make_schedule
from parallel.pipeline.schedule import Kind, Schedule, peak_activations
from parallel.pipeline.simulate import Costs, ShareCosts, Timeline, critical_path, simulate


class Figures(NamedTuple):
    """What is published at F = I = W = 1; `at_most`: which of "idle" and "peak" are upper bounds, not exact."""

    wall_idle: float
    span_idle: float
    peak: float
    at_most: tuple[str, ...] = ()


def published(name: str, p: int, m: int, v: int) -> Figures:
    """Idle time for m >= 2p (interleaved: also a multiple of p), peak activations for any m."""
    return {
        "gpipe": Figures(3 * (p - 1), 3 * (p - 1), m),
        "1f1b": Figures(3 * (p - 1), 3 * (p - 1), p),
        "interleaved": Figures(3 * (p - 1) / v, 3 * (p - 1) / v, p * (1 + (p - 1) / (p * v))),
        "zb-h1": Figures(p - 1, p - 1, p),
        "zb-h2": Figures(p - 1, 0, 2 * p - 1),
        "zb-v": Figures((p - 1) / 2, 0, p),
        # Bounds: half of 1F1B's idle time, and two thirds.
        "v-half": Figures(3 * (p - 1) / 2, 3 * (p - 1) / 2, p / 2 + 1, ("idle", "peak")),
        "v-min": Figures(2 * (p - 1), 2 * (p - 1), p / 3 + 4 / 3, ("idle", "peak")),
        "dualpipe-v": Figures((p - 1) / 2, (p - 1) / 2, p + 0.5),
    }[name]


def timeline(schedule: Schedule, share: ShareCosts) -> Timeline:
    return simulate(schedule, Costs.even(schedule.placement, share))


def verify(name: str, p: int, m: int, v: int | None = None) -> None:
    """Make the table and hold it against everything that is known of it."""
    schedule = make_schedule(name, p, m, v)
    check(schedule)
    assert schedule.placement == placement_of(name, p, v)
    chunks = schedule.stages // p
    figures = published(name, p, m, chunks)
    peak = max(peak_activations(schedule))
    assert schedule.promised_peak == pytest.approx(min(figures.peak, m))
    assert peak <= schedule.promised_peak + 1e-9
    if m >= 2 * p and "peak" not in figures.at_most:
        assert peak == pytest.approx(figures.peak)

    line = timeline(schedule, ShareCosts(1, 1, 1))
    walls = [line.wall_idle(rank) for rank in range(p)]
    span = max(line.span_idle(rank) for rank in range(p))
    assert max(walls) - min(walls) < 1e-9  # all have the same work
    assert walls[0] <= 3 * (p - 1) + 1e-9  # never worse than 1F1B, however few micro-batches
    if m < 2 * p or name == "interleaved" and m % p:
        return
    if "idle" in figures.at_most:
        assert walls[0] <= figures.wall_idle + 1e-9 and span <= figures.span_idle + 1e-9
    else:
        assert (walls[0], span) == pytest.approx((figures.wall_idle, figures.span_idle), abs=1e-9)


NAMED = [(name, v) for name, entry in SCHEDULES.items() for v in ((1, 2, 3, 4) if entry.chunks is None else (None,))]


@pytest.mark.parametrize("name, v", NAMED)
def test_figures_are_those_published(name: str, v: int | None) -> None:
    """From twice as many micro-batches as ranks on, for ranks of every remainder by two and three."""
    for p in (1, 2, 3, 4, 5, 6, 9, 16):
        verify(name, p, 2 * p, v)
    for m in (9, 10, 12):
        verify(name, 4, m, v)


@settings(max_examples=40)
@given(st.sampled_from(NAMED), st.integers(2, 16), st.integers(MINIMUM_MICROBATCHES, 64))
def test_any_size_is_legal_and_keeps_its_promise(named: tuple[str, int | None], p: int, m: int) -> None:
    verify(named[0], p, m, named[1])


@pytest.mark.full
@pytest.mark.parametrize("p", range(2, 17))
@pytest.mark.parametrize("name, v", NAMED)
def test_all_sizes_are_legal_and_idle_as_published(name: str, v: int | None, p: int) -> None:
    for m in range(MINIMUM_MICROBATCHES, 65):
        verify(name, p, m, v)


TIMES = st.integers(1, 20)


@settings(max_examples=25)
@given(st.integers(2, 8), TIMES, TIMES, TIMES, st.integers(0, 3))
def test_idle_time_follows_the_formula_for_any_times(p: int, f: int, b: int, w: int, more: int) -> None:
    """(p-1)(F+B+W) without split backward passes, divided by the chunks when interleaved."""
    expected = (p - 1) * (f + b + w)
    for name, v, m in (("gpipe", 1, 2 * p + more), ("1f1b", 1, 2 * p + more), ("interleaved", 3, (2 + more) * p)):
        line = timeline(make_schedule(name, p, m, v), ShareCosts(f, b, w))
        assert max(line.span_idle(rank) for rank in range(p)) == pytest.approx(expected / v)
        assert line.wall_idle(0) == pytest.approx(expected / v)


@settings(max_examples=25)
@given(st.integers(2, 8), TIMES, TIMES, TIMES, st.integers(0, 12))
def test_zero_bubble_idle_time_follows_its_formula(p: int, f: int, b: int, w: int, more: int) -> None:
    """(p-1)(F+B-W) and (p-1)(F+B-2W), as long as W is no longer than F, and the second isn't negative.

    A longer W delays the forward behind it, and the formulas are no longer reached.
    """
    w = min(w, f)
    h1 = timeline(make_schedule("zb-h1", p, 2 * p + more), ShareCosts(f, b, w))
    assert max(h1.span_idle(rank) for rank in range(p)) == pytest.approx((p - 1) * (f + b - w))
    w = min(w, (f + b) // 2)
    h2 = timeline(make_schedule("zb-h2", p, 2 * p + more), ShareCosts(f, b, w))
    assert max(h2.span_idle(rank) for rank in range(p)) == pytest.approx((p - 1) * (f + b - 2 * w), abs=1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_forward_only_is_legal(name: str) -> None:
    """Evaluation runs the same table without backward actions."""
    for p, m in ((1, 2), (3, 1), (4, 8), (5, 7)):
        forward = make_schedule(name, p, m).forward_only()
        check(forward)
        assert {action.kind for row in forward.actions for action in row} == {Kind.FORWARD}


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
@pytest.mark.parametrize("send", [0.0, 0.3, 2.0])
def test_actions_of_the_critical_path_abut_from_0_to_the_makespan(name: str, send: float) -> None:
    schedule = make_schedule(name, 3, 7)
    stages = range(schedule.stages)
    # Uneven, so that no two ways to the end are equally long.
    forward, inputs, weights = (tuple(of + 0.1 * (s * s % 7) for s in stages) for of in (0.5, 0.61, 0.43))
    costs = Costs(forward, inputs, weights, send, (1.0,) * len(stages))
    line = simulate(schedule, costs)
    rows = zip(schedule.actions, line.spans, strict=True)
    spans = {action: span for row, times in rows for action, span in zip(row, times, strict=True)}
    path = critical_path(line, costs)
    messages = 0
    for before, after in zip(path, path[1:], strict=False):
        away = schedule.placement[before.stage] != schedule.placement[after.stage]
        messages += away
        assert spans[before].end + away * send == spans[after].start, (str(before), str(after))
    assert spans[path[0]].start == 0.0
    assert spans[path[-1]].end == line.makespan
    assert messages >= 2 and sum(map(costs.of, path)) + messages * send == pytest.approx(line.makespan)
