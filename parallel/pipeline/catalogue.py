"""The schedules by name: what each needs, and the one door through which tables are made.

Lives here: `make_schedule`, and the questions that can be answered before there is a table. Imports the files of
`parallel/pipeline` that make tables; no torch, so flags are checked by it too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parallel.pipeline.interleaved import interleaved
from parallel.pipeline.one_stage import gpipe, one_f_one_b, zb_h1, zb_h2
from parallel.pipeline.schedule import Schedule
from parallel.pipeline.search import MOST_CHUNKS, search
from parallel.pipeline.simulate import ShareCosts
from parallel.pipeline.v_shaped import dualpipe_v, v_half, v_min, v_placement, zb_v


@dataclass(frozen=True)
class Entry:
    """One named schedule.

    build(ranks, microbatches, chunks): the table, legal for any number of micro-batches from 1 on; chunks: how many
    stages each rank holds (None: any number, as asked); v_shaped: rank r holds stages r and 2·ranks-1-r, rather than
    r, r + ranks, ….
    """

    build: Callable[[int, int, int], Schedule]
    chunks: int | None = 1
    v_shaped: bool = False


def _of_two(build: Callable[[int, int], Schedule], chunks: int = 1) -> Entry:
    return Entry(lambda ranks, microbatches, _: build(ranks, microbatches), chunks, v_shaped=chunks == 2)


SCHEDULES: dict[str, Entry] = {
    "gpipe": _of_two(gpipe),
    "1f1b": _of_two(one_f_one_b),
    "interleaved": Entry(interleaved, chunks=None),
    "zb-h1": _of_two(zb_h1),
    "zb-h2": _of_two(zb_h2),
    "zb-v": _of_two(zb_v, 2),
    "v-half": _of_two(v_half, 2),
    "v-min": _of_two(v_min, 2),
    "dualpipe-v": _of_two(dualpipe_v, 2),
}

AUTO = "auto"
"""The name of the schedule that is searched for. It isn't in `SCHEDULES`, whose tables follow from numbers alone."""

MINIMUM_MICROBATCHES = 1
"""Every schedule is legal from here on. It is as fast as published from twice as many as ranks on."""


def make_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    *,
    costs: ShareCosts | None = None,
    memory_limit: float | None = None,
    placement: tuple[int, ...] | None = None,
    most_stages: int | None = None,
) -> Schedule:
    """The named schedule for `ranks` pipeline ranks and `microbatches`, or under "auto" the one that `search` finds.

    chunks: stages a rank holds; None: what the schedule has by itself (interleaved: 2; auto: what is fastest). The rest
    is for auto alone: times of a rank's share (None: all passes take as long, messages no time), the activations that
    a rank may keep in its share of a micro-batch (None: `ranks`, as 1F1B), a placement where it is settled, the most
    stages that there are layers for. Raises ValueError, naming the numbers and the nearest setting that works, where
    they don't fit the schedule.
    """
    if name == AUTO:
        most = MOST_CHUNKS if most_stages is None else min(MOST_CHUNKS, max(1, most_stages // max(1, ranks)))
        choice = tuple(range(1, most + 1)) if chunks is None else (chunks,)
        limit = float(ranks) if memory_limit is None else memory_limit
        return search(ranks, microbatches, costs or ShareCosts(), limit, placement, choice)
    entry, chunks = _entry(name, ranks, chunks)
    if microbatches < MINIMUM_MICROBATCHES:
        raise ValueError(
            f"{name} on {ranks} ranks needs at least {MINIMUM_MICROBATCHES} micro-batch, got {microbatches}: "
            f"use {MINIMUM_MICROBATCHES}, or {2 * ranks} for its published speed"
        )
    return entry.build(ranks, microbatches, chunks)


def placement_of(name: str, ranks: int, chunks: int | None = None) -> tuple[int, ...]:
    """The rank of each stage under the named schedule; raises ValueError as `make_schedule` does, and for "auto"."""
    entry, chunks = _entry(name, ranks, chunks)
    return v_placement(ranks) if entry.v_shaped else tuple(range(ranks)) * chunks


def _entry(name: str, ranks: int, chunks: int | None) -> tuple[Entry, int]:
    """The entry and its chunks; raises ValueError where the schedule can't have them."""
    if name == AUTO:
        raise ValueError("auto's placement follows from its costs: make_schedule gives a table with it")
    if name not in SCHEDULES:
        raise ValueError(
            f"pipeline schedule {name!r} is unknown: choose one of {', '.join(sorted([*SCHEDULES, AUTO]))}"
        )
    entry = SCHEDULES[name]
    if ranks < 1:
        raise ValueError(f"{name} needs at least 1 pipeline rank, got {ranks}: use 1")
    if chunks is None:
        return entry, entry.chunks or 2
    if chunks < 1:
        raise ValueError(f"{name} needs at least 1 stage a rank, got {chunks}: use {entry.chunks or 1}")
    if entry.chunks not in (None, chunks):
        raise ValueError(
            f"{name} has {entry.chunks} stage{'s' * (entry.chunks != 1)} a rank, not {chunks}: leave chunks out, or "
            "use interleaved, which has any number"
        )
    return entry, chunks
