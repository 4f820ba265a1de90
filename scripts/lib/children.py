"""The processes that a node has started: watched, and ended in an orderly way or by force, for scripts/lib/nodes.py.

Imports the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE = 6.0
"""Seconds from SIGTERM to SIGKILL, and seconds that a failed node's neighbours on its host get to end by themselves."""


class Children:
    """Processes of one phase, in sessions of their own, so that Ctrl-C reaches only this program, which ends them."""

    def __init__(self) -> None:
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        """By the number of the torchrun node; one for the preparation."""
        self.first_failed: tuple[int, int] | None = None
        """Node and exit code."""
        self._kill_at: float | None = None

    def start(self, node: int, command: list[str], environment: dict[str, str]) -> None:
        self.processes[node] = subprocess.Popen(
            command, env=os.environ | environment, start_new_session=True, preexec_fn=_end_with_parent
        )

    def running(self) -> bool:
        for node, process in self.processes.items():
            code = process.poll()
            if code and self.first_failed is None:
                self.first_failed = (node, code)
        return any(process.returncode is None for process in self.processes.values())

    def end(self) -> None:
        """SIGTERM, the one signal that torchrun passes on in an orderly way; SIGKILL follows by `press()`."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + GRACE
            self._signal(signal.SIGTERM)

    def press(self) -> None:
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self._kill_at = time.monotonic() + 1.0
            self._signal(signal.SIGKILL)

    def kill(self) -> None:
        self._kill_at = 0.0
        self.press()

    def _signal(self, number: int) -> None:
        for process in self.processes.values():
            if process.poll() is not None:
                continue
            # torchrun's ranks have sessions of their own: killed, it can't end them any more.
            ranks = children_of(process.pid) if number == signal.SIGKILL else []
            for pid in [*ranks, process.pid]:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    if pid == process.pid:
                        os.killpg(pid, number)
                    else:
                        os.kill(pid, number)


def _end_with_parent() -> None:
    """In a new child: SIGTERM when this program is killed, so that no run goes on unwatched. Of Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def children_of(pid: int) -> list[int]:
    """Process ids of all that a process has started, the youngest generation first. Of Linux, empty elsewhere."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    found = [child for child, parent in parents.items() if parent == pid]
    return [other for child in found for other in [*children_of(child), child]]
