"""One run at a time in a run directory: a lock that ends with its process, however that ends.

`python -m training.run_lock RUN` says who holds it. May import the standard library only. The kernel holds the lock
(flock), on Linux also across hosts on NFS.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import time
from pathlib import Path


class RunLock:
    """The lock of one run directory, held until `release()`, the end of the process, or nobody knows this object."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    @property
    def works(self) -> bool:
        """False on a file system that knows no locks: then nothing keeps a second run out."""
        return self._descriptor is not None

    @classmethod
    def acquire(cls, file: Path) -> RunLock:
        """Take the lock. Raises BlockingIOError, its text naming the holder, where another process has it."""
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(descriptor)
            os.close(descriptor)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise BlockingIOError(holder) from error
            return cls(None)
        text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()})
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
        return cls(descriptor)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.release()


def holder(file: Path) -> str | None:
    """Who has the lock, None where nobody has; changes nothing."""
    try:
        with file.open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as error:
                return _holder(lock.fileno()) if error.errno in (errno.EAGAIN, errno.EACCES) else None
    except FileNotFoundError:
        pass
    return None


def _holder(descriptor: int) -> str:
    try:
        told = json.loads(os.pread(descriptor, 4096, 0))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(told["time"]))
        return f"process {told['pid']} on host {told['host']}, since {since}"
    except (OSError, ValueError, KeyError, TypeError):  # it has the lock and hasn't written yet
        return "another process"


if __name__ == "__main__":
    if held_by := holder(Path(sys.argv[1]) / "lock"):
        sys.exit(
            f"{sys.argv[1]} is in use by another run ({held_by}): end that, wait for it, or choose another RUN_DIR"
        )
