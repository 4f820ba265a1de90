"""The overlap benchmark: its arithmetic from given times, its replay of messages, and a small run between two hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.overlap import Hidden, hidden, measure, parse, table, verdicts
from benchmarks.overlap_rank import Messages
from parallel.comm import Exchange, all_to_all, finish_exchange, start_exchange
from parallel.mesh import Layout, Mesh
from tests.simulated_hosts import unavailable

RunRanks = Callable[..., list[Any]]

FOUND = {
    "seconds": {"off": [5.0, 9.0, 5.2], "on": [3.8, 7.4, 4.4], "alone": [2.0, 2.0, 2.0]},
    "waited": {"off": [1.6, 1.8, 1.5], "on": [0.4, 0.9, 0.3], "alone": [2.0, 2.0, 2.0]},
}


def test_what_is_hidden_is_compared_within_a_round_and_counts_for_the_action_alone() -> None:
    parts = hidden(FOUND)
    # Waits fall by 75, 50 and 80 %; steps by 1.2, 1.6 and 0.8 s of 2; shared experts hide 0.4, 0.2 and 0.5 s of 2.
    assert parts == pytest.approx(Hidden(waits=0.75, saved=0.6, shared=0.2))
    assert table(FOUND).splitlines()[2:] == [
        "| off | 5.200 | 1.600 |",
        "| on | 4.400 | 0.400 |",
        "| the all-to-alls alone | 2.000 | |",
    ]


def test_both_must_be_half() -> None:
    for waits, saved in ((0.5, 0.5), (0.49, 0.9), (0.9, 0.49)):
        held = [holds for _, holds in verdicts(Hidden(waits, saved, 0.0))]
        assert held == [waits >= 0.5, saved >= 0.5]


def exchange_twice() -> tuple[list[tuple[str, int]], float, float]:
    mesh = Mesh.create(Layout(ep=2))
    rows = [3, 1] if mesh.rank == 0 else [2, 4]
    back = [3, 2] if mesh.rank == 0 else [1, 4]
    with Messages() as messages:
        all_to_all(torch.arange(2), mesh.ep)
        exchange = Exchange(mesh.ep, rows, back)
        x = torch.randn(sum(rows), 5, requires_grad=True)
        (y,) = finish_exchange(exchange, *start_exchange(exchange, x))
        y.sum().backward()
    return messages.events, messages.waited, messages.replay()


def test_messages_are_noted_and_sent_again(run_ranks: RunRanks) -> None:
    for events, waited, again in run_ranks(2, exchange_twice):
        assert events == [(what, number) for number in range(3) for what in ("launch", "wait")]
        assert waited > 0 and again[0] == again[1] > 0


reason = unavailable()


@pytest.mark.full
@pytest.mark.skipif(reason is not None, reason=reason or "")
def test_a_small_run_between_two_hosts() -> None:
    found = measure(
        parse("--rounds 1 --microbatches 3 --tokens 16 --hidden 32 --expert-hidden 16 --rate 1gbit".split())
    )
    # 3 micro-batches, 2 stages of one layer: counts; rows there and back, forward and backward, weights there and back.
    assert found["messages"] == 3 * 2 * 7 and found["paired"] == 3 / 6
    assert all(len(times) == 1 and times[0] > 0 for kind in ("seconds", "waited") for times in found[kind].values())
    assert "| the all-to-alls alone |" in table(found)
