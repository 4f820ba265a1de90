"""Tables as rows of small numbers, timed several hundred times a second: what the search for a schedule works on.

Lives here: `Rows`, the step to be searched for (`Problem`), and the way to and from a `Schedule`. Imports the other
pure files of `parallel/pipeline`. Micro-batches pass every stage in order, so a row need not name them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from parallel.pipeline.schedule import Action, Kind, Schedule, peak_activations
from parallel.pipeline.simulate import ShareCosts

Rows = list[list[int]]
"""For each rank its actions in order, each a number: stage for F, stages + stage for I, 2 * stages + stage for W.

The n-th F, I or W of a stage belongs to micro-batch n. `join_backwards` alone writes B's, as 3 * stages + stage.
"""

TOLERANCE = 1e-9
"""Times closer than this, relative to the step's, are one time: sums of floats differ by their order."""


@dataclass(frozen=True)
class Problem:
    """A step to be scheduled. memory_limit: activations a rank may keep, in its share of one micro-batch."""

    microbatches: int
    placement: tuple[int, ...]
    costs: ShareCosts
    memory_limit: float

    @property
    def stages(self) -> int:
        return len(self.placement)

    @cached_property
    def ranks(self) -> int:
        return max(self.placement) + 1

    @cached_property
    def chunks(self) -> int:
        """Stages that each rank holds."""
        return self.stages // self.ranks

    @cached_property
    def capacity(self) -> int:
        """The memory limit, counted in activations of one micro-batch on one stage; all there are at most."""
        return int(min(self.memory_limit, self.microbatches) * self.chunks + TOLERANCE)

    @cached_property
    def time(self) -> tuple[float, ...]:
        """The time of each action."""
        forward, backward, weight = (time / self.chunks for time in self.costs[:3])
        return tuple(t for t in (forward, backward, weight, backward + weight) for _ in range(self.stages))

    @cached_property
    def source(self) -> tuple[int, ...]:
        """The action on another stage that each one needs, -1 where none."""
        forward = [-1, *range(self.stages - 1)]
        backward = [*range(self.stages + 1, 2 * self.stages), -1]
        return tuple(forward + backward + [-1] * self.stages + backward)

    @cached_property
    def rank(self) -> tuple[int, ...]:
        """Where each action runs."""
        return self.placement * 4

    @cached_property
    def delay(self) -> tuple[float, ...]:
        """How long the result of an action's source is on its way."""
        return tuple(
            0.0 if source < 0 or self.rank[source] == self.rank[action] else self.costs.send
            for action, source in enumerate(self.source)
        )

    @cached_property
    def own_channels(self) -> bool:
        """Whether no two edges between stages share a channel, so that chunks may overtake each other."""
        edges = [pair for pair in zip(self.placement, self.placement[1:], strict=False) if pair[0] != pair[1]]
        return len(set(edges)) == len(edges)

    @cached_property
    def lower_bound(self) -> float:
        """A makespan that no table on this placement beats.

        A rank can't start before the first micro-batch reaches it, then has its work, of which the last gradient of
        the input still has to reach stage 0; only weight gradients can be computed meanwhile.
        """
        forward, backward, weight = (self.time[i * self.stages] for i in range(3))
        best = 0.0
        for rank in range(self.ranks):
            first = self.placement.index(rank)
            way = sum(self.delay[1 : first + 1])
            start = first * forward + way
            # Its first stage's last I is its own last I: each later stage's comes before it.
            tail = max(0.0, first * backward + way + weight - self.microbatches * weight * self.chunks)
            best = max(best, start + self.microbatches * sum(self.costs[:3]) + tail)
        return best


def to_rows(schedule: Schedule) -> Rows:
    """The table with whole backward passes split, which makes no table slower.

    Raises ValueError where micro-batches don't pass every stage in order.
    """
    stages = schedule.stages
    offset = {Kind.FORWARD: 0, Kind.INPUT_GRADIENT: stages, Kind.WEIGHT_GRADIENT: 2 * stages}
    split = {Kind.BACKWARD: (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)}
    count = [0] * (3 * stages)
    rows = []
    for actions in schedule.actions:
        row = []
        for action in actions:
            for part in split.get(action.kind, (action.kind,)):
                number = offset[part] + action.stage
                if count[number] != action.microbatch:
                    raise ValueError(f"{schedule.name} runs {action} after {count[number]} micro-batches of its stage")
                count[number] += 1
                row.append(number)
        rows.append(row)
    return rows


def to_schedule(problem: Problem, rows: Rows, name: str) -> Schedule:
    """The table of these rows; it promises the peak that it has."""
    stages = problem.stages
    kinds = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.BACKWARD)
    table = []
    for row in rows:
        count = [0] * (4 * stages)
        actions = []
        for number in row:
            kind, stage = kinds[number // stages], number % stages
            counted = number - 2 * stages if kind is Kind.BACKWARD else number
            actions.append(Action(kind, stage, count[counted]))
            count[counted] += 1
            if kind is Kind.BACKWARD:
                count[2 * stages + stage] += 1
        table.append(tuple(actions))
    schedule = Schedule(name, problem.microbatches, problem.placement, tuple(table))
    return replace(schedule, promised_peak=max(peak_activations(schedule)))


def join_backwards(problem: Problem, rows: Rows) -> Rows:
    """An I right before its W becomes one B, on each stage where that doesn't make the step longer.

    One pass is less work for a device than two, by what no simulation counts.
    """
    stages = problem.stages
    longest = makespan(problem, rows) + TOLERANCE * problem.lower_bound
    for stage in range(stages):
        rank = problem.placement[stage]
        row: list[int] = []
        split = 0  # I's of the stage whose W is still to come
        for number in rows[rank]:
            # The W that follows an I is an earlier micro-batch's where others still wait.
            if number == 2 * stages + stage and split == 1 and row[-1] == stages + stage:
                row[-1] = 3 * stages + stage
                split = 0
                continue
            split += (number == stages + stage) - (number == 2 * stages + stage)
            row.append(number)
        tried = [*rows[:rank], row, *rows[rank + 1 :]]
        if makespan(problem, tried) <= longest:
            rows = tried
    return rows


def ends_of(problem: Problem, rows: Rows) -> list[list[float]] | None:
    """When each action of each rank ends, by `simulate`'s rules; None where actions wait for ones that never come."""
    time, source, delay = problem.time, problem.source, problem.delay
    weights, wholes = 2 * problem.stages, 3 * problem.stages
    handed: list[list[float]] = [[] for _ in range(weights)]  # the ends of each F and I
    handed += handed  # a B hands on what an I does; nobody asks for a W
    ends: list[list[float]] = [[] for _ in rows]
    clock = [0.0] * len(rows)
    waiting = list(range(len(rows)))
    while waiting:
        still = []
        moved = False
        for rank in waiting:
            row, done, now = rows[rank], ends[rank], clock[rank]
            first = place = len(done)
            length = len(row)
            while place < length:
                action = row[place]
                if action < weights or action >= wholes:
                    needed = source[action]
                    mine = handed[action]
                    if needed >= 0:
                        theirs = handed[needed]
                        n = len(mine)
                        if n >= len(theirs):
                            break
                        arrival = theirs[n] + delay[action]
                        if arrival > now:
                            now = arrival
                    now += time[action]
                    mine.append(now)
                else:
                    now += time[action]
                done.append(now)
                place += 1
            clock[rank] = now
            moved = moved or place > first
            if place < length:
                still.append(rank)
        if not moved:
            return None
        waiting = still[::-1]  # forwards flow up the ranks, backwards down
    return ends


def makespan(problem: Problem, rows: Rows) -> float:
    """The time from the step's start to the last end of any rank; infinite where the rows deadlock."""
    ends = ends_of(problem, rows)
    return inf if ends is None else max(row[-1] for row in ends)


def fits(problem: Problem, row: list[int]) -> bool:
    """Whether one rank's row is in order of what it needs on its own rank, and within the memory limit."""
    stages, source, rank = problem.stages, problem.source, problem.rank
    count = [0] * (3 * stages)
    kept = 0
    for action in row:
        if action < stages:
            kept += 1
            if kept > problem.capacity:
                return False
        elif action >= 2 * stages:
            kept -= 1
        if action >= stages and count[action] >= count[action - stages]:
            return False
        needed = source[action]
        if needed >= 0 and rank[needed] == rank[action] and count[action] >= count[needed]:
            return False
        count[action] += 1
    return True


def in_channel_order(problem: Problem, rows: Rows) -> bool:
    """Whether every channel's messages are received in the order in which they are sent; W's don't count."""
    if problem.own_channels:
        return True
    stages, rank = problem.stages, problem.rank
    sent: dict[tuple[int, int, int], list[int]] = {}
    received: dict[tuple[int, int, int], list[int]] = {}
    for here, row in enumerate(rows):
        for action in row:
            if action >= 2 * stages:
                continue
            kind = action // stages
            following = action + 1 - 2 * kind
            if 0 <= following - kind * stages < stages and rank[following] != here:
                sent.setdefault((kind, here, rank[following]), []).append(following)
            needed = problem.source[action]
            if needed >= 0 and rank[needed] != here:
                received.setdefault((kind, rank[needed], here), []).append(action)
    return sent == received
