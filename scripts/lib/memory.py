"""Whether this host has memory for a number of processes that train on the CPU: memory.py PROCESSES

Imports the standard library and what asks the host. Exit code 1 and one line where it has not; where it can't be told,
it counts as enough.
"""

from __future__ import annotations

import sys

from training.host_memory import available

GIB = 1 << 30
PER_PROCESS = 2 * GIB // 5
"""Bytes that a rank of the default run holds for itself, its part of torchrun's included. Larger models need more."""


def shortage(processes: int, free: int | None) -> str | None:
    """What to tell where `free` bytes are too few, or None."""
    if free is None or free >= processes * PER_PROCESS:
        return None
    fitting = max(1, int(free / PER_PROCESS))
    return (
        f"{processes} processes need at least {processes * PER_PROCESS / GIB:.1f} GiB of memory and "
        f"{max(free, 0) / GIB:.1f} GiB are free: start fewer with NPROC_PER_NODE={fitting} and set "
        "--tensor-model-parallel-size and --pipeline-model-parallel-size to fit them, or free some"
    )


if __name__ == "__main__":
    text = shortage(int(sys.argv[1]), available())
    if text is not None:
        sys.exit(f"error: {text}")
