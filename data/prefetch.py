"""Work ahead in a background thread, without changing what comes out or in which order.

May import the standard library only.
Source: the bounded producer and consumer of any textbook, with the three things that usually go wrong written out
below.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Runs an iterator up to `depth` items ahead.

    One thread produces and one queue keeps the order, so timing can't change it. An exception takes its place in the
    queue: the items before it are delivered first, then it is raised with the traceback of the thread, and again at
    every later call. `close` returns after the thread has ended, however far ahead it was. Not to be shared between
    consumer threads.

    Args:
        source: the items; only the background thread touches it from now on.
        depth: items kept ready, at least 1.
    """

    def __init__(self, source: Iterator[T], depth: int) -> None:
        if depth < 1:
            raise ValueError(f"a prefetcher keeps at least 1 item ready, not {depth}")
        self._source = source
        self._depth = depth
        self._ready: deque[T] = deque()
        self._end: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        # A daemon, so that a run which dies without close() still ends; closed at exit, since a daemon that the
        # interpreter cuts off inside torch's C++ takes the process down with SIGABRT.
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._produce, name="data-prefetch", daemon=True)
        self._thread.start()

    def _produce(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                if self._closed:
                    return
            try:
                item = next(self._source)  # outside the lock: the consumer takes ready items meanwhile
            except BaseException as error:  # StopIteration and all else: the consumer must hear of it
                with self._changed:
                    self._end = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._ready.append(item)
                self._changed.notify_all()

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._ready or self._end is not None)
            if self._closed:
                raise RuntimeError("the prefetcher is closed")
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
            assert self._end is not None
            raise self._end

    def close(self) -> None:
        """Stop the thread and wait for it (at most for the item it is making); safe to call twice."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()
        atexit.unregister(self.close)
