"""The schedules by name: what each needs, and the one door through which tables are made.

Lives here: `make_schedule`, and the questions that can be answered before there is a table. Imports the files of
`parallel/pipeline` that make tables; no torch, so flags are checked by it too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parallel.pipeline.one_stage import gpipe, one_f_one_b
from parallel.pipeline.schedule import Schedule


@dataclass(frozen=True)
class Entry:
    """One named schedule.

    build(ranks, microbatches, chunks): the table; chunks: how many stages each rank holds (None: any number, as asked);
    minimum(ranks): the fewest micro-batches.
    """

    build: Callable[[int, int, int], Schedule]
    chunks: int | None = 1
    minimum: Callable[[int], int] = lambda ranks: 1


SCHEDULES: dict[str, Entry] = {
    "gpipe": Entry(lambda ranks, microbatches, chunks: gpipe(ranks, microbatches)),
    "1f1b": Entry(lambda ranks, microbatches, chunks: one_f_one_b(ranks, microbatches)),
}


def make_schedule(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """The named schedule for `ranks` pipeline ranks and `microbatches`.

    chunks: stages a rank holds; None: what the schedule has by itself (interleaved: 2). Raises ValueError, naming the
    numbers and the nearest setting that works, where they don't fit the schedule.
    """
    if name not in SCHEDULES:
        raise ValueError(f"pipeline schedule {name!r} is unknown: choose one of {', '.join(sorted(SCHEDULES))}")
    entry = SCHEDULES[name]
    if ranks < 1 or microbatches < 1:
        raise ValueError(f"a pipeline needs at least 1 rank and 1 micro-batch, not {ranks} and {microbatches}")
    return entry.build(ranks, microbatches, chunks or entry.chunks or 2)
