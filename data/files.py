"""Files that are either complete or not there: write beside the target, fsync, rename.

May import the standard library only.
Source: POSIX rename(2) is atomic within a directory; the fsyncs keep that true across a power cut.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


def partial_path(path: str | os.PathLike[str]) -> Path:
    """Where this process writes `path` before it is complete; no reader looks for that suffix."""
    return Path(f"{os.fspath(path)}.{os.getpid()}.partial")


def fsync_directory(directory: str | os.PathLike[str]) -> None:
    """Make a rename inside `directory` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a file for writing that appears under `path`, whole, only when the block ends without an exception.

    Args:
        path: the final name; its directory is created; an older file of that name stays until the rename.
        mode: "wb" or "w" (text is UTF-8, line ends are written as given).
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(target)
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    try:
        with open(partial, mode, **text) as stream:  # type: ignore[call-overload]
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    fsync_directory(target.parent)
