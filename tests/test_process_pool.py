"""The process pool: results by rank, every way a rank can fail, and that the pool serves the next test after each."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.process_pool import MAX_WORLD_SIZE, ProcessPool, RankFailure, RankTimeout

RunRanks = Callable[..., list[Any]]


def sum_over_ranks(offset: torch.Tensor) -> tuple[int, int, torch.Tensor, str]:
    total = offset + dist.get_rank()
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total, os.environ["RANK"]


def descriptors_after_groups() -> int:
    for _ in range(3):
        group = dist.new_group(list(range(dist.get_world_size())))
        dist.all_reduce(torch.ones(3), group=group)
    return len(os.listdir("/proc/self/fd"))


def meet() -> int:
    dist.barrier()
    return os.getpid()


def raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        print("printed by rank one")
        raise ValueError("rank one has no 7 heads")
    dist.barrier()


class NeedsTwo(Exception):
    """Pickles, but doesn't unpickle: Exception's own reduction passes one argument."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def raise_unpicklable() -> None:
    raise NeedsTwo("first half, ", "second half")


def wait_for_rank_zero_forever() -> None:
    if dist.get_rank() == 0:
        sleep_in_a_named_function()
    dist.barrier()


def sleep_in_a_named_function() -> None:
    time.sleep(600)


def die_on_rank_two() -> None:
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def leave_by_system_exit() -> None:
    raise SystemExit(3)


def spoil_process_state() -> None:
    os.environ["SPOILED"] = "yes"
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(123)


def process_state() -> tuple[bool, torch.dtype, float]:
    return "SPOILED" in os.environ, torch.get_default_dtype(), torch.rand(()).item()


def exchange_with_both_neighbours() -> tuple[float, float]:
    """Crossing first messages of a fresh group: the case where lazily made connections could block each other."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(size)))
    below, above = (rank - 1) % size, (rank + 1) % size
    mine, from_below, from_above = torch.full((100_000,), float(rank)), torch.empty(100_000), torch.empty(100_000)
    operations = [
        dist.P2POp(dist.isend, mine, above, group),
        dist.P2POp(dist.isend, mine, below, group),
        dist.P2POp(dist.irecv, from_below, below, group),
        dist.P2POp(dist.irecv, from_above, above, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return from_below.mean().item(), from_above.mean().item()


def assert_usable(run_ranks: RunRanks) -> None:
    assert len(set(run_ranks(4, meet))) == 4


@pytest.mark.parametrize("world_size", [1, 2, 5, 8])
def test_results_come_back_in_rank_order(run_ranks: RunRanks, world_size: int) -> None:
    offset = torch.randn(3, dtype=torch.float64)
    results = run_ranks(world_size, sum_over_ranks, offset)
    assert [result[0] for result in results] == list(range(world_size))
    for rank, (_, size, total, variable) in enumerate(results):
        assert (size, variable) == (world_size, str(rank))
        torch.testing.assert_close(total, offset * world_size + sum(range(world_size)))


def test_workers_are_kept_between_calls(run_ranks: RunRanks, process_pool: ProcessPool) -> None:
    first = run_ranks(4, meet)
    assert run_ranks(4, meet) == first == process_pool.process_ids[:4]
    assert run_ranks(2, meet) == first[:2]
    assert os.getpid() not in first


def test_messages_cross_on_fresh_groups(run_ranks: RunRanks) -> None:
    for _ in range(5):
        assert run_ranks(4, exchange_with_both_neighbours) == [(3.0, 1.0), (0.0, 2.0), (1.0, 3.0), (2.0, 0.0)]


def test_exception_on_one_rank_ends_the_waiting_others(run_ranks: RunRanks, process_pool: ProcessPool) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match="rank one has no 7 heads") as caught:
        run_ranks(4, raise_on_rank_one)
    assert time.monotonic() - started < 10.0
    assert process_pool.process_ids == []
    cause = str(caught.value.__cause__)
    assert "rank 1 of 4" in cause and "in raise_on_rank_one" in cause and "printed by rank one" in cause
    assert_usable(run_ranks)


def test_exception_that_cannot_travel_is_told_as_text(run_ranks: RunRanks) -> None:
    with pytest.raises(RankFailure, match="NeedsTwo: first half, second half"):
        run_ranks(2, raise_unpicklable)
    assert_usable(run_ranks)


def test_time_out_shows_where_each_rank_stands(run_ranks: RunRanks) -> None:
    with pytest.raises(RankTimeout) as caught:
        run_ranks(3, wait_for_rank_zero_forever, timeout=1.5)
    message = str(caught.value)
    assert "ranks [0, 1, 2] of 3 were not done after 1.5 s" in message
    before, after = message.split("stacks of rank 1")
    assert "sleep_in_a_named_function" in before and "sleep_in_a_named_function" not in after
    assert "in barrier" in after
    assert_usable(run_ranks)


def test_killed_rank_is_named_with_its_signal(run_ranks: RunRanks) -> None:
    with pytest.raises(RankFailure, match="rank 2 of 4 died: killed by SIGKILL"):
        run_ranks(4, die_on_rank_two)
    assert_usable(run_ranks)


def test_worker_killed_between_calls_is_named(run_ranks: RunRanks, process_pool: ProcessPool) -> None:
    assert_usable(run_ranks)
    os.kill(process_pool.process_ids[1], signal.SIGKILL)
    with pytest.raises(RankFailure, match="rank 1 of 4 died: killed by SIGKILL"):
        run_ranks(4, meet)
    assert_usable(run_ranks)


def test_system_exit_of_a_rank_does_not_end_the_test_run(run_ranks: RunRanks) -> None:
    with pytest.raises(SystemExit) as caught:
        run_ranks(2, leave_by_system_exit)
    assert caught.value.code == 3
    assert_usable(run_ranks)


def test_a_test_does_not_see_what_the_one_before_left(run_ranks: RunRanks) -> None:
    before = run_ranks(2, process_state)
    run_ranks(2, spoil_process_state)
    assert run_ranks(2, process_state) == before
    assert before[0][:2] == (False, torch.float32)


def test_function_that_ranks_cannot_import_is_refused(run_ranks: RunRanks) -> None:
    with pytest.raises(ValueError, match="needs a module-level function"):
        run_ranks(2, lambda: None)


@pytest.mark.parametrize("world_size", [0, MAX_WORLD_SIZE + 1])
def test_world_size_out_of_range_is_refused(run_ranks: RunRanks, world_size: int) -> None:
    with pytest.raises(ValueError, match=f"world size {world_size}"):
        run_ranks(world_size, meet)


def test_descriptors_do_not_leak(run_ranks: RunRanks) -> None:
    run_ranks(2, descriptors_after_groups)
    here = len(os.listdir("/proc/self/fd"))
    counts = [run_ranks(2, descriptors_after_groups) for _ in range(30)]
    # A call leaves none: the three groups of one call are open while it counts, those of 29 others are not.
    assert max(counts[-1]) <= max(counts[0]) + 2, counts
    assert len(os.listdir("/proc/self/fd")) <= here + 2


def test_descriptors_do_not_leak_when_the_pool_is_forked_anew(run_ranks: RunRanks) -> None:
    run_ranks(2, meet)
    here = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(ValueError):
            run_ranks(2, raise_on_rank_one)
    run_ranks(2, meet)
    assert len(os.listdir("/proc/self/fd")) <= here + 2
