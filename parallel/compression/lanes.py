"""Where compressed reductions run beside the computation: phase i of every bucket on lane i, buckets in order.

Lives here: threads on a CPU, a side stream on a GPU. Imports `parallel` only. So bucket 2 is encoded while bucket 1
travels, and each lane's messages, on a communicator of their own, have one order on all ranks.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from parallel.comm import Work

_Job = tuple[Sequence[Callable[[], None]], "LaneWork"]


class LaneWork:
    """A reduction under way, as `parallel.comm.Work`; its wait raises what a phase raised.

    failed: called with that, on the phase's thread.
    """

    def __init__(self, failed: Callable[[BaseException], None] | None = None) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._failed = failed

    def wait(self, timeout: timedelta | None = None) -> None:
        """Raises RuntimeError where it isn't done after `timeout`."""
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError(f"a compressed reduction isn't done after {timeout}")
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return self._done.is_set()

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        if error is not None and self._failed is not None:
            self._failed(error)
        self._done.set()


class _StreamWork:
    """Done when the side stream has come this far; `wait` holds up the current stream, not the host."""

    def __init__(self, event: torch.cuda.Event):
        self._event = event

    def wait(self, timeout: timedelta | None = None) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def is_completed(self) -> bool:
        return self._event.query()


def run_inline(phases: Sequence[Callable[[], None]]) -> None:
    """All phases at once, for callers that have nothing else to compute."""
    for phase in phases:
        phase()


class Lanes:
    """Takes reductions in the same order on all ranks and runs them beside the caller.

    On a CPU lane i is a thread that runs phase i of one bucket after the other; waits and encoding in C let the
    caller's Python run. On a GPU all phases are queued at once on one stream. Threads end with the last reference.

    Where a phase fails, its lane sends nothing any more and later reductions fail with the same error: other ranks
    would take a later bucket's message for the one that never came (gloo aborts the process where sizes differ).
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queues: list[queue.SimpleQueue[_Job | None]] = []
        weakref.finalize(self, _end, self._queues)

    def submit(
        self, phases: Sequence[Callable[[], None]], failed: Callable[[BaseException], None] | None = None
    ) -> Work:
        """failed: called on a lane's thread with what a phase raised; on a GPU, `submit` raises it."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run_inline(phases)
                event = torch.cuda.Event()
                event.record()
            return _StreamWork(event)
        work = LaneWork(failed)
        if not phases:
            work.finish()
            return work
        while len(self._queues) < len(phases):
            self._queues.append(queue.SimpleQueue())
            lane = len(self._queues) - 1
            name = f"gradient lane {lane}"
            threading.Thread(target=_run_lane, args=(lane, self._queues), name=name, daemon=True).start()
        self._queues[0].put((phases, work))
        return work


def _run_lane(lane: int, queues: list[queue.SimpleQueue[Any]]) -> None:
    """One thread: its phase of each job, then the job to the next lane."""
    mine = queues[lane]
    failure: BaseException | None = None
    while (job := mine.get()) is not None:
        phases, work = job
        if failure is None:
            try:
                with torch.no_grad():
                    phases[lane]()
            except BaseException as error:
                failure = error
        if failure is not None:
            work.finish(failure)
        elif lane + 1 < len(phases):
            queues[lane + 1].put(job)
        else:
            work.finish()
        del job, phases, work


def _end(queues: list[queue.SimpleQueue[Any]]) -> None:
    for each in queues:
        each.put(None)
