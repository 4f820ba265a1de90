"""Experts and sequences across ranks: one rank's loss, gradients, counts and router bias; unbalanced batches too."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest

from parallel.mesh import Layout
from tests.layouts import Curve, Job, train
from tests.training.test_layout_invariance import assert_same_curve

RunRanks = Callable[..., list[Any]]

LAYOUTS = {
    "ep2": (2, Layout(ep=2)),
    "ep4": (4, Layout(ep=4)),
    "ep2-tp2": (2, Layout(ep=2, tp=2)),
    "ep2-pp2": (4, Layout(ep=2, pp=2)),
    "ep4-tp2-pp2": (8, Layout(ep=4, tp=2, pp=2)),
    "cp2": (2, Layout(cp=2)),
    "cp2-tp2": (4, Layout(cp=2, tp=2)),
    "cp2-ep2-pp2": (4, Layout(cp=2, ep=2, pp=2)),
    "cp4": (4, Layout(cp=4)),
    "cp2-ep4-tp2-pp2": (8, Layout(cp=2, ep=4, tp=2, pp=2)),
}


# V2 with a layer of multi-token prediction, which its published files don't have.
MODELS = {"tiny_v3": {}, "tiny_v2": {"num_nextn_predict_layers": 1}}


def job_of(config: str, layout: Layout | None = None, **overrides: Any) -> Job:
    return Job(
        layout=layout or Layout(), config=config, overrides=MODELS[config] | overrides, flags={"optimizer": "sgd"}
    )


@functools.lru_cache
def one_rank(run_ranks: RunRanks, config: str) -> list[Curve]:
    curves = run_ranks(1, train, job_of(config))
    assert min(curves[0].losses[0][name] for name in ("lm", "mtp_1", "aux")) > 0
    return curves


# In the fast tier those that contain what the others do; all with --full.
FAST = {"tiny_v3": ("ep4-tp2-pp2", "cp2-tp2"), "tiny_v2": ("ep2-tp2", "cp2-ep2-pp2")}
CASES = [
    pytest.param(layout, config, marks=() if layout in FAST[config] else pytest.mark.full)
    for config in MODELS
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("layout", "config"), CASES)
def test_same_loss_of_experts_and_sequences_across_ranks(
    run_ranks: RunRanks, layout: str, config: str, capsys: Any
) -> None:
    ranks, axes = LAYOUTS[layout]
    found = run_ranks(ranks, train, job_of(config, axes))
    assert_same_curve(found, one_rank(run_ranks, config), "sgd", capsys)


EXPERTS = 8
# Normalised, the weight of a token's only choice would be 1, and the router's gradient nothing but rounding.
ONE = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 1, "norm_topk_prob": False}
UNBALANCED = {
    "all tokens to one expert": (ONE, 5, 9.0),
    "an expert without a token": ({}, 1, -9.0),
}


@pytest.mark.parametrize("config", ["tiny_v3", pytest.param("tiny_v2", marks=pytest.mark.full)])
@pytest.mark.parametrize("case", UNBALANCED)
def test_unbalanced_batches_have_the_same_loss(run_ranks: RunRanks, case: str, config: str, capsys: Any) -> None:
    overrides, expert, bonus = UNBALANCED[case]
    favour = tuple(bonus if i == expert else 0.0 for i in range(EXPERTS))
    job = dataclasses.replace(job_of(config, **overrides), favour=favour)
    reference = run_ranks(1, train, job)
    tokens = job.global_batch * job.length
    for loads in reference[0].loads:
        for load in loads.values():
            assert sum(load) == tokens * job.model().num_experts_per_tok
            assert load[expert] == (tokens if bonus > 0 else 0)
    found = run_ranks(2, train, dataclasses.replace(job, layout=Layout(ep=2, tp=2)))
    assert_same_curve(found, reference, "sgd", capsys)


@pytest.mark.parametrize("level", ["expert", "device"])
def test_choices_are_dropped_alike_where_ranks_have_the_same_tokens(
    run_ranks: RunRanks, level: str, capsys: Any
) -> None:
    """A capacity counts over a rank's tokens of a micro-batch: data parallelism doesn't change those."""
    flags = {"moe_expert_capacity_factor": 0.8, "moe_token_drop_level": level}
    job = job_of("tiny_v3")
    job = dataclasses.replace(job, flags=job.flags | flags)
    reference = run_ranks(1, train, job)
    assert min(reference[0].dropped) > 0.05
    found = run_ranks(2, train, dataclasses.replace(job, layout=Layout(ep=2)))
    assert_same_curve(found, reference, "sgd", capsys)
    for curve in found:
        assert curve.dropped[0] == reference[0].dropped[0]
