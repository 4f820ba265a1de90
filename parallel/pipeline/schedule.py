"""A pipeline schedule is a table: for each rank the actions it takes, in order, and nothing else.

Lives here: what a table is made of, and what follows from a table alone. Imports nothing of ours and no torch. The
tables themselves are made in `one_stage`, `interleaved`, `v_shaped` and `search`; `catalogue` knows them by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What an action does with one micro-batch on one stage.

    A backward pass is one action (B), or two: the gradient of the stage's input (I), which the stage before waits for,
    and the gradients of its weights (W), which nobody waits for before the step's end (Zero Bubble, 2401.10241). A
    micro-batch has on every stage either B or both I and W.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"

    # Members are single objects; Enum's own hash is a Python function, three times slower in sets of actions.
    __hash__ = object.__hash__

    @property
    def hands_on(self) -> int:
        """The direction in which its result goes: to the next stage (1), to the one before (-1), nowhere (0)."""
        if self is Kind.FORWARD:
            return 1
        return 0 if self is Kind.WEIGHT_GRADIENT else -1


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

    placement: the rank of each stage, stage 0 first; actions: for each rank what it does, in order; promised_peak: the
    most activations any rank may keep, in one rank's share of one micro-batch (see `peak_activations`); None: no
    promise; together: for each rank the places of forwards that run together with the backward after them, to hide
    what one waits for behind what the other computes. Such a pair begins when both have what they need, and hands both
    results on at its end. Empty: no rank has one.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    promised_peak: float | None = None
    together: tuple[tuple[int, ...], ...] = ()

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def stages(self) -> int:
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, in order."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def cells(self, rank: int) -> list[tuple[int, ...]]:
        """The places of a rank's row in order, grouped as they run: one by one, and both of a pair together."""
        paired = set(self.together[rank]) if self.together else set()
        return [(i, i + 1) if i in paired else (i,) for i in range(len(self.actions[rank])) if i - 1 not in paired]

    def forward_only(self) -> Schedule:
        """The same table without backward actions: what evaluation runs."""
        kept = tuple(tuple(a for a in row if a.kind is Kind.FORWARD) for row in self.actions)
        return Schedule(f"{self.name}, forward only", self.microbatches, self.placement, kept)


def dependencies(schedule: Schedule) -> dict[Action, tuple[Action, ...]]:
    """For each action of the table those whose result it needs. Raises KeyError where the table lacks one of them."""
    everything = {action for row in schedule.actions for action in row}

    def gradient(stage: int, microbatch: int) -> Action:
        """The action that makes the gradient of the stage's input: B or I, as the table has it."""
        whole = Action(Kind.BACKWARD, stage, microbatch)
        return whole if whole in everything else Action(Kind.INPUT_GRADIENT, stage, microbatch)

    found = {}
    for action in everything:
        kind, stage, microbatch = action
        before = []
        if kind is Kind.FORWARD and stage > 0:
            before = [Action(kind, stage - 1, microbatch)]
        elif kind is Kind.WEIGHT_GRADIENT:
            before = [Action(Kind.INPUT_GRADIENT, stage, microbatch)]
        elif kind is not Kind.FORWARD:
            before = [Action(Kind.FORWARD, stage, microbatch)]
            if stage < schedule.stages - 1:
                before.append(gradient(stage + 1, microbatch))
        for needed in before:
            if needed not in everything:
                raise KeyError(needed)
        found[action] = tuple(before)
    return found


def peak_activations(schedule: Schedule) -> list[float]:
    """For each rank the most activations it keeps at once, in one rank's share of one micro-batch.

    A micro-batch's activations on a stage are kept from its forward until its weights' gradients ran. With v stages on
    a rank each counts 1/v.
    """
    peaks = []
    for rank, row in enumerate(schedule.actions):
        kept = peak = 0
        for action in row:
            if action.kind is Kind.FORWARD:
                kept += 1
                peak = max(peak, kept)
            elif action.kind is not Kind.INPUT_GRADIENT:
                kept -= 1
        peaks.append(peak / max(1, len(schedule.stages_of(rank))))
    return peaks
