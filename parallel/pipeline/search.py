"""The schedule `auto`: the fastest table that can be found for given times and a limit of memory.

Lives here: `search`. Imports the pure files of `parallel/pipeline`; no torch. How: the named tables that fit, with
their W's placed anew, and repeating patterns (`patterns`), whose spacing and then whose single actions
(`local_search`) are changed as long as that helps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import inf, isfinite
from random import Random

from parallel.pipeline.catalogue import SCHEDULES
from parallel.pipeline.local_search import improve_rows
from parallel.pipeline.patterns import Pattern, improve_pattern, place_weight_gradients, simple_patterns, table_of
from parallel.pipeline.rows import (
    TOLERANCE,
    Problem,
    Rows,
    fits,
    join_backwards,
    makespan,
    to_rows,
    to_schedule,
)
from parallel.pipeline.schedule import Schedule
from parallel.pipeline.simulate import ShareCosts
from parallel.pipeline.v_shaped import v_placement

EFFORT = 1_000_000
"""Actions timed in changed tables. A number, not a time, so that all ranks of a job find the same table.

A third of it finds steps 0.3 % longer, half as much again none shorter by 0.1 % (means of 14 random steps).
"""

MOST_CHANGES = 2000
"""Changes tried of one table in one step of the search: a small one is at its best long before the effort is spent."""

MOST_FIRST_ACTIONS = 150_000
"""Actions timed of the patterns that a search starts from, on each placement: fewer patterns where steps are long."""

MOST_CHUNKS = 4
"""Stages a rank holds at most, unless a placement says otherwise."""


@lru_cache(maxsize=8)
def search(
    ranks: int,
    microbatches: int,
    costs: ShareCosts,
    memory_limit: float,
    placement: tuple[int, ...] | None = None,
    chunks: tuple[int, ...] = tuple(range(1, MOST_CHUNKS + 1)),
    effort: int = EFFORT,
) -> Schedule:
    """The fastest table found, by `simulate`'s rules; equal arguments give equal tables, in any process.

    memory_limit: activations that a rank may keep, in its share of one micro-batch; placement: the rank of each stage,
    None: free to choose; chunks: how many stages a rank may hold, where that is free. Never slower than a named table
    of these placements that fits. Raises ValueError, naming the numbers and what works, where nothing fits.
    """
    _check(ranks, microbatches, costs, memory_limit, placement, chunks)
    placements = (placement,) if placement else tuple(_placements(ranks, chunks))
    attempts = [_Attempt(Problem(microbatches, each, costs, memory_limit)) for each in placements]
    _spread(attempts, effort // 3, len(attempts), _Attempt.improve_pattern)
    _spread(attempts, effort // 3, 2, _Attempt.improve_pattern)
    _spread(attempts, effort // 3, 2, _Attempt.improve_rows)
    shortest = min(attempt.makespan for attempt in attempts) * (1 + TOLERANCE)
    best = next(attempt for attempt in attempts if attempt.makespan <= shortest)
    return to_schedule(best.problem, join_backwards(best.problem, best.rows), "auto")


class _Attempt:
    """The best table so far on one placement, and the pattern to go on from."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.makespan = inf
        self.rows: Rows = []
        self.pattern: Pattern | None = None
        self._random = Random(0)
        for rows in _known_tables(problem):
            self._keep(makespan(problem, rows), rows)
        found = inf
        patterns = list(simple_patterns(problem))
        actions = 3 * problem.microbatches * problem.stages
        for pattern in patterns[:: max(1, len(patterns) * actions // MOST_FIRST_ACTIONS)]:
            time, rows = table_of(problem, pattern)
            self._keep(time, rows)
            if time < found:
                found, self.pattern = time, pattern

    def improve_pattern(self, evaluations: int) -> None:
        if self.pattern is not None:
            time, rows, self.pattern = improve_pattern(self.problem, self.pattern, evaluations, self._random)
            self._keep(time, rows)

    def improve_rows(self, evaluations: int) -> None:
        self._keep(*improve_rows(self.problem, self.rows, evaluations, self._random))

    def _keep(self, time: float, rows: Rows) -> None:
        if time < self.makespan:
            self.makespan, self.rows = time, rows


def _spread(attempts: list[_Attempt], effort: int, most: int, improve: Callable[[_Attempt, int], None]) -> None:
    """Spend the effort on the `most` best attempts, but not where the lower bound says that none can win."""
    best = min(attempt.makespan for attempt in attempts)
    hopeful = [a for a in attempts if a.problem.lower_bound < best * (1 - TOLERANCE)]
    hopeful = sorted(hopeful, key=lambda attempt: attempt.makespan)[:most]
    for attempt in hopeful:
        actions = 3 * attempt.problem.microbatches * attempt.problem.stages
        improve(attempt, min(MOST_CHANGES, effort // (len(hopeful) * actions)))


def _known_tables(problem: Problem) -> Iterator[Rows]:
    """Tables on the problem's placement within its limit: one micro-batch at a time, and the named ones."""
    stages, ranks, microbatches = problem.stages, problem.ranks, problem.microbatches
    passes = [*range(stages), *(a for s in reversed(range(stages)) for a in (stages + s, 2 * stages + s))]
    alone = [[action for action in passes if problem.rank[action] == rank] * microbatches for rank in range(ranks)]
    yield alone
    for entry in SCHEDULES.values():
        chunks = problem.chunks
        if entry.chunks not in (None, chunks) or entry.placement(ranks, chunks) != problem.placement:
            continue
        rows = to_rows(entry.build(ranks, microbatches, chunks))
        if all(fits(problem, row) for row in rows):
            yield rows
        orders = [[action for action in row if action < 2 * stages] for row in rows]
        for overrun in (0.0, 0.5):
            time, placed = place_weight_gradients(problem, orders, overrun)
            if time < inf:
                yield placed


def _placements(ranks: int, chunks: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """One stage a rank, the V, and interleaved stages; of equally fast tables the first one's is taken."""
    for number in sorted(chunks):
        if number == 2 and ranks > 1:
            yield v_placement(ranks)
        yield tuple(range(ranks)) * number


def _check(
    ranks: int,
    microbatches: int,
    costs: ShareCosts,
    memory_limit: float,
    placement: tuple[int, ...] | None,
    chunks: tuple[int, ...],
) -> None:
    """Raise ValueError where there is no table to search for."""
    if ranks < 1 or microbatches < 1:
        raise ValueError(
            f"auto needs at least 1 pipeline rank and 1 micro-batch, got {ranks} and {microbatches}: use 1"
        )
    if not all(isfinite(time) and time >= 0 for time in costs) or sum(costs[:3]) == 0:
        raise ValueError(f"auto needs finite times of at least 0, and work above 0, got {tuple(costs)}: measure them")
    if not isfinite(sum(costs) * MOST_CHUNKS * ranks * microbatches):
        raise ValueError(f"auto can't add up times as large as {max(costs):g}: give them in another unit")
    if not memory_limit >= 1:
        raise ValueError(
            f"auto on {ranks} ranks can't keep within {memory_limit:g} micro-batches' activations: when a micro-batch "
            "turns back each rank keeps its own share of it, so the smallest limit that works is 1"
        )
    if placement is not None:
        held = [placement.count(rank) for rank in range(ranks)]
        if min(held) == 0 or len(set(held)) > 1 or sum(held) != len(placement):
            raise ValueError(
                f"auto needs a placement with as many stages on each of its {ranks} ranks, got {held} of "
                f"{len(placement)} stages: place one on each"
            )
    elif not chunks or min(chunks) < 1:
        raise ValueError(f"auto needs at least 1 stage a rank, got {chunks}: use 1 to {MOST_CHUNKS}")
