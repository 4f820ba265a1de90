"""Ranks that stay in `no_sync` are named, by every rank that waits for them; what is allowed never is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallel import buckets, sync_watch
from parallel.comm import all_reduce_, waits_on_host
from parallel.gradients import GradientReducer
from parallel.mesh import Layout, Mesh
from parallel.sharding import Sharding

RunRanks = Callable[..., list[Any]]
PATIENCE = 1.0


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    for p in model.parameters():
        p.sharding = Sharding(sequence_fed=True)  # type: ignore[attr-defined]
    return model


class DeviceWork:
    """Work of gloo that the host doesn't wait for, as with NCCL."""

    def __init__(self, work: Any):
        self.work = work
        self.is_completed = work.is_completed

    def wait(self) -> None:
        pass


def on_device(*args: Any, **options: Any) -> DeviceWork:
    return DeviceWork(all_reduce_(*args, **options))


def one_rank_only_accumulates(seed: int, culprits: tuple[int, ...], device_waits: bool) -> dict[str, Any]:
    """Step 1 as it should be, then step 2, which the culprits go through in no_sync and don't finish."""
    mesh = Mesh.create(Layout())
    model = model_of(seed)
    reducer = GradientReducer(model.named_parameters(), mesh, bucket_cap_mb=0, patience=PATIENCE)
    logged = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    sync_watch.logger.addHandler(handler)
    if device_waits:
        buckets.all_reduce_, sync_watch.waits_on_host = on_device, lambda axis: False  # type: ignore[assignment]
    data = torch.randn(4, mesh.world_size, 6, 7)
    error, seconds = None, 0.0
    for step in (1, 2):
        reducer.zero()
        with reducer.no_sync():
            model(data[2 * step - 2, mesh.rank]).sum().backward()
        accumulates = step == 2 and mesh.rank in culprits
        with reducer.no_sync() if accumulates else nullcontext():
            model(data[2 * step - 1, mesh.rank]).sum().backward()
        works = [bucket.work for bucket in reducer.buckets]
        if not accumulates:
            started = time.monotonic()
            try:
                reducer.finish()
            except RuntimeError as raised:
                error = str(raised)
            seconds = time.monotonic() - started
        if step == 1 and device_waits:
            for work in works:
                work.work.wait()  # type: ignore[union-attr]
    if device_waits:
        time.sleep(2 * PATIENCE)
    # Now the culprits come, so that no message stays without its partner.
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    if mesh.rank in culprits:
        store.wait([f"over {rank}" for rank in range(mesh.world_size) if rank not in culprits])
        for bucket in reducer.buckets:
            bucket.launch()
        works = [bucket.work for bucket in reducer.buckets]
    store.set(f"over {mesh.rank}", "")
    for work in works:
        (work.work if device_waits else work).wait()  # type: ignore[union-attr]
    sync_watch.logger.removeHandler(handler)
    buckets.all_reduce_, sync_watch.waits_on_host = all_reduce_, waits_on_host
    return {"error": error, "seconds": seconds, "logged": logged}


@pytest.mark.parametrize(("ranks", "culprits"), [(2, (1,)), (4, (1,)), (4, (0, 2))])
def test_every_waiting_rank_names_the_ranks_that_stay_in_no_sync(
    run_ranks: RunRanks, seed: int, ranks: int, culprits: tuple[int, ...]
) -> None:
    found = run_ranks(ranks, one_rank_only_accumulates, seed, culprits, False)
    accused = ", ".join(f"rank {rank} (dp {rank})" for rank in culprits)
    waiting = ", ".join(f"rank {rank} (dp {rank})" for rank in range(ranks) if rank not in culprits)
    for rank, outcome in enumerate(found):
        if rank in culprits:
            assert outcome["error"] is None
        else:
            assert outcome["error"].startswith(f"gradient reduction 2: {accused} entered no_sync()"), outcome
            assert f"while {waiting} wait in finish()" in outcome["error"]
            assert outcome["seconds"] < 10 * PATIENCE


def test_where_the_device_waits_the_names_are_logged(run_ranks: RunRanks, seed: int) -> None:
    waiting, culprit = run_ranks(2, one_rank_only_accumulates, seed, (1,), True)
    assert [text.split(" and has")[0] for text in waiting["logged"]] == [
        "gradient reduction 2: rank 1 (dp 1) entered no_sync()"
    ]
    assert culprit["logged"] == [] and waiting["error"] is None


def uneven(seed: int) -> tuple[list[torch.Tensor], list[str]]:
    """Rank r has 1 + r micro-batches; the last rank is slow, longer than the patience, before it enters no_sync."""
    mesh = Mesh.create(Layout())
    model = model_of(seed)
    reducer = GradientReducer(model.named_parameters(), mesh, patience=PATIENCE)
    data = torch.randn(3, mesh.world_size, 2, 6, 7)
    sent = list[str]()
    store = reducer._watch._store
    assert store is not None
    put = store.set

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def set(self, key: str, value: str) -> None:
            sent.append(value)
            put(key, value)

    reducer._watch._store = Recorder()  # type: ignore[assignment]
    for step in range(3):
        reducer.zero()
        for m in range(1 + mesh.rank):
            last = m == mesh.rank
            if step == 1 and m == 0 and mesh.rank == mesh.world_size - 1:
                time.sleep(1.7 * PATIENCE)
            with nullcontext() if last else reducer.no_sync():
                model(data[step, m, 0]).sum().backward()
        reducer.finish()
    return [p.main_grad.clone() for p in reducer.parameters], sent  # type: ignore[operator]


def test_different_numbers_of_micro_batches_and_a_slow_rank_are_no_fault(run_ranks: RunRanks, seed: int) -> None:
    """Also: a step costs at most one message to the store, and none where no_sync isn't used."""
    found = run_ranks(2, uneven, seed)
    (first, sent_by_first), (second, sent_by_second) = found
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b) and a.any()
    assert sent_by_first == ["reducing 2"]  # it waited for the slow one
    assert sent_by_second == ["no_sync 1", "no_sync 2", "no_sync 3"]


def test_a_gradient_for_a_bucket_that_is_on_its_way_is_refused() -> None:
    model = model_of(0)
    reducer = GradientReducer(model.named_parameters(), Mesh.create(Layout()))
    model(torch.randn(2, 7)).sum().backward()
    assert all(bucket.launched for bucket in reducer.buckets)
    with pytest.raises(RuntimeError, match="a gradient of 2.bias arrived .* inside no_sync"):
        model(torch.randn(2, 7)).sum().backward()
