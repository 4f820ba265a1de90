"""Offloading is refused where a host lacks the memory or a disk the room, with the bytes that are needed and free."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallel.mesh import Layout, Mesh
from parallel.sharding import Sharding
from training.arguments import Arguments
from training.failures import ConfigurationError
from training.host_memory import available
from training.offload_memory import (
    Free,
    Need,
    Shares,
    check_offload_memory,
    free_here,
    offload_bytes,
    shares_of,
    shortages,
)

SHARES = Shares(dense=1_000_003, experts=500_000, largest=70_000, dense_shards=4, expert_shards=2)
N = 250_001 + 250_000


def need(shares: Shares = SHARES, **flags: Any) -> Need:
    return offload_bytes(Arguments().replace(**flags), shares)


def test_a_shard_is_the_larger_part_where_it_does_not_divide() -> None:
    assert SHARES.shard() == N


@pytest.mark.parametrize(("precision", "p"), [("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_parts_add_up(precision: str, p: int) -> None:
    for stage in (1, 2):
        found = need(zero_stage=stage, offload_optimizer="cpu", precision=precision)
        sums = 4 * (N + 70_000) if stage == 2 and precision == "fp32" else 0
        assert found == Need(16 * N + p * N + p * 70_000 + sums, 0)
    both = need(zero_stage=3, offload_optimizer="cpu", offload_param="cpu", precision=precision)
    assert both == Need(20 * N + p * N, 0)
    assert need(zero_stage=3, offload_param="cpu", precision=precision) == Need(p * N, 0)
    assert need(zero_stage=3) == Need(0, 0)


def test_a_disk_takes_the_states_and_the_host_keeps_buffers(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    sections = {
        "stage": 3,
        "sub_group_size": 1000,
        "offload_optimizer": {"device": "nvme", "buffer_count": 6},
        "offload_param": {"device": "nvme", "buffer_count": 2, "buffer_size": 5000},
    }
    path.write_text(json.dumps({"zero_optimization": sections}))
    flags: dict[str, Any] = {"zero_stage": 3, "offload_optimizer": "nvme", "nvme_path": "/fast", "precision": "bf16"}
    found = need(**flags, offload_param="nvme", deepspeed_config=str(path))
    assert found == Need(4 * N + 6 * 4 * 1000 + 2 * 2 * 5000, 16 * N + 2 * N)
    assert need(**flags) == Need(4 * N + 4 * 4 * N, 16 * N)  # DeepSpeed's own sub-group is larger than the shard


def test_ranks_of_a_host_are_counted_together_and_the_bytes_are_named() -> None:
    needs = [Need(3 << 30, 10), Need(3 << 30, 20), Need(3 << 30, 30)]
    frees = [Free("a", 7 << 30, 1000), Free("b", 5 << 30, 1000), Free("b", 6 << 30, 1000)]
    (text,) = shortages(needs, frees, None)
    for part in ("6.00 GiB", f"{6 << 30} bytes", "2 ranks on b", "5.00 GiB", f"{5 << 30} bytes"):
        assert part in text
    assert shortages(needs[:1], frees[:1], None) == []


def test_a_full_disk_is_named_with_its_path() -> None:
    (text,) = shortages([Need(0, 20), Need(0, 30)], [Free("a", None, 49), Free("a", None, 60)], "/fast")
    for part in ("50 bytes", "49 bytes", "--nvme-path /fast", "2 ranks on a"):
        assert part in text
    assert shortages([Need(1, 20)], [Free("a", None, None)], "/fast") == []  # what can't be told is enough


def test_this_host_is_asked(tmp_path: Path) -> None:
    free = free_here(str(tmp_path / "not" / "yet"))
    assert free.disk is not None and free.disk > 0
    assert (free.memory is None) == (available() is None) and free_here(None).disk is None


def test_sgd_has_one_moment() -> None:
    assert need(zero_stage=3, offload_optimizer="cpu", optimizer="sgd") == Need(16 * N, 0)


class TooSmall(nn.Module):
    """Counted, never allocated: 10¹² parameters on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(10**6, 10**6, device="meta"))
        self.weight.sharding = Sharding()  # type: ignore[attr-defined]


def refused_on_this_rank() -> str:
    mesh = Mesh.create(Layout())
    shares = shares_of(TooSmall().parameters(), mesh, 2)
    check_offload_memory(Arguments().replace(zero_stage=2), shares, mesh)  # nothing is offloaded
    try:
        check_offload_memory(Arguments().replace(zero_stage=2, offload_optimizer="cpu"), shares, mesh)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_too_little_memory_ends_the_run_on_every_rank_alike(run_ranks: Callable[..., list[Any]]) -> None:
    if available() is None:
        pytest.skip("this system doesn't say what is free")
    first, second = run_ranks(2, refused_on_this_rank)
    needed = 2 * (24 * 10**12 // 2 + 8 * 10**12)
    assert first == second and f"({needed} bytes) of memory for the 2 ranks on" in first


def storages() -> int:
    """Bytes of all tensors of this process."""
    gc.collect()
    found = (item for item in gc.get_objects() if isinstance(item, torch.Tensor))
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}.values())


def offloaded_bytes(path: str, stage: int, precision: str, offload_param: str) -> tuple[float, int]:
    """What an engine of DeepSpeed allocates beside parameters and buffers of the device, and what was reckoned."""
    from training.zero import sharded_optimizer, zero_engine

    mesh = Mesh.create(Layout())
    flags = {"offload_optimizer": "cpu", "offload_param": offload_param, "precision": precision}
    arguments = Arguments().replace(zero_stage=stage, deepspeed_config=path, bucket_cap_mb=1 / 16, **flags)
    dtype, p = (torch.float32, 4) if precision == "fp32" else (torch.bfloat16, 2)
    model = nn.Sequential(*(nn.Linear(101, 101) for _ in range(41))).to(dtype)
    for parameter in model.parameters():
        parameter.sharding = Sharding()  # type: ignore[attr-defined]
    shares = shares_of(model.parameters(), mesh, stage)
    before = storages()
    if stage == 1:
        kept: Any = sharded_optimizer(model.named_parameters(), arguments, mesh)
        kept_on_device = 0
    else:
        kept = zero_engine(model, model.named_parameters(), arguments, mesh)
        kept_on_device = 2**16 if stage == 3 else 0  # a bucket
    if stage == 3:
        kept_on_device -= p * shares.dense - (0 if offload_param == "cpu" else p * shares.shard())
    else:
        kept_on_device += p * shares.largest
    found = storages() - before - kept_on_device
    del kept
    return found, offload_bytes(arguments, shares).host


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("stage", "offload_param"), [(1, "none"), (2, "none"), (3, "none"), (3, "cpu")])
def test_reckoned_bytes_are_those_that_are_allocated(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, stage: int, offload_param: str, precision: str
) -> None:
    path = tmp_path / "ds.json"  # else parameters as small as these are never cut up
    path.write_text('{"zero_optimization": {"stage3_param_persistence_threshold": 0}}')
    for found, reckoned in run_ranks(2, offloaded_bytes, str(path), stage, precision, offload_param):
        assert found == pytest.approx(reckoned, rel=0.03)
