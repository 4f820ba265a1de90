"""Megatron's interleaved 1F1B: each rank holds several stages and takes turns between them.

Lives here: a pure function from (ranks, micro-batches, chunks) to a `Schedule`. Imports `schedule` only. Source:
2104.04473, section 2.2.
"""

from __future__ import annotations

from parallel.pipeline.schedule import Action, Kind, Schedule


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B with `chunks` stages a rank: a pass through a rank is that much shorter, and so is the wait for it.

    Rank r holds stages r, r + ranks, … Forwards go in groups of `ranks` micro-batches: a group through all of a rank's
    stages, then the next group; backwards in the same order from the last stage. Any number of micro-batches is legal,
    but a last group that isn't full leaves its places idle.
    """
    groups = -(-microbatches // ranks)
    turns = [(chunk, g * ranks + i) for g in range(groups) for chunk in range(chunks) for i in range(ranks)]
    rows = []
    for rank in range(ranks):
        forwards = [Action(Kind.FORWARD, chunk * ranks + rank, m) for chunk, m in turns]
        backwards = [Action(Kind.BACKWARD, (chunks - 1 - chunk) * ranks + rank, m) for chunk, m in turns]
        # The first group's first gradient is back after all its chunks, and a way to the last rank and back.
        ahead = (chunks - 1) * ranks + 2 * (ranks - rank - 1)
        row = forwards[:ahead]
        for i, backward in enumerate(backwards):
            row += [*forwards[ahead + i : ahead + i + 1], backward]
        rows.append(tuple(action for action in row if action.microbatch < microbatches))
    peak = min((ranks * chunks + ranks - 1) / chunks, microbatches)
    return Schedule("interleaved", microbatches, tuple(range(ranks)) * chunks, tuple(rows), promised_peak=peak)
