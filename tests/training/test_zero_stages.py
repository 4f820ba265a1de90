"""ZeRO stages 2 and 3 train as the plain run does: losses, norms, parameters, on every layout they go with.

Every case is compared with the plain run on one rank, from the same seed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from parallel.mesh import Layout, Mesh
from tests.layouts import Job, Shard, flags_of, microbatches_of_step, shards
from training.arguments import Arguments
from training.engine import Engine
from training.zero import engine_config


@dataclass
class Run:
    """losses of every step, then of an evaluation; norms; masters at the end, by global name."""

    losses: list[float]
    norms: list[float]
    final: dict[str, Shard]


@contextmanager
def cut_everything() -> Iterator[None]:
    """By default stage 3 doesn't cut parameters of less than 100,000 values: none of this tiny model's."""

    def config(arguments: Arguments) -> dict[str, Any]:
        made = engine_config(arguments)
        made["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return made

    with mock.patch("training.zero.engine_config", config):
        yield


def run(job: Job) -> Run:
    """On every rank: `job.steps` steps, and an evaluation after the third."""
    mesh = Mesh.create(job.layout)
    config = job.model()
    with cut_everything():
        engine = Engine(config, flags_of(job), mesh)
    found = Run([], [], {})
    for step in range(job.steps):
        batches = microbatches_of_step(job, step, config.vocab_size, mesh.dp.rank, mesh.dp.size)
        result = engine.train_step(batches, lr=1e-3)
        assert result.taken
        found.losses.append(sum(result.losses.values()))
        found.norms.append(result.grad_norm)
        if step == 2:
            batches = microbatches_of_step(job, 1000, config.vocab_size, mesh.dp.rank, mesh.dp.size)
            found.losses.append(sum(engine.evaluate(batches)[0].values()))
    masters = {}
    for name, parameter in engine.named_parameters():
        masters[name] = engine.optimizer.read(name).detach().clone()
        masters[name].sharding = parameter.sharding
    found.final = shards(masters, mesh)
    return found


CASES = {
    "dp2": (2, Job(global_batch=8, micro_batch=2)),
    "dp4": (4, Job(global_batch=8)),
    "tp2-dp2": (4, Job(Layout(tp=2), global_batch=8, micro_batch=2)),
    "cp2-dp2": (4, Job(Layout(cp=2), global_batch=8, micro_batch=2)),
    "tp2-cp2": (4, Job(Layout(tp=2, cp=2), global_batch=8)),
}
OFFLOAD = {
    "": {},
    "optimizer": {"offload_optimizer": "cpu"},
    "both": {"offload_optimizer": "cpu", "offload_param": "cpu"},
    "param": {"offload_param": "cpu"},
}


Runs = Callable[..., Any]


@functools.lru_cache
def plain(run_ranks: Runs, steps: int, micro_batch: int, flags: tuple[tuple[str, Any], ...] = ()) -> Run:
    """On one rank, without DeepSpeed."""
    return run_ranks(1, run, Job(steps=steps, global_batch=8, micro_batch=micro_batch, flags=dict(flags)))[0]


def worst(found: list[Run], expected: Run) -> tuple[float, float]:
    """The largest relative difference of a loss, and of a norm, at any step on any rank."""
    losses = max(float(np.abs(np.array(one.losses) / expected.losses - 1).max()) for one in found)
    norms = max(float(np.abs(np.array(one.norms) / expected.norms - 1).max()) for one in found)
    return losses, norms


EVERY = [
    pytest.param(stage, offload, case, 20, marks=pytest.mark.full)
    for stage, offload in ((2, ""), (2, "optimizer"), (3, ""), (3, "optimizer"), (3, "both"), (3, "param"))
    for case in CASES
]


@pytest.mark.parametrize(("stage", "offload", "case", "steps"), [(3, "", "dp2", 5), (2, "optimizer", "dp2", 4), *EVERY])
def test_stages_2_and_3_train_as_the_plain_run(
    run_ranks: Runs, stage: int, offload: str, case: str, steps: int
) -> None:
    ranks, job = CASES[case]
    flags = {"zero_stage": stage, **OFFLOAD[offload]}
    found = run_ranks(ranks, run, dataclasses.replace(job, steps=steps, flags=flags), timeout=300)
    losses, norms = worst(found, plain(run_ranks, steps, job.micro_batch))
    print(f"losses differ by {losses:.1e}, norms by {norms:.1e}")
    assert losses <= 1e-4 and norms <= 1e-3
    for name, shard in found[0].final.items():  # replicas: the same masters, bit for bit
        for one in found[1:]:
            other = one.final[name]
            assert other.index != shard.index or np.array_equal(other.tensor, shard.tensor), name


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(("stage", "offload"), [(2, ""), (2, "optimizer"), (3, ""), (3, "both")])
def test_16_bits_stay_within_a_percent_of_fp32(run_ranks: Runs, stage: int, offload: str, precision: str) -> None:
    ranks, job = CASES["dp2"]
    flags = {"zero_stage": stage, "precision": precision, **OFFLOAD[offload]}
    found = run_ranks(ranks, run, dataclasses.replace(job, steps=20, flags=flags), timeout=300)
    losses, _ = worst(found, plain(run_ranks, 20, job.micro_batch))
    assert losses <= 0.01


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    "flags",
    [
        {"recompute_granularity": "full"},
        {"recompute_granularity": "selective", "recompute_modules": ("deepseek", "core_attn", "shared_experts")},
        {"recompute_granularity": "selective", "recompute_modules": ("mlp", "moe")},
        {"optimizer": "sgd"},
        {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    ],
    ids=["full", "parts", "layers", "sgd", "bf16 moments"],
)
def test_they_go_with_recomputation_and_other_optimizers(run_ranks: Runs, stage: int, flags: dict[str, Any]) -> None:
    ranks, job = CASES["dp2"]
    found = run_ranks(ranks, run, dataclasses.replace(job, steps=5, flags={**flags, "zero_stage": stage}), timeout=300)
    losses, norms = worst(found, plain(run_ranks, 5, job.micro_batch, tuple(flags.items())))
    assert losses <= 1e-4 and norms <= 1e-3


def not_finite(job: Job) -> dict[str, Any]:
    """On every rank: a step, one whose gradient isn't finite on the last rank, and what a third one does."""
    mesh, config = Mesh.create(job.layout), job.model()
    with cut_everything():
        engine = Engine(config, flags_of(job), mesh)

    def step(number: int) -> Any:
        return engine.train_step(microbatches_of_step(job, number, config.vocab_size, mesh.dp.rank, mesh.dp.size), 1e-3)

    def state() -> dict[str, torch.Tensor]:
        kinds = (None, *engine.optimizer.moments)
        return {
            f"{kind} {name}": engine.optimizer.read(name, kind).clone()
            for name in engine.optimizer.parameters
            for kind in kinds
        }

    step(0)
    before = state()
    parameter = engine.optimizer.parameters["norm.weight"]
    # Added once, on the last rank alone, to the gradient of one micro-batch.
    handle = parameter.register_hook(lambda gradient: gradient * (torch.nan if mesh.world.is_last else 1.0))
    spoilt = step(1)
    handle.remove()
    after = state()
    return {
        "taken": spoilt.taken,
        "changed": [name for name, value in before.items() if not torch.equal(value, after[name])],
        "third": step(1).losses["lm"],
    }


@pytest.mark.parametrize(
    ("stage", "offload"),
    [(3, ""), *(pytest.param(*case, marks=pytest.mark.full) for case in ((2, ""), (2, "optimizer"), (3, "both")))],
)
def test_a_gradient_that_is_not_finite_on_one_rank_is_taken_on_none(run_ranks: Runs, stage: int, offload: str) -> None:
    ranks, job = CASES["dp2"]
    flags = {"zero_stage": stage, **OFFLOAD[offload]}
    found = run_ranks(ranks, not_finite, dataclasses.replace(job, flags=flags), timeout=300)
    expected = plain(run_ranks, 5, job.micro_batch)
    for one in found:
        assert not one["taken"] and one["changed"] == []
        assert np.isfinite(one["third"])
    assert len({one["third"] for one in found}) == 1
    assert found[0]["third"] < expected.losses[0]


def places(job: Job) -> dict[str, Any]:
    """Where state lies and what steps it, on one rank, after a step."""
    mesh, config = Mesh.create(job.layout), job.model()
    with cut_everything():
        engine = Engine(config, flags_of(job), mesh)
    engine.train_step(microbatches_of_step(job, 0, config.vocab_size, mesh.dp.rank, mesh.dp.size), 1e-3)
    zero: Any = engine.optimizer
    partitions = [tensor for group in zero.inner.param_groups for tensor in group["params"]]
    moments = [value for state in zero.inner.state.values() for value in state.values() if torch.is_tensor(value)]
    return {
        "optimizer": type(zero.inner).__name__,
        "devices": sorted({tensor.device.type for tensor in (*partitions, *moments)}),
        "left": sum(p.numel() for p in zero.parameters.values()),
        "no_sync": _refusal(engine),
    }


def _refusal(engine: Engine) -> str:
    with pytest.raises(RuntimeError) as caught, engine.reducer.no_sync():
        pass
    return str(caught.value)


@pytest.mark.parametrize(
    ("offload", "optimizer"),
    [("both", "DeepSpeedCPUAdam"), pytest.param("", "FusedAdamW", marks=pytest.mark.full)],
)
def test_offloaded_state_is_on_the_host_and_no_sync_is_refused(run_ranks: Runs, offload: str, optimizer: str) -> None:
    ranks, job = CASES["dp2"]
    flags = {"zero_stage": 3, **OFFLOAD[offload]}
    for one in run_ranks(ranks, places, dataclasses.replace(job, flags=flags), timeout=300):
        assert one["optimizer"] == optimizer and one["devices"] == ["cpu"]
        assert one["left"] == 0  # parameters have no values of their own outside of their use
        assert "no_sync() doesn't go with ZeRO stage 3" in one["no_sync"]
