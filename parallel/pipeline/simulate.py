"""What a table costs: the time line of every rank, idle time, memory, and the critical path, without a device.

Lives here: `Costs`, the simulation, and `Timeline`, which measured runs are described by too. Imports `schedule` only;
no torch. Times are in any one unit. A rank computes one action at a time, in its row's order; a message between two
ranks takes `send` after the action that made it and holds up neither; stages of one rank hand on at once. Actions that
run together take the sum of their times: what one hides of the other is in the times that are given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallel.pipeline.schedule import Action, Kind, Schedule, dependencies


class ShareCosts(NamedTuple):
    """Times of one rank's whole share of the layers for one micro-batch, and of a message between two ranks."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    send: float = 0.0


@dataclass(frozen=True)
class Costs:
    """Times by stage, for one micro-batch. A whole backward pass costs input_gradient + weight_gradient.

    send: of a message between two ranks; activations: what one micro-batch's activations weigh on each stage.
    """

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    send: float
    activations: tuple[float, ...]

    @classmethod
    def even(cls, placement: Sequence[int], share: ShareCosts) -> Costs:
        """Every rank has the same share, divided evenly among its stages; its activations weigh 1."""
        parts = [1 / placement.count(rank) for rank in placement]

        def each(time: float) -> tuple[float, ...]:
            return tuple(time * part for part in parts)

        times = (each(share.forward), each(share.input_gradient), each(share.weight_gradient))
        return cls(*times, share.send, each(1.0))

    def of(self, action: Action) -> float:
        """The time of one action."""
        kind, stage, _ = action
        if kind is Kind.FORWARD:
            return self.forward[stage]
        if kind is Kind.INPUT_GRADIENT:
            return self.input_gradient[stage]
        if kind is Kind.WEIGHT_GRADIENT:
            return self.weight_gradient[stage]
        return self.input_gradient[stage] + self.weight_gradient[stage]


class Span(NamedTuple):
    """When an action ran."""

    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When every action of a table ran, simulated or measured: `spans[rank][i]` belongs to `schedule.actions[rank][i]`.

    Time 0 is the first start of any rank.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """From the first start of any rank to the last end of any rank."""
        spans = [span for row in self.spans for span in row]
        return max(span.end for span in spans) - min(span.start for span in spans)

    def work(self, rank: int) -> float:
        """The time that a rank computes."""
        return sum(span.end - span.start for span in self.spans[rank])

    def wall_idle(self, rank: int) -> float:
        """Time of the makespan in which a rank doesn't compute: what a clock sees."""
        return self.makespan - self.work(rank)

    def span_idle(self, rank: int) -> float:
        """Time between a rank's first start and its last end in which it doesn't compute: what papers count."""
        return self.spans[rank][-1].end - self.spans[rank][0].start - self.work(rank)

    @property
    def idle_share(self) -> float:
        """The part of all ranks' time in which they don't compute, 0 to 1."""
        ranks = range(self.schedule.ranks)
        return sum(self.wall_idle(rank) for rank in ranks) / (self.makespan * len(ranks))


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Run the table on paper, every action as early as its rank and its dependencies allow.

    Raises ValueError where actions wait for ones that never come (see `check`).
    """
    ends: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    before = dependencies(schedule)
    cells = [deque(schedule.cells(rank)) for rank in range(schedule.ranks)]
    left = sum(map(len, schedule.actions))
    while left:
        moved = left
        for rank, row in enumerate(schedule.actions):
            while cells[rank]:
                cell = [row[place] for place in cells[rank][0]]
                end = spans[rank][-1].end if spans[rank] else 0.0
                try:
                    for needed in (needed for action in cell for needed in before[action]):
                        away = 0.0 if schedule.placement[needed.stage] == rank else costs.send
                        end = max(end, ends[needed] + away)
                except KeyError:
                    break
                for action in cell:
                    spans[rank].append(Span(end, end + costs.of(action)))
                    end = spans[rank][-1].end
                ends |= dict.fromkeys(cell, end)
                cells[rank].popleft()
                left -= len(cell)
        if moved == left:
            raise ValueError(f"{schedule.name} deadlocks: see check()")
    return Timeline(schedule, tuple(map(tuple, spans)))


def memory(timeline: Timeline, costs: Costs) -> list[list[tuple[float, float]]]:
    """For each rank what it keeps over time: (time, activations from then on), by the times of the time line."""
    curves = []
    for row, spans in zip(timeline.schedule.actions, timeline.spans, strict=True):
        kept, curve = 0.0, []
        for action, span in zip(row, spans, strict=True):
            if action.kind is Kind.FORWARD:
                kept += costs.activations[action.stage]
                curve.append((span.start, kept))
            elif action.kind is not Kind.INPUT_GRADIENT:
                kept -= costs.activations[action.stage]
                curve.append((span.end, kept))
        curves.append(curve)
    return curves


def peak_memory(timeline: Timeline, costs: Costs) -> list[float]:
    """For each rank the most it keeps at once, in the unit of `costs.activations`."""
    return [max((kept for _, kept in curve), default=0.0) for curve in memory(timeline, costs)]


def critical_path(timeline: Timeline, costs: Costs) -> list[Action]:
    """Actions of a simulated time line of which none can take longer without the step doing so; first one first."""
    rows = zip(timeline.schedule.actions, timeline.spans, strict=True)
    spans = {action: span for row, times in rows for action, span in zip(row, times, strict=True)}
    previous = {after: a for row in timeline.schedule.actions for a, after in zip(row, row[1:], strict=False)}
    before = dependencies(timeline.schedule)
    placement = timeline.schedule.placement
    partner = {  # of the forward of a pair, which needs what its backward needs, and hands on when that ends
        row[place]: row[place + 1]
        for row, places in zip(timeline.schedule.actions, timeline.schedule.together, strict=False)
        for place in places
    }
    second = set(partner.values())
    action = max(spans, key=lambda a: spans[a].end)
    path = [action]
    while True:
        waited: list[tuple[float, Action]] = []
        if action in previous:
            waited.append((spans[previous[action]].end, previous[action]))
        needs = before[action] + (before[partner[action]] if action in partner else ())
        for needed in () if action in second else needs:
            away = 0.0 if placement[needed.stage] == placement[action.stage] else costs.send
            last = partner.get(needed, needed)
            waited.append((spans[last].end + away, last))
        if not waited:
            return path[::-1]
        _, action = max(waited, key=lambda entry: entry[0])
        path.append(action)
