"""Experts across ranks give one rank's loss, gradients, counts and router bias; also when the batch is unbalanced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from parallel.mesh import Layout
from tests.layouts import Job, train
from tests.training.test_layout_invariance import assert_same_curve, one_rank

RunRanks = Callable[..., list[Any]]

LAYOUTS = {
    "ep2": (2, Layout(ep=2)),
    "ep4": (4, Layout(ep=4)),
    "ep2-tp2": (2, Layout(ep=2, tp=2)),
    "ep2-pp2": (4, Layout(ep=2, pp=2)),
    "ep4-tp2-pp2": (8, Layout(ep=4, tp=2, pp=2)),
}


@pytest.mark.parametrize("config", ["tiny_v3", "tiny_v2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_loss_with_experts_across_ranks(run_ranks: RunRanks, layout: str, config: str, capsys: Any) -> None:
    ranks, axes = LAYOUTS[layout]
    found = run_ranks(ranks, train, Job(layout=axes, config=config, flags={"optimizer": "sgd"}))
    assert_same_curve(found, one_rank(run_ranks, "sgd", config), "sgd", capsys)
