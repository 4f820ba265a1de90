"""Tables that repeat one pattern for every micro-batch, and the search for the pattern that a step's times want.

Lives here: `Pattern`, `simple_patterns`, `improve_pattern` and what makes tables of them. Imports `rows` only. Source:
the building blocks of controllable memory (2405.15362), here with any spacing instead of multiples of one time, and
weight gradients in the gaps (2401.10241).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from random import Random

from parallel.pipeline.rows import TOLERANCE, Problem, Rows, in_channel_order


@dataclass(frozen=True)
class Pattern:
    """When one micro-batch passes the stages, and how soon the next one follows; times in units of one rank's work.

    waits: what a micro-batch waits before each of its F's (stage 0 first) and I's (last stage first), beyond what it
    must; period: from one micro-batch to the next; overrun: the part of a W that may delay the action after it.
    """

    waits: tuple[float, ...]
    period: float
    overrun: float

    def orders(self, problem: Problem) -> Rows:
        """The F's and I's of each rank by their time in the pattern. Only their order counts."""
        stages, time = problem.stages, problem.time
        passes = [*range(stages), *range(2 * stages - 1, stages - 1, -1)]
        unit = sum(problem.costs[:3])
        steps = [
            wait * unit + problem.delay[action] + (time[before] if before >= 0 else 0.0)
            for wait, action, before in zip(self.waits, passes, [-1, *passes], strict=False)
        ]
        events: list[list[tuple[float, int]]] = [[] for _ in range(problem.ranks)]
        starts = [microbatch * self.period * unit for microbatch in range(problem.microbatches)]
        for action, at in zip(passes, accumulate(steps), strict=True):
            events[problem.rank[action]] += [(at + start, action) for start in starts]
        return [[action for _, action in sorted(row)] for row in events]


def place_weight_gradients(problem: Problem, orders: Rows, overrun: float) -> tuple[float, Rows]:
    """The makespan and rows of F's and I's in this order, with W's in the gaps, else where memory forces them.

    An F for which even W's make no room waits for the rank's next I. overrun: the part of a W that may delay what
    follows it. The makespan is infinite where the limit leaves no table; the rows are then good for nothing.
    """
    stages = problem.stages
    time, source, delay, capacity = problem.time, problem.source, problem.delay, problem.capacity
    weight = time[2 * stages]
    fitting = weight * (1 - overrun) - TOLERANCE * problem.lower_bound
    handed: list[list[float]] = [[] for _ in range(2 * stages)]
    made: Rows = [[] for _ in orders]
    # Of each rank: what is left, the W's that may run, activations kept, the time.
    left = [deque(order) for order in orders]
    pending: list[deque[int]] = [deque() for _ in orders]
    kept, clock = [0] * len(orders), [0.0] * len(orders)
    waiting = list(range(len(orders)))
    while waiting:
        still = []
        moved = False
        for rank in waiting:
            order, row, now, deferred = left[rank], made[rank], clock[rank], pending[rank]
            while order:
                action = order[0]
                forced = action < stages and kept[rank] >= capacity
                if forced and not deferred:
                    following = next((a for a in order if a >= stages), -1)
                    if following < 0 or len(handed[following]) >= len(handed[following - stages]):
                        return inf, made
                    order.remove(following)
                    order.appendleft(following)
                    action, forced = following, False
                needed = source[action]
                arrival = 0.0
                mine = handed[action]
                if needed >= 0:
                    theirs = handed[needed]
                    if len(mine) >= len(theirs):
                        break
                    arrival = theirs[len(mine)] + delay[action]
                if deferred and (forced or now + fitting <= arrival):
                    row.append(deferred.popleft())
                    now += weight
                    kept[rank] -= 1
                    continue
                now = (arrival if arrival > now else now) + time[action]
                mine.append(now)
                row.append(action)
                if action < stages:
                    kept[rank] += 1
                else:
                    deferred.append(action + stages)
                order.popleft()
                moved = True
            if order:
                still.append(rank)
            else:
                row.extend(deferred)
                now += weight * len(deferred)
                deferred.clear()
            clock[rank] = now
        if not moved:
            return inf, made
        waiting = still[::-1]  # forwards flow up the ranks, backwards down
    return max(clock), made


def simple_patterns(problem: Problem) -> Iterator[Pattern]:
    """Patterns with equal waits on all stages of a chunk, in forwards and in backwards."""
    spacings = (0.0, 0.12, 0.25, 0.4)
    for forward in spacings:
        for backward in spacings:
            for overrun in (0.0, 0.5):
                for period in (1.0, 1.25):
                    waits = (forward,) * problem.stages + (backward,) * problem.stages
                    yield Pattern(waits, period, overrun)


def changed(pattern: Pattern, random: Random) -> Pattern:
    """A neighbour of the pattern."""
    waits = list(pattern.waits)
    what = random.random()
    if what < 0.1:
        return replace(pattern, overrun=random.random())
    if what < 0.2:
        return replace(pattern, period=max(1.0, pattern.period + random.uniform(-0.2, 0.2)))
    first = int(random.random() * len(waits))
    if what < 0.5:  # a run of stages waits longer or shorter
        last = min(len(waits), first + 1 + int(random.random() * len(waits) / 2))
        change = random.uniform(-0.3, 0.3)
        waits[first:last] = [max(0.0, wait + change) for wait in waits[first:last]]
    elif what < 0.75:  # one stage does, and all after it
        waits[first] = max(0.0, waits[first] + random.uniform(-0.5, 0.5))
    else:  # one stage does, those after it don't
        change = max(-waits[first], random.uniform(-0.5, 0.5))
        waits[first] += change
        after = (first + 1) % len(waits)
        waits[after] = max(0.0, waits[after] - change)
    return replace(pattern, waits=tuple(waits))


def table_of(problem: Problem, pattern: Pattern) -> tuple[float, Rows]:
    """The pattern's makespan and rows; infinite where its order or the limit allows no table."""
    orders = pattern.orders(problem)
    if not in_channel_order(problem, orders):
        return inf, []
    return place_weight_gradients(problem, orders, pattern.overrun)


def improve_pattern(
    problem: Problem, pattern: Pattern, evaluations: int, random: Random
) -> tuple[float, Rows, Pattern]:
    """The best table among changes of the pattern, each kept where it makes the step no longer."""
    best, rows = table_of(problem, pattern)
    for _ in range(evaluations):
        if best <= problem.lower_bound * (1 + TOLERANCE):
            break
        candidate = changed(pattern, random)
        found, made = table_of(problem, candidate)
        if found <= best:
            best, rows, pattern = found, made, candidate
    return best, rows, pattern
