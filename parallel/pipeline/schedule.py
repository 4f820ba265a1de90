"""A pipeline schedule is a table: for each rank the actions it takes, in order, and nothing else.

Lives here: pure functions from (ranks, micro-batches) to a `Schedule`; a new schedule is one more. Imports nothing.
Sources: GPipe (1811.06965), 1F1B (PipeDream-Flush, 2006.09503).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What an action does with one micro-batch on one stage."""

    FORWARD = "F"
    BACKWARD = "B"


class Action(NamedTuple):
    """One cell of the table; prints as F0.3: forward of micro-batch 3 on stage 0."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """A table for all ranks of the pipeline.

    placement: the rank of each stage, stage 0 first; actions: for each rank what it does, in order.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def stages(self) -> int:
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, in order."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def forward_only(self) -> Schedule:
        """The same table without backward actions: what evaluation runs."""
        kept = tuple(tuple(a for a in row if a.kind is Kind.FORWARD) for row in self.actions)
        return Schedule(f"{self.name}, forward only", self.microbatches, self.placement, kept)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, oldest first. Keeps every micro-batch's activations."""
    rows = []
    for rank in range(ranks):
        forwards = [Action(Kind.FORWARD, rank, m) for m in range(microbatches)]
        backwards = [Action(Kind.BACKWARD, rank, m) for m in range(microbatches)]
        rows.append(tuple(forwards + backwards))
    return Schedule("gpipe", microbatches, tuple(range(ranks)), tuple(rows))


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Rank r runs ranks - r - 1 forwards ahead, then alternates: keeps at most `ranks` micro-batches' activations."""
    rows = []
    for rank in range(ranks):
        ahead = min(ranks - rank - 1, microbatches)
        row = [Action(Kind.FORWARD, rank, m) for m in range(ahead)]
        for m in range(microbatches - ahead):
            row += [Action(Kind.FORWARD, rank, ahead + m), Action(Kind.BACKWARD, rank, m)]
        row += [Action(Kind.BACKWARD, rank, m) for m in range(microbatches - ahead, microbatches)]
        rows.append(tuple(row))
    return Schedule("1f1b", microbatches, tuple(range(ranks)), tuple(rows))


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"1f1b": one_f_one_b, "gpipe": gpipe}


def make_schedule(name: str, ranks: int, microbatches: int) -> Schedule:
    """The named schedule for `ranks` pipeline ranks and `microbatches` (both at least 1)."""
    if name not in SCHEDULES:
        raise ValueError(f"pipeline schedule {name!r} is unknown: choose one of {', '.join(sorted(SCHEDULES))}")
    if ranks < 1 or microbatches < 1:
        raise ValueError(f"a pipeline needs at least 1 rank and 1 micro-batch, not {ranks} and {microbatches}")
    return SCHEDULES[name](ranks, microbatches)
