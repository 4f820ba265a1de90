"""The named schedules: what each needs, and its table.

Lives here: `SCHEDULES`, whose tables follow from numbers alone; a new schedule is a line in it. Imports the files of
`parallel/pipeline` that make tables; no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from parallel.pipeline.interleaved import interleaved
from parallel.pipeline.one_stage import gpipe, one_f_one_b, zb_h1, zb_h2
from parallel.pipeline.schedule import Schedule
from parallel.pipeline.v_shaped import dualpipe_v, v_half, v_min, v_placement, zb_v


@dataclass(frozen=True)
class Entry:
    """One named schedule.

    build(ranks, microbatches, chunks): the table, legal for any number of micro-batches from 1 on; chunks: how many
    stages each rank holds (None: any number, as asked); v_shaped: rank r holds stages r and 2·ranks-1-r, rather than
    r, r + ranks, …; together(ranks, microbatches): the table that runs forwards together with backwards, if it has one.
    """

    build: Callable[[int, int, int], Schedule]
    chunks: int | None = 1
    v_shaped: bool = False
    together: Callable[[int, int], Schedule] | None = None

    def placement(self, ranks: int, chunks: int) -> tuple[int, ...]:
        """The rank of each stage."""
        return v_placement(ranks) if self.v_shaped else tuple(range(ranks)) * chunks


def _plain(build: Callable[[int, int], Schedule]) -> Entry:
    """Of a schedule with one stage a rank."""
    return Entry(lambda ranks, microbatches, _: build(ranks, microbatches))


def _on_a_v(build: Callable[[int, int], Schedule], together: Callable[[int, int], Schedule] | None = None) -> Entry:
    return Entry(lambda ranks, microbatches, _: build(ranks, microbatches), chunks=2, v_shaped=True, together=together)


SCHEDULES: dict[str, Entry] = {
    "gpipe": _plain(gpipe),
    "1f1b": _plain(one_f_one_b),
    "interleaved": Entry(interleaved, chunks=None),
    "zb-h1": _plain(zb_h1),
    "zb-h2": _plain(zb_h2),
    "zb-v": _on_a_v(zb_v),
    "v-half": _on_a_v(v_half),
    "v-min": _on_a_v(v_min),
    "dualpipe-v": _on_a_v(dualpipe_v, partial(dualpipe_v, together=True)),
}

AUTO = "auto"
"""The name of the schedule that `search` finds. It isn't in `SCHEDULES`, whose tables follow from numbers alone."""

MINIMUM_MICROBATCHES = 1
"""Every schedule is legal from here on. It is as fast as published from twice as many as ranks on."""


def entry_of(name: str, ranks: int, chunks: int | None) -> tuple[Entry, int]:
    """The named schedule and how many stages a rank holds; raises ValueError where it can't have these numbers."""
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
            f"{name} has {entry.chunks} stage{'s' * (entry.chunks != 1)} a rank, not {chunks}: use interleaved, which "
            "has any number, or don't ask for one"
        )
    return entry, chunks


def placement_of(name: str, ranks: int, chunks: int | None = None) -> tuple[int, ...]:
    """The rank of each stage under the named schedule; raises ValueError as `entry_of` does."""
    entry, chunks = entry_of(name, ranks, chunks)
    return entry.placement(ranks, chunks)
