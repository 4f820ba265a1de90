"""How much memory of this host a process may still take.

Imports the standard library only; scripts/lib/memory.py asks it before there is an environment. The files are those of
Linux: proc(5), cgroups(7).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def available(root: Path = Path("/")) -> int | None:
    """Bytes that new processes may take: of the host, or less in a container or a job. None where nobody says."""
    try:
        match = re.search(r"^MemAvailable: +(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    if match is None:
        return None
    free = int(match[1]) * 1024
    for limit, used in _groups(root):
        try:
            most, now = int(limit.read_text()), int(used.read_text())
            stat = limit.with_name("memory.stat").read_text()
        except (OSError, ValueError):  # no such limit; "max" is no number
            continue
        cache = re.search(r"^inactive_file (\d+)", stat, re.MULTILINE)
        free = min(free, most - now + (int(cache[1]) if cache else 0))
    return free


def _groups(root: Path) -> Iterator[tuple[Path, Path]]:
    """Files of limit and use of each control group that this process is in, from its own, as of a batch job, upwards.

    In version 2 of control groups and in version 1; a container sees its own as the topmost.
    """
    v2, v1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    own = {"": "/", "memory": "/"}
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, place = line.split(":", 2)
        for controller in controllers.split(","):
            own[controller] = place
    for controller, (limit, used) in (("", v2), ("memory", v1)):
        top = root / "sys/fs/cgroup" / controller
        place = top / own[controller].strip("/")
        for group in (place, *place.parents):
            if group == top or top in group.parents:
                yield group / limit, group / used
