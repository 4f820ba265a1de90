"""ZeRO stages 2 and 3 train as the plain run does: losses, norms, parameters, on every layout they go with.

Every case is compared with the plain run on one rank, from the same seed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import os

STEPS = int(os.environ.get("STEPS", 20))
import numpy as np
import pytest

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


@functools.lru_cache
def plain(run_ranks: Callable[..., Any], steps: int, micro_batch: int, flags: tuple[tuple[str, Any], ...] = ()) -> Run:
    job = Job(steps=steps, global_batch=8, micro_batch=micro_batch, flags=dict(flags))
    return run_ranks(1, run, job)[0]


def with_flags(job: Job, steps: int, **flags: Any) -> Job:
    import dataclasses

    return dataclasses.replace(job, steps=steps, flags={**job.flags, **flags})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("stage", "offload"), [(2, ""), (2, "optimizer"), (3, ""), (3, "optimizer"), (3, "both")])
def test_stages_2_and_3_train_as_the_plain_run(run_ranks, stage, offload, case) -> None:
    ranks, job = CASES[case]
    found = run_ranks(ranks, run, with_flags(job, STEPS, zero_stage=stage, **OFFLOAD[offload]), timeout=300)
    expected = plain(run_ranks, STEPS, job.micro_batch)
    for one in found:
        l = np.abs(np.array(one.losses) / expected.losses - 1).max()
        n = np.abs(np.array(one.norms) / expected.norms - 1).max()
        print(f"{case} {stage} {offload}: {l:.1e} {n:.1e}")
        assert l <= 1e-4 and n <= 1e-3
