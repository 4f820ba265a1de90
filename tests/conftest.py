"""Fixtures and options of the whole test run.

`run_ranks` gives a test real gloo ranks (tests/process_pool.py); tests marked `full` run with `--full` only.
"""

from __future__ import annotations

import os

# Before torch is imported, here and in the pool's fork server, which inherits it: the ranks share a few cores, and one
# thread a rank also makes sums reproducible. "lo": a host name that resolves to 127.0.1.1 breaks gloo on some machines.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if os.path.exists("/sys/class/net/lo"):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
# Not TORCH_GLOO_LAZY_INIT, though it makes a group of eight ranks five times faster: with it an irecv blocks until the
# peer has joined in, which deadlocks a pipeline that is right.

from collections.abc import Callable, Iterator  # noqa: E402
from typing import Any  # noqa: E402

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from tests.process_pool import ProcessPool  # noqa: E402

torch.set_num_threads(1)

# An example that starts ranks takes far longer than hypothesis' deadline, and the first one longer than the rest.
hypothesis.settings.register_profile("project", deadline=None, print_blob=True)
hypothesis.settings.load_profile("project")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the slow tests, marked `full`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="slow: runs with --full"))


@pytest.fixture(scope="session")
def process_pool() -> Iterator[ProcessPool]:
    """The pool itself, for tests that need its process ids. Most take `run_ranks`."""
    pool = ProcessPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def run_ranks(process_pool: ProcessPool) -> Callable[..., list[Any]]:
    """`run_ranks(world_size, function, *args, timeout=120.0)`: see `ProcessPool.run_ranks`."""
    return process_pool.run_ranks
