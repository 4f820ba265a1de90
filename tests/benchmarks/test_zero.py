"""The ZeRO benchmark: shares, formulas and verdict from given numbers, and what real ranks hold and send."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import zero_rank
from benchmarks.zero import Kind, expected, formula, kinds, main, memory_off, memory_table, traffic_off, traffic_table
from benchmarks.zero_rank import Traffic

RunRanks = Callable[..., list[Any]]


def found(kind: Kind, **changed: int) -> dict[str, Any]:
    """What a rank of `kind` measures of a model of a million values in ten tensors, where all is right."""
    measured: dict[str, Any] = {"values": 1_000_000, "part": 1_000_000 / kind.dp, "tensors": 10, "peak": 9_000_000}
    measured["live"] = {role: round(size) for role, size in expected(kind, measured).items()} | {"other": 0} | changed
    return measured | {"sent": {"all_reduce": round(formula(kind, 2, measured))}}


def test_each_stage_cuts_one_role_more() -> None:
    whole = {"parameters": 2e6, "gradients": 4e6, "masters": 4e6, "moments": 8e6, "copies": 0}
    assert expected(Kind(4, 0), found(Kind(4, 0))) == whole
    assert expected(Kind(4, 1), found(Kind(4, 1))) == whole | {"masters": 1e6, "moments": 2e6}
    assert expected(Kind(4, 2), found(Kind(4, 2))) == whole | {"masters": 1e6, "moments": 2e6, "gradients": 1e6}
    quarters = {role: size / 4 for role, size in whole.items()}
    assert expected(Kind(4, 3), found(Kind(4, 3))) == quarters
    assert expected(Kind(4, 3, "all"), found(Kind(4, 3, "all"))) == quarters | {"copies": 1e6}


def test_messages_are_counted_as_the_stages_reduce_and_gather() -> None:
    wanted = [formula(Kind(4, stage), 3, found(Kind(4, stage))) for stage in range(4)]
    assert wanted == [6e6, 6e6 + 1.5e6, 3 * 6e6 + 1.5e6, 3 * (3e6 + 1.5e6)]
    assert formula(Kind(1, 2), 3, found(Kind(1, 2))) == 0


def test_what_is_not_cut_or_sent_twice_fails_and_alignment_does_not() -> None:
    kind = Kind(2, 1)
    assert not [*memory_off(kind, found(kind)), *traffic_off(kind, 2, found(kind))]
    assert not list(memory_off(kind, found(kind, masters=2_000_100)))
    assert list(memory_off(kind, found(kind, masters=4_000_000))) == [
        "dp2 stage 1: masters 4,000,000 bytes instead of 2,000,000"
    ]
    twice = found(kind) | {"sent": {"all_reduce": 10_000_000}}
    assert list(traffic_off(kind, 2, twice)) == ["dp2 stage 1: 10,000,000 bytes sent instead of 5,000,000"]


def test_tables_have_a_row_for_each_layout() -> None:
    layout = Kind(2, 1, tp=2, pp=2)
    assert layout in kinds([1, 2, 4]) and layout.name == "tp2·pp2·dp2 stage 1"
    both = {kind: [found(kind)] for kind in (Kind(2, 3, "all"), layout)}
    rows = memory_table(both).splitlines()
    assert rows[2] == "| dp2 | 3, all offloaded | 1.00 | 4.00 | 2.00 | 4.00 | 11.00 | 11.00 | 0.00 | 9.00 |"
    assert rows[3] == "| tp2·pp2·dp2 | 1 | 2.00 | 4.00 | 2.00 | 4.00 | 12.00 | 0.00 | 0.00 | 9.00 |"
    assert traffic_table(both, 2).splitlines()[2:] == [
        "| dp2 | 3, all offloaded | 6.00 | 6.00 | all_reduce 6.00 |",
    ]


def counted() -> dict[str, int]:
    x = torch.ones(6)
    with Traffic() as traffic:
        dist.all_reduce(x)
        dist.all_reduce(tensor=x, group=dist.group.WORLD)
        dist.all_to_all_single(torch.empty(6), x)
        dist.broadcast(x.bfloat16(), 0)
    dist.all_reduce(x)
    return dict(traffic.sent)


def test_traffic_counts_while_it_is_entered(run_ranks: RunRanks) -> None:
    assert run_ranks(3, counted) == 3 * [{"all_reduce": 2 * 32, "all_to_all_single": 16, "broadcast": 8}]


def test_stage_3_leaves_a_rank_its_share_of_everything(run_ranks: RunRanks, tmp_path: Path) -> None:
    kind = Kind(2, 3)
    ranks = run_ranks(2, zero_rank.measure, kind.flags(tmp_path / "deepspeed.json"), 1, timeout=300.0)
    assert [words for each in ranks for words in memory_off(kind, each)] == []
    assert ranks[0]["values"] == ranks[1]["values"] > 1e6 and ranks[0]["peak"] > sum(ranks[0]["live"].values())


@pytest.mark.full
def test_the_command_finds_every_share_and_every_message(capsys: pytest.CaptureFixture[str]) -> None:
    only = ["dp2 stage 0", "dp2 stage 1", "dp2 stage 2", "dp2 stage 3, all offloaded", "tp2·pp2·dp2 stage 1"]
    assert main(["--dp", "1", "2", "--only", *only]) == 0
    shown = capsys.readouterr().out
    assert all(f"| {name.replace(' stage ', ' | ')} |" in shown for name in only) and "- holds: " in shown
