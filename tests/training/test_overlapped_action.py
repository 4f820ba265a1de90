"""A forward that runs together with a backward changes when things are computed, and no number."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parallel.mesh import Layout
from tests.layouts import Curve, Job, relative_errors, train, whole

RunRanks = Callable[..., list[Any]]

PAIRED = {"pipeline_schedule": "dualpipe-v", "overlap_moe_expert_parallel_comm": True, "optimizer": "sgd"}
LAYOUTS = {
    "ep2-pp2": (4, Layout(ep=2, pp=2), {}),
    "ep2-pp2, recomputed": (4, Layout(ep=2, pp=2), {"recompute_granularity": "full"}),
    "ep2": (2, Layout(ep=2), {}),
    "ep2-tp2, parts recomputed": (
        2,
        Layout(ep=2, tp=2),
        {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "moe_act", "shared_experts")},
    ),
}
SLOW = ("ep2", "ep2-tp2, parts recomputed")


def job(layout: Layout, flags: dict[str, Any]) -> Job:
    """One step of as many micro-batches as give a rank pairs."""
    return Job(layout=layout, flags=flags, steps=1, global_batch=8, length=32)


@functools.lru_cache
def one_rank(run_ranks: RunRanks) -> list[Curve]:
    return run_ranks(1, train, job(Layout(), {"optimizer": "sgd"}))


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.full) if name in SLOW else name for name in LAYOUTS]
)
def test_pairs_give_one_ranks_gradients(run_ranks: RunRanks, layout: str) -> None:
    """With MTP and the auxiliary loss: every tensor of step 1, and what counts and bias of the router become."""
    ranks, axes, flags = LAYOUTS[layout]
    found, expected = run_ranks(ranks, train, job(axes, PAIRED | flags)), one_rank(run_ranks)
    errors = relative_errors(whole(found, "first_gradients"), whole(expected, "first_gradients"))
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= 1e-5, f"gradient of {worst} is off by {errors[worst]:.2e}"
    for curve in found:
        for losses, wanted in zip(curve.losses, expected[0].losses, strict=True):
            assert losses == pytest.approx(wanted, rel=1e-5) and {"mtp_1", "aux"} < set(losses)
        for layer, bias in curve.biases.items():
            assert np.array_equal(bias, expected[0].biases[layer]), layer
        for layer, load in curve.loads[0].items():
            assert load == expected[0].loads[0][layer]
