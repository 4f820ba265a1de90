"""Whether this host has memory for a number of processes that train on the CPU: memory.py PROCESSES

Imports the standard library. Exit code 1 and one line where it has not; where it can't be told, it counts as enough.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

GIB = 1 << 30
PER_PROCESS = 2 * GIB // 5
"""Bytes that a rank of the default run holds for itself, its part of torchrun's included. Larger models need more."""


def available(root: Path = Path("/")) -> int | None:
    """Bytes that new processes may take: of the host, or less in a container. None where the system doesn't say."""
    try:
        match = re.search(r"^MemAvailable: +(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    if match is None:
        return None
    free = int(match[1]) * 1024
    # Version 2 of control groups, then version 1; both as a container sees its own.
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most, now = (int((root / "sys/fs/cgroup" / name).read_text()) for name in (limit, used))
            stat = (root / "sys/fs/cgroup" / limit).with_name("memory.stat").read_text()
        except (OSError, ValueError):  # no such limit; "max" is no number
            continue
        cache = re.search(r"^inactive_file (\d+)", stat, re.MULTILINE)
        free = min(free, most - now + (int(cache[1]) if cache else 0))
    return free


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
