"""Schedules in which each rank holds one stage: GPipe, 1F1B, and the zero-bubble schedules ZB-H1 and ZB-H2.

Lives here: pure functions from (ranks, micro-batches) to a `Schedule`. Imports `schedule` only. Sources: GPipe
(1811.06965), 1F1B (PipeDream-Flush, 2006.09503), ZB-H1 and ZB-H2 (Zero Bubble, 2401.10241).
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


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B's forwards and its memory on the first rank, on all ranks: what later ranks have to spare delays their W."""
    rows = tuple(_zero_bubble_row(rank, microbatches, ranks - rank - 1, rank) for rank in range(ranks))
    return Schedule("zb-h1", microbatches, tuple(range(ranks)), rows, promised_peak=min(ranks, microbatches))


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Twice as many forwards ahead as 1F1B, so that no rank waits for the first gradient: twice the memory, less 1."""
    rows = tuple(_zero_bubble_row(rank, microbatches, 2 * (ranks - rank - 1), 2 * rank) for rank in range(ranks))
    return Schedule("zb-h2", microbatches, tuple(range(ranks)), rows, promised_peak=min(2 * ranks - 1, microbatches))


def _zero_bubble_row(stage: int, microbatches: int, ahead: int, behind: int) -> tuple[Action, ...]:
    """`ahead` forwards, then F, I, W in turn, W of the micro-batch `behind` before I's; the last W's fill the end."""
    row = [Action(Kind.FORWARD, stage, m) for m in range(min(ahead, microbatches))]
    for m in range(microbatches + behind):
        if m + ahead < microbatches:
            row.append(Action(Kind.FORWARD, stage, m + ahead))
        if m < microbatches:
            row.append(Action(Kind.INPUT_GRADIENT, stage, m))
        if m >= behind:
            row.append(Action(Kind.WEIGHT_GRADIENT, stage, m - behind))
    return tuple(row)
