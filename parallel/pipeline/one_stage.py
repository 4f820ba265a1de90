"""Schedules in which each rank holds one stage: GPipe and 1F1B.

Lives here: pure functions from (ranks, micro-batches) to a `Schedule`. Imports `schedule` only. Sources: GPipe
(1811.06965), 1F1B (PipeDream-Flush, 2006.09503).
"""

from __future__ import annotations

from parallel.pipeline.schedule import Action, Kind, Schedule


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, oldest first. Keeps every micro-batch's activations."""
    rows = []
    for rank in range(ranks):
        forwards = [Action(Kind.FORWARD, rank, m) for m in range(microbatches)]
        backwards = [Action(Kind.BACKWARD, rank, m) for m in range(microbatches)]
        rows.append(tuple(forwards + backwards))
    return Schedule("gpipe", microbatches, tuple(range(ranks)), tuple(rows), promised_peak=microbatches)


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
    return Schedule("1f1b", microbatches, tuple(range(ranks)), tuple(rows), promised_peak=min(ranks, microbatches))
