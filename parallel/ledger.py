"""Who sent how much: calls and bytes of every collective, by axis and operation.

Lives here: counting only. Imports nothing of this project. `comm` writes, tests read.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass


@dataclass
class Entry:
    """One line of the ledger. bytes: what this rank puts on the wire under the bandwidth-optimal algorithm."""

    calls: int = 0
    bytes: int = 0


class Ledger:
    """Counts by (axis name, operation), for example ("tp", "all_gather")."""

    def __init__(self) -> None:
        self.entries: defaultdict[tuple[str, str], Entry] = defaultdict(Entry)
        self._lock = threading.Lock()  # compressed gradients are sent from threads of their own

    def add(self, axis: str, operation: str, sent_bytes: float) -> None:
        with self._lock:
            entry = self.entries[(axis, operation)]
            entry.calls += 1
            entry.bytes += round(sent_bytes)

    def calls(self, axis: str | None = None) -> int:
        """Calls on one axis, or on all."""
        return sum(entry.calls for (name, _), entry in self.entries.items() if axis in (None, name))

    def bytes(self, axis: str | None = None) -> int:
        """Bytes sent on one axis, or on all."""
        return sum(entry.bytes for (name, _), entry in self.entries.items() if axis in (None, name))

    def reset(self) -> None:
        self.entries.clear()
