"""Ranks as threads of one process, for properties that many examples are drawn for: torch's threaded process group.

Imports torch and the standard library only. A collective takes microseconds; there is no send and receive, and nothing
runs asynchronously. Real processes: tests/process_pool.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg


def run_threads(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(*args)` on each of `ranks` ranks, each with a default process group; results in rank order.

    Raises what the first rank to fail raised.
    """
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []
    store = dist.HashStore()

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
            results[rank] = function(*args)
        except BaseException as error:
            errors.append(error)
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)  # wakes the others, which then exit

    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg.ProcessLocalGroup.reset()
        multi_threaded_pg._uninstall_threaded_pg()
    if errors:
        raise errors[0]
    return results
