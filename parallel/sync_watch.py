"""Waiting for a reduction that some rank may never join: names the ranks that stay in `no_sync` instead of hanging.

Lives here: what ranks tell each other through the job's store about a step's reduction. Imports `parallel` only. Costs
one small message a step where `no_sync` is used (8 µs), none where it isn't; all else happens when a wait is long.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from parallel.comm import Work, job_store, wait_for, waits_on_host
from parallel.mesh import Axis, Mesh

logger = logging.getLogger(__name__)

_NO_SYNC, _REDUCING = "no_sync", "reducing"


class SyncWatch:
    """One rank's part in the agreement that all replicas reduce a step, or none does. Building it is collective.

    patience: seconds after which a reduction that isn't done is looked into. A rank counts as reducing from half of
    that on, so replicas may reach `finish` half a patience apart without one being taken for missing.

    On gloo the host waits, and `wait` raises. On NCCL the host doesn't wait, so a thread logs the same message and the
    group's own timeout ends the run.
    """

    def __init__(self, mesh: Mesh, patience: float):
        self.patience = patience
        self.step = 1
        """Number of the reduction that this rank takes part in next."""
        self._mesh = mesh
        self._store = job_store(mesh.world)
        self._told = 0
        self._on_device: list[tuple[Work, Axis]] = []
        self._timer: threading.Timer | None = None
        # Which reducer of this job it is: ranks make them in the same order, as they make groups.
        self._number = 0 if self._store is None else self._store.add(f"gradient_reducers/{mesh.rank}", 1)

    def enter_no_sync(self) -> None:
        """This rank accumulates. Told to the others at most once a step."""
        if self._told < self.step:
            self._told = self.step
            self._tell(_NO_SYNC)

    def wait(self, works: Sequence[tuple[Work | None, Axis]]) -> None:
        """Wait for messages of this step (None: an axis of one rank).

        Raises RuntimeError with the names of the ranks that have been in `no_sync` for the whole patience instead.
        """
        for work, axis in works:
            if work is None:
                continue
            if waits_on_host(axis):
                self._wait_on_host(work, axis)
            else:
                work.wait()
                self._on_device.append((work, axis))

    def end_step(self) -> None:
        """All waits of this step are over, or queued on the device, where a thread has an eye on them."""
        if self._timer is not None:
            self._timer.cancel()
        if self._on_device:
            self._timer = threading.Timer(self.patience / 2, self._look_into, (self._on_device, self.step))
            self._timer.daemon = True
            self._timer.start()
        self._on_device = []
        self.step += 1

    def _wait_on_host(self, work: Work, axis: Axis) -> None:
        told = warned = False
        while not wait_for(work, self.patience / 2):
            if not told:
                self._tell(_REDUCING)
                told = True
            elif message := self._accusation(axis, self.step):
                raise RuntimeError(message)
            elif not warned:
                logger.warning("step %d: waiting for %s", self.step, self._names(self._late(axis, self.step)))
                warned = True

    def _look_into(self, works: Sequence[tuple[Work, Axis]], step: int) -> None:
        """In a thread of its own, where the device waits rather than the host."""
        if all(work.is_completed() for work, _ in works):
            return
        self._tell(_REDUCING, step)
        time.sleep(self.patience / 2)
        for work, axis in works:
            if not work.is_completed() and (message := self._accusation(axis, step)):
                logger.critical("%s", message)
                return

    def _tell(self, state: str, step: int | None = None) -> None:
        if self._store is not None:
            self._store.set(self._key(self._mesh.rank), f"{state} {step or self.step}")

    def _late(self, axis: Axis, step: int) -> dict[int, bool]:
        """The ranks of an axis that don't reduce in `step` as yet: whether they have entered `no_sync` in it."""
        late = {}
        assert self._store is not None
        for rank in axis.ranks:
            key = self._key(rank)
            state = self._store.get(key).decode() if self._store.check([key]) else ""
            if rank != self._mesh.rank and state != f"{_REDUCING} {step}":
                late[rank] = state == f"{_NO_SYNC} {step}"
        return late

    def _accusation(self, axis: Axis, step: int) -> str | None:
        late = self._late(axis, step)
        accused = [rank for rank, in_no_sync in late.items() if in_no_sync]
        if not accused:
            return None
        reducing = self._names([rank for rank in axis.ranks if rank not in late])
        return (
            f"gradient reduction {step}: {self._names(accused)} entered no_sync() and has not called finish() for "
            f"{self.patience:g} s, while {reducing} wait in finish(): leave no_sync() for the last micro-batch and "
            f"call finish() on all ranks of {axis.name} or on none (if it only computes that long, raise `patience`)"
        )

    def _names(self, ranks: Sequence[int] | dict[int, bool]) -> str:
        """Such as "rank 1 (dp 1, tp 0), rank 3 (dp 1, tp 1)"."""
        groups = self._mesh.layout.groups(self._mesh.world_size)
        axes = [name for name in ("pp", "dp", "cp", "tp") if len(groups[name][0]) > 1]

        def place(rank: int) -> str:
            return ", ".join(f"{name} {next(g.index(rank) for g in groups[name] if rank in g)}" for name in axes)

        return ", ".join(f"rank {rank} ({place(rank)})" for rank in ranks)

    def _key(self, rank: int) -> str:
        return f"gradient_reducer_{self._number}/{rank}"
