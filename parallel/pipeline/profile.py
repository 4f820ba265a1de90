"""Measuring when every action of a pipeline really ran.

Lives here: the clock that the runtime starts and stops around an action's computation, and what joins the ranks' times
to one time line. Imports `parallel.comm`, `parallel.mesh` and torch; files and costs, which need no torch, are in
`measured`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from parallel.comm import barrier, gather_objects
from parallel.mesh import Axis
from parallel.pipeline.measured import Measured
from parallel.pipeline.schedule import Schedule
from parallel.pipeline.simulate import Span, Timeline


class ActionClock:
    """Takes the times of one rank's actions: `begin()`, then `start()` and `stop()` around each one's computation.

    Around two that run together too, with `turn()` each time that the other one goes on. Each then counts for as long
    as it ran or waited itself, and the two are told one after the other, as `simulate` tells them. On a CPU it reads
    the host's clock. On a GPU it records events, so that the host runs on and the times are those of the device. It
    keeps the times of one run of a table, the last that was begun.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.barrier_seconds = 0.0
        """How long this rank was in the barrier that aligns the ranks; see `measured_timeline`."""
        self.schedule: Schedule | None = None
        self._moments: list[list[float | torch.cuda.Event]] = []
        """Of each computation: its start, its turns and its end."""

    def begin(self, schedule: Schedule, axis: Axis) -> None:
        """A run of `schedule` begins: let time 0 be the same on all ranks of the pipeline. Collective over `axis`."""
        self.schedule, self._moments = schedule, []
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        barrier(axis)  # whoever was late has come now: the next one is as short as can be
        entered = time.perf_counter()
        barrier(axis)
        self.barrier_seconds = time.perf_counter() - entered
        self._origin = self._now()

    def start(self) -> None:
        """The computation of the next action begins: what it needs has come."""
        self._moments.append([self._now()])

    def turn(self) -> None:
        """Of two actions that run together the other one goes on."""
        self._moments[-1].append(self._now())

    def stop(self) -> None:
        """It has ended; on a GPU: all of it has been launched."""
        self._moments[-1].append(self._now())

    def spans(self) -> list[Span]:
        """When the actions ran, in the order they were timed, in seconds since `begin()`. Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        spans = []
        for moments in self._moments:
            times = [self._since_origin(moment) for moment in moments]
            start, stop = times[0], times[-1]
            if len(times) > 2:  # the one on this thread ran from each even moment to the next
                middle = start + sum(end - begin for begin, end in zip(times[::2], times[1::2], strict=False))
                spans.append(Span(start, middle))
                start = middle
            spans.append(Span(start, stop))
        return spans

    def _now(self) -> float | torch.cuda.Event:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _since_origin(self, moment: float | torch.cuda.Event) -> float:
        if isinstance(moment, float):
            assert isinstance(self._origin, float)
            return moment - self._origin
        assert isinstance(self._origin, torch.cuda.Event)
        return self._origin.elapsed_time(moment) / 1e3


def measured_timeline(clock: ActionClock, axis: Axis, step: int) -> Measured:
    """The time line of a whole pipeline, the same on each of its ranks. Collective over `axis`.

    clock: this rank's, after it has timed every action of its row; step: of the training. Ranks count from the end of a
    barrier, which no rank leaves before all have entered it: two of them are off by at most the longest time that a
    rank spent in it, which is `alignment_seconds`. Clocks of different hosts needn't agree, only run at one speed.
    """
    assert clock.schedule is not None, "the clock has measured no run"
    gathered = gather_objects((clock.spans(), clock.barrier_seconds), axis)
    return join(clock.schedule, [spans for spans, _ in gathered], max(seconds for _, seconds in gathered), step)


def join(schedule: Schedule, spans: Sequence[Sequence[Span]], alignment_seconds: float, step: int) -> Measured:
    """Every rank's spans as one time line, whose time 0 is the first start of any rank."""
    first = min(span.start for row in spans for span in row)
    rows = tuple(tuple(Span(start - first, end - first) for start, end in row) for row in spans)
    for rank, (row, actions) in enumerate(zip(rows, schedule.actions, strict=True)):
        if len(row) != len(actions):
            raise ValueError(f"{schedule.name}: rank {rank} timed {len(row)} actions, its row has {len(actions)}")
    return Measured(Timeline(schedule, rows), step, alignment_seconds)
