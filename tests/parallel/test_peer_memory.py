"""All-reduce over peer memory: real ranks whose emulated GPUs (tests/kernels/cuda_on_cpu.h) share memory.

The kernel, its signals, the handles that go through the group, and what is refused are those of a GPU.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from parallel import comm, peer_memory
from parallel.mesh import Axis, Layout, Mesh
from parallel.peer_memory import PeerAllReduce
from tests.kernels import emulated_cuda

pytestmark = pytest.mark.skipif(emulated_cuda.compiler() is None, reason="no C++ compiler")

CPU = torch.device("cpu")
# Part of a vector of 16 bytes, some, more than one for each thread of a block, several blocks, more than a buffer.
SIZES = (0, 1, 3, 4, 5, 8, 13, 1023, 1025, 5000, 8193, 20_000)


def everyones(size: int, dtype: torch.dtype, seed: int, axis: Axis) -> torch.Tensor:
    """What each rank brings: [ranks, size], the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-3, 4, (axis.size, 1), generator=generator)
    return (scale * torch.randn(axis.size, size, generator=generator)).to(dtype)


def sum_in_rank_order(x_rn: torch.Tensor) -> torch.Tensor:
    total_n = torch.zeros(x_rn.shape[1])
    for x_n in x_rn:
        total_n += x_n.float()
    return total_n.to(x_rn.dtype)


def reduces(peers: PeerAllReduce, size: int, dtype: torch.dtype, seed: int, offset: int = 0) -> bool:
    """Whether a sum is that of rank order, bit for bit. offset: values before x, so that it isn't aligned."""
    x_rn = everyones(size, dtype, seed, peers.axis)
    memory = torch.full((offset + size + 8,), 7.0, dtype=dtype)
    x = memory[offset : offset + size]
    x.copy_(x_rn[peers.axis.rank])
    peers.all_reduce_(x)
    around = torch.cat([memory[:offset], memory[offset + size :]])
    return torch.equal(x, sum_in_rank_order(x_rn)) and bool((around == 7.0).all())


def wrong_sums(seed: int) -> list[str]:
    axis, wrong = Mesh.create(Layout()).world, []
    with emulated_cuda.emulated():
        for two_shot_above in (0, 1 << 30):
            peers = PeerAllReduce(axis, CPU, max_bytes=1 << 15, two_shot_above=two_shot_above)
            for size, dtype in itertools.product(SIZES, (torch.float32, torch.bfloat16)):
                if not reduces(peers, size, dtype, seed + size, offset=size % 3):
                    wrong.append(f"{size} values of {dtype}, two shots above {two_shot_above}")
            peers.close()
        peers = PeerAllReduce(axis, CPU, max_bytes=1 << 21, two_shot_above=1 << 12)
        if not reduces(peers, 300_007, torch.float32, seed):
            wrong.append("more vectors than threads in one message")
        # Signals near 2^31 and 2^32, of steps below 2^31 as those of calls are.
        for calls in ((1 << 30) - 5, (1 << 30) + (1 << 29), (1 << 31) - 5):
            peers._calls = itertools.count(calls)
            for step in range(10):
                if step % axis.size == axis.rank:
                    time.sleep(0.005)  # another one is the last each time
                if not reduces(peers, 2000 * (step % 2) + 3, torch.float32, seed + step):
                    wrong.append(f"call {calls + step}")
        sent = axis.ledger.entries[axis.name, "all_reduce"].bytes
        peers.all_reduce_(torch.ones(6144))
        read = 24576 * (axis.size - 1) * (2 / axis.size if axis.size > 2 else 1)
        if axis.ledger.entries[axis.name, "all_reduce"].bytes - sent != read:
            wrong.append("bytes in the ledger")
        peers.close()
        with pytest.raises(ValueError, match="is closed"):
            peers.all_reduce_(torch.ones(4))
    return wrong + left_over()


def left_over() -> list[str]:
    """Names of memory that this process has shared and not freed."""
    return [path.name for path in Path("/dev/shm").glob(f"cuda_on_cpu_{os.getpid()}_*")]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_every_rank_gets_the_sum_in_rank_order(run_ranks: Callable[..., list[Any]], ranks: int) -> None:
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    emulated_cuda.library("peer_all_reduce.cu")  # compiled before the ranks' time runs
    assert run_ranks(ranks, wrong_sums, seed) == [[]] * ranks


def refusals() -> dict[str, str]:
    """What each kind of bad place or tensor is told."""
    axis, told = Mesh.create(Layout()).world, {}

    def refused(name: str, make: Callable[[], Any]) -> None:
        try:
            make()
        except (TypeError, ValueError, RuntimeError) as error:
            told[name] = f"{type(error).__name__}: {error}"

    refused("no GPU", lambda: PeerAllReduce(axis, CPU))
    refused("bytes", lambda: PeerAllReduce(axis, CPU, max_bytes=100))
    refused("ranks", lambda: PeerAllReduce(Axis("dp", tuple(range(9)), 0), CPU))
    with emulated_cuda.emulated():
        with mock.patch.object(peer_memory, "_this_node", lambda: f"node {axis.rank}"):
            refused("nodes", lambda: PeerAllReduce(axis, CPU))
        step = "_open_peers" if axis.rank else "_allocate"
        for name, failing in (("memory", 0), ("access", 1)):
            if axis.rank == failing:
                with mock.patch.object(PeerAllReduce, step, side_effect=RuntimeError("CUDA says no")):
                    refused(name, lambda: PeerAllReduce(axis, CPU))
            else:
                refused(name, lambda: PeerAllReduce(axis, CPU))
        peers = PeerAllReduce(axis, CPU)
        refused("dtype", lambda: peers.all_reduce_(torch.ones(4, dtype=torch.float16)))
        refused("strides", lambda: peers.all_reduce_(torch.ones(4, 4).t()))
        refused("device", lambda: peers.all_reduce_(torch.ones(4, device="meta")))
        peers.close()
        peers.close()
    comm.barrier(axis)
    return told | {name: "left over" for name in left_over()}


def test_what_it_cannot_serve_is_refused_on_every_rank_alike(run_ranks: Callable[..., list[Any]]) -> None:
    first, second = run_ranks(2, refusals)
    assert first == second
    words = {
        "no GPU": "RuntimeError: peer memory over world on cpu: rank 0: ValueError: Expected a",
        "bytes": "ValueError: peer memory over world: buffers of 100 bytes",
        "ranks": "ValueError: peer memory over dp: 9 ranks, it serves at most 8",
        "nodes": "RuntimeError: peer memory over world: rank 0 is on ",
        "memory": "RuntimeError: peer memory over world on cpu: rank 0: RuntimeError: CUDA says no",
        "access": "RuntimeError: peer memory over world on cpu: rank 1: RuntimeError: CUDA says no",
        "dtype": "TypeError: peer memory over world: the tensor is torch.float16",
        "strides": "ValueError: peer memory over world: a tensor (4, 4) with strides (1, 4)",
        "device": "ValueError: peer memory over world: the tensor is on meta, its memory on cpu",
    }
    assert first.keys() == words.keys()
    for name, begin in words.items():
        assert first[name].startswith(begin), first[name]


def test_one_rank_keeps_its_tensor() -> None:
    peers = PeerAllReduce(Axis("dp", (0,), 0), CPU)
    x = torch.randn(5)
    before = x.clone()
    peers.all_reduce_(x)
    assert torch.equal(x, before)
    peers.close()
