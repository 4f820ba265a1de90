"""The schedule `auto`: legal, within its memory, never slower than a named table that fits, the same in any process.

Random costs and limits are drawn fresh from a printed seed, except where a test says why not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.pipeline import local_search, patterns
from parallel.pipeline.catalogue import SCHEDULES
from parallel.pipeline.check import check
from parallel.pipeline.local_search import improve_rows
from parallel.pipeline.make import make_schedule
from parallel.pipeline.one_stage import gpipe
from parallel.pipeline.rows import Problem, Rows, ends_of, join_backwards, makespan, to_rows, to_schedule
from parallel.pipeline.schedule import Kind, Schedule, peak_activations
from parallel.pipeline.search import EFFORT, search
from parallel.pipeline.simulate import Costs, ShareCosts, simulate
from parallel.pipeline.v_shaped import v_placement

LITTLE = 50_000  # actions timed: enough for a legal table, not for the fastest one
ROUNDING = 1 + 1e-9

times = st.floats(0.1, 3.0)
costs_drawn = st.builds(ShareCosts, times, times, times, st.floats(0.0, 1.0))


def time_of(schedule: Schedule, costs: ShareCosts) -> float:
    return simulate(schedule, Costs.even(schedule.placement, costs)).makespan


def named_tables(ranks: int, microbatches: int) -> list[Schedule]:
    """Every table that has a name, interleaved with two to four chunks."""
    return [
        make_schedule(name, ranks, microbatches, chunks)
        for name, entry in SCHEDULES.items()
        for chunks in ((2, 3, 4) if entry.chunks is None else (None,))
    ]


def random_step(random: Random) -> tuple[int, int, ShareCosts, float]:
    """Ranks, micro-batches, times and a limit of memory as they may come."""
    ranks = random.randint(2, 8)
    forward, backward, weight = (random.uniform(0.5, 2) for _ in range(3))
    costs = ShareCosts(forward, backward, weight, random.uniform(0, 0.5))
    return ranks, random.randint(2 * ranks, 4 * ranks), costs, random.uniform(ranks / 3 + 4 / 3, 2 * ranks)


def strictly_better(random: Random, sets: int, effort: int) -> int:
    """For how many of the random steps `auto` beats every named table that fits; asserts that it never loses."""
    better = 0
    for _ in range(sets):
        ranks, microbatches, costs, limit = random_step(random)
        found = search(ranks, microbatches, costs, limit, effort=effort)
        check(found)
        assert max(peak_activations(found)) <= limit
        fitting = [table for table in named_tables(ranks, microbatches) if max(peak_activations(table)) <= limit]
        best_named = min(time_of(table, costs) for table in fitting)
        time = time_of(found, costs)
        assert time <= best_named * ROUNDING, (ranks, microbatches, costs, limit)
        better += time < best_named * (1 - 1e-6)
    return better


@settings(max_examples=25)
@given(st.integers(1, 5), st.integers(1, 9), costs_drawn, st.floats(1.0, 10.0))
def test_any_costs_and_limit_give_a_legal_table_no_slower_than_named_ones(
    ranks: int, microbatches: int, costs: ShareCosts, limit: float
) -> None:
    found = search(ranks, microbatches, costs, limit, effort=LITTLE)
    check(found)
    assert found.microbatches == microbatches and found.ranks == ranks
    assert max(peak_activations(found)) <= limit * ROUNDING
    for table in named_tables(ranks, microbatches):
        if max(peak_activations(table)) <= limit * ROUNDING:
            assert time_of(found, costs) <= time_of(table, costs) * ROUNDING, table.name


def test_faster_than_all_named_tables_for_a_quarter_of_random_costs(seed: int) -> None:
    assert strictly_better(Random(seed), 12, LITTLE) >= 3


@pytest.mark.full
def test_faster_than_all_named_tables_for_a_quarter_of_200_random_costs(seed: int) -> None:
    assert strictly_better(Random(seed), 200, EFFORT) >= 50


def test_finds_the_v_where_all_passes_take_the_same_time() -> None:
    """With 1F1B's memory the floor is half a forward for each rank but one: ZB-V's published figure."""
    found = search(4, 8, ShareCosts(), 4.0, effort=LITTLE)
    assert found.placement == v_placement(4)
    assert time_of(found, ShareCosts()) == pytest.approx(25.5)


def test_equal_in_another_process_with_other_hashes() -> None:
    """All ranks search for themselves; a single difference would be a deadlock."""
    code = (
        "from parallel.pipeline.search import search; from parallel.pipeline.simulate import ShareCosts;"
        f"print(search(3, 7, ShareCosts(1.1, 1.7, 0.6, 0.2), 3.5, effort={LITTLE}))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    uncached = search.__wrapped__
    here = {str(uncached(3, 7, ShareCosts(1.1, 1.7, 0.6, 0.2), 3.5, effort=LITTLE)) + "\n" for _ in range(2)}
    assert len(printed | here) == 1


@pytest.mark.parametrize(
    "placement",
    [(0, 1, 2), (0, 1, 2, 2, 1, 0), (0, 1, 2) * 2, (0, 1, 2) * 3, (0, 1, 2, 2, 1, 0, 0, 1, 2), (2, 0, 1), (0, 0, 1, 1)],
)
@pytest.mark.parametrize("microbatches", [1, 5, 6])
def test_keeps_a_given_placement(placement: tuple[int, ...], microbatches: int) -> None:
    ranks = max(placement) + 1
    found = search(ranks, microbatches, ShareCosts(0.7, 1.2, 0.9, 0.1), ranks, placement, effort=LITTLE)
    check(found)
    assert found.placement == placement


@pytest.mark.parametrize(
    ("given", "allowed"), [({"chunks": 1}, {1}), ({"chunks": 3}, {3}), ({"most_stages": 7}, {1, 2})]
)
def test_holds_as_many_stages_as_asked(given: dict[str, int], allowed: set[int]) -> None:
    found = make_schedule("auto", 3, 6, **given)  # type: ignore[arg-type]
    assert found.stages // found.ranks in allowed


def test_refuses_what_cannot_be_and_names_what_can() -> None:
    with pytest.raises(ValueError, match=r"auto on 3 ranks can't keep within 0\.9 .* smallest limit that works is 1$"):
        search(3, 4, ShareCosts(), 0.9)
    for placement in ((0, 1, 2), (0, 1, 2, 2, 1, 0), (0, 1, 2) * 4):
        check(search(3, 4, ShareCosts(), 1.0, placement, effort=LITTLE))
    check(search(3, 4, ShareCosts(), float("inf"), effort=LITTLE))
    with pytest.raises(ValueError, match=r"as many stages on each of its 2 ranks, got \[2, 1\]"):
        search(2, 4, ShareCosts(), 2.0, (0, 1, 0))
    with pytest.raises(ValueError, match="finite times"):
        search(2, 4, ShareCosts(1.0, float("nan"), 1.0), 2.0)
    with pytest.raises(ValueError, match="at least 1 stage a rank, got"):
        make_schedule("auto", 2, 4, 0)
    with pytest.raises(ValueError, match="at least 1 pipeline rank and 1 micro-batch, got 2 and 0"):
        make_schedule("auto", 2, 0)


def test_effort_bounds_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The actions of all tables that the search times, beyond those of the tables that it starts from."""
    timed = {"all": 0}

    def place_counted(problem: Problem, orders: Rows, overrun: float) -> tuple[float, Rows]:
        timed["all"] += 3 * problem.microbatches * problem.stages
        return place(problem, orders, overrun)

    def ends_counted(problem: Problem, rows: Rows) -> list[list[float]] | None:
        timed["all"] += 3 * problem.microbatches * problem.stages
        return ends_of(problem, rows)

    place = patterns.place_weight_gradients
    monkeypatch.setattr(patterns, "place_weight_gradients", place_counted)
    monkeypatch.setattr(local_search, "ends_of", ends_counted)
    costs = ShareCosts(1.3, 1.0, 0.8, 0.3)
    search.__wrapped__(4, 8, costs, 3.3, effort=0)
    start = timed["all"]
    timed["all"] = 0
    search.__wrapped__(4, 8, costs, 3.3, effort=200_000)
    assert start < timed["all"] <= start + 200_000


@given(st.integers(1, 5), st.integers(1, 9), costs_drawn)
@settings(max_examples=25)
def test_rows_are_timed_as_the_simulator_does(ranks: int, microbatches: int, costs: ShareCosts) -> None:
    """Splitting makes no table slower, joining neither, and none is faster than the bound."""
    for table in named_tables(ranks, microbatches):
        problem = Problem(microbatches, table.placement, costs, microbatches)
        rows = to_rows(table)
        split = to_schedule(problem, rows, "split")
        check(split)
        assert all(action.kind is not Kind.BACKWARD for row in split.actions for action in row)
        assert makespan(problem, rows) == pytest.approx(time_of(split, costs))
        assert problem.lower_bound <= makespan(problem, rows) * ROUNDING
        assert makespan(problem, rows) <= time_of(table, costs) * ROUNDING
        joined = to_schedule(problem, join_backwards(problem, rows), "joined")
        check(joined)
        assert time_of(joined, costs) <= time_of(split, costs) * (1 + 1e-8)


def test_moves_on_the_critical_path_shorten_a_bad_table(seed: int) -> None:
    """GPipe without a limit of memory comes close to the bound, move by move."""
    problem = Problem(6, (0, 1, 2), ShareCosts(1.0, 1.0, 1.0, 0.1), 6.0)
    rows = to_rows(gpipe(3, 6))
    before = makespan(problem, rows)
    after, improved = improve_rows(problem, rows, 2000, Random(seed))
    check(to_schedule(problem, improved, "improved"))
    assert after == makespan(problem, improved)
    assert after - problem.lower_bound < (before - problem.lower_bound) / 2
