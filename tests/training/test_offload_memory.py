"""Offloading is refused where a host lacks the memory or a disk the room, with the bytes that are needed and free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from training.arguments import Arguments
from training.host_memory import available
from training.offload_memory import Free, Need, Shares, free_here, offload_bytes, shortages

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
        assert found == Need(16 * N + p * N + p * 70_000, 0)
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
