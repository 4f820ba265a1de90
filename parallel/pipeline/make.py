"""The one door through which tables are made: a named schedule's, or the one that is searched for.

Lives here: `make_schedule`. Imports `catalogue` and `search`; no torch, so flags are checked by it too.
"""

from __future__ import annotations

from parallel.pipeline.catalogue import AUTO, MINIMUM_MICROBATCHES, SCHEDULES, entry_of
from parallel.pipeline.schedule import Schedule
from parallel.pipeline.search import MOST_CHUNKS, search
from parallel.pipeline.simulate import ShareCosts


def make_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    *,
    together: bool = False,
    costs: ShareCosts | None = None,
    memory_limit: float | None = None,
    placement: tuple[int, ...] | None = None,
    most_stages: int | None = None,
) -> Schedule:
    """The named schedule for `ranks` pipeline ranks and `microbatches`, or under "auto" the one that `search` finds.

    chunks: stages a rank holds; None: what the schedule has by itself (interleaved: 2; auto: what is fastest);
    together: the table that runs forwards together with backwards, which dualpipe-v has. The rest is for auto alone:
    times of a rank's share (None: all passes take as long, messages no time), the activations that a rank may keep in
    its share of a micro-batch (None: `ranks`, as 1F1B), a placement where it is settled, the most stages that there are
    layers for. Raises ValueError, naming the numbers and the nearest setting that works, where they don't fit the
    schedule.
    """
    if together and (name not in SCHEDULES or SCHEDULES[name].together is None):
        having = [known for known, entry in SCHEDULES.items() if entry.together is not None]
        raise ValueError(
            f"{name} runs no forward together with a backward: choose {' or '.join(having)}, or don't ask for it"
        )
    if name == AUTO:
        most = MOST_CHUNKS if most_stages is None else min(MOST_CHUNKS, max(1, most_stages // max(1, ranks)))
        choice = tuple(range(1, most + 1)) if chunks is None else (chunks,)
        limit = float(ranks) if memory_limit is None else memory_limit
        return search(ranks, microbatches, costs or ShareCosts(), limit, placement, choice)
    entry, chunks = entry_of(name, ranks, chunks)
    if microbatches < MINIMUM_MICROBATCHES:
        raise ValueError(
            f"{name} on {ranks} ranks needs at least {MINIMUM_MICROBATCHES} micro-batch, got {microbatches}: "
            f"use {MINIMUM_MICROBATCHES}, or {2 * ranks} for its published speed"
        )
    if together and entry.together is not None:
        return entry.together(ranks, microbatches)
    return entry.build(ranks, microbatches, chunks)
