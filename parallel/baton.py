"""Two computations of one rank that take turns, so that what one waits for is hidden by what the other computes.

Lives here: `Baton`, which every axis of a mesh carries: whoever is about to wait for a message under way passes it on.
Imports torch only. Exactly one of the two runs at any time, and gives way at its own waits alone: what happens when is
the same on every rank that computes the same layers. Source: DeepSeek-V3 (2412.19437), section 3.2.1.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch


class _GivenUp(BaseException):
    """Raised in the computation that waits for its turn when the other one has failed."""


class Baton:
    """Runs pairs of computations, `together`, and is passed on by them.

    device: of the computations. One of a pair runs on a thread of its own, the same for all pairs: a new one for each
    would set up its own team of OpenMP threads. It ends with the baton.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._turns = threading.Lock(), threading.Lock()
        for turn in self._turns:
            turn.acquire()  # free only while its computation may take it: a signal from one thread to the other
        self._running: int | None = None
        self._ended = [True, True]
        self._error: BaseException | None = None
        self._passed: Callable[[], None] | None = None
        self._jobs: SimpleQueue[Callable[[], None] | None] | None = None

    def pass_on(self) -> None:
        """Let the other computation run until it passes on or ends; does nothing outside of `together`.

        To be called just before waiting for what is under way. It may be called from any thread that works for the
        running computation, such as autograd's for a GPU.
        """
        if self._running is None or self._ended[1 - self._running]:
            return
        me = self._running
        self._hand_to(1 - me)
        self._turns[me].acquire()
        if self._error is not None:
            raise _GivenUp

    def together(
        self, here: Callable[[], Any], beside: Callable[[], Any], passed: Callable[[], None] | None = None
    ) -> tuple[Any, Any]:
        """Run both in turns, `here` on the calling thread, `beside` on another; returns both results. `beside` begins.

        passed: called each time the other one is to run, at the beginning too. Raises what one of them raised first,
        after the other has been ended too, by an exception out of its `pass_on`.
        """
        assert self._running is None, "a baton has one pair at a time"
        results: list[Any] = [None, None]
        self._running, self._ended, self._error, self._passed = 0, [False, False], None, passed
        self._start(lambda: self._run_beside(beside, results))
        self._run(0, partial(self._run_here, here), results)
        if not self._ended[1]:
            self._hand_to(1)
            self._turns[0].acquire()
        error, self._running, self._error, self._passed = self._error, None, None, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame: together they would keep all tensors of the two alive
        return results[0], results[1]

    def _run_here(self, work: Callable[[], Any]) -> Any:
        self.pass_on()
        return work()

    def _run_beside(self, work: Callable[[], Any], results: list[Any]) -> None:
        self._turns[1].acquire()
        if self._error is None:
            self._run(1, work, results)
        self._ended[1] = True
        self._hand_to(0)

    def _run(self, me: int, work: Callable[[], Any], results: list[Any]) -> None:
        try:
            results[me] = work()
        except BaseException as error:
            if self._running != me:
                raise  # a signal came while the other one runs: the process is to end, and its threads with it
            if self._error is None:
                self._error = error
        self._ended[me] = True

    def _hand_to(self, other: int) -> None:
        if self._passed is not None:
            self._passed()
        self._running = other
        self._turns[other].release()

    def _start(self, job: Callable[[], None]) -> None:
        """Give the other thread something to do; the first time, make it."""
        if self._jobs is None:
            self._jobs = SimpleQueue()
            # A daemon: it must not keep a process alive that ends while it waits for a peer.
            threading.Thread(target=_serve, args=(self._jobs, self._device), name="beside", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)
        self._jobs.put(job)


def _serve(jobs: SimpleQueue[Callable[[], None] | None], device: torch.device | None) -> None:
    """The other thread: holds no reference to its baton while there is nothing to do."""
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)
    while (job := jobs.get()) is not None:
        job()
        del job
