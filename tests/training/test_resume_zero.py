"""Runs under ZeRO go on from their checkpoints bit for bit, and from one another's in any stage and layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parallel.mesh import Layout, Mesh
from tests.layouts import Job, flags_of, microbatches_of_step
from tests.training.test_checkpoint import EIGHT, SMALL, assembled, assert_identical
from tests.training.test_checkpoint_zero import state_of
from tests.training.test_weights import logits_of, rounded
from training import checkpoint
from training.engine import Engine
from training.weights import load_weights

STEPS = 10
ONE = Layout()


def job_of(layout: Layout = ONE, **flags: Any) -> Job:
    return Job(layout=layout, overrides=SMALL, length=16, flags=flags)


def train(engine: Engine, job: Job, first: int, last: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of the steps first … last - 1."""
    results, mesh = [], engine.mesh
    for step in range(first, last):
        batches = microbatches_of_step(job, step, engine.config.vocab_size, mesh.dp.rank, mesh.dp.size)
        results.append(engine.train_step(batches, 1e-3))
        assert results[-1].taken
    return [(result.losses["lm"], result.grad_norm) for result in results]


def saved_and_resumed(jobs: list[Job], directory: str) -> list[dict[str, Any]]:
    """On each rank, for each job: ten steps with a save in the middle, beside an engine that loads it and goes on."""
    found, half = [], STEPS // 2
    for number, job in enumerate(jobs):
        engine = Engine(job.model(), flags_of(job), Mesh.create(job.layout))
        train(engine, job, 0, half)
        position = checkpoint.Position(half, half * job.global_batch)
        path = checkpoint.save(engine, Path(directory) / str(number), position, "")
        saved = state_of(engine)
        losses = train(engine, job, half, STEPS)
        other = Engine(job.model(), flags_of(job), engine.mesh)
        assert checkpoint.load(other, path) == position and other.steps_done == half
        loaded = state_of(other)
        resumed = train(other, job, half, STEPS)
        assert engine.loss_scale is None or engine.loss_scale.state() == other.loss_scale.state()
        found.append({"losses": losses, "resumed": resumed, "saved": saved, "loaded": loaded})
        found[-1] |= {"ended": state_of(engine), "ended resumed": state_of(other)}
    return found


def check_resumed(results: list[list[dict[str, Any]]], jobs: list[Job]) -> None:
    for number, _ in enumerate(jobs):
        of_ranks = [rank[number] for rank in results]
        states = {
            kind: assembled([{"state": rank[kind]} for rank in of_ranks])
            for kind in ("saved", "loaded", "ended", "ended resumed")
        }
        assert_identical(states["loaded"], states["saved"])
        assert all(rank["resumed"] == rank["losses"] for rank in of_ranks)
        assert_identical(states["ended resumed"], states["ended"])


RESUMED = [
    pytest.param(2, [job_of(zero_stage=1)], id="dp2"),
    pytest.param(
        2,
        [
            job_of(zero_stage=1, precision="bf16"),
            job_of(zero_stage=1, offload_optimizer="cpu"),
            job_of(zero_stage=1, optimizer="sgd"),
            job_of(zero_stage=1, grad_compression="int8"),
            job_of(zero_stage=1, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"),
            job_of(zero_stage=1, precision="fp16", initial_loss_scale=1024.0, loss_scale_window=3),
            job_of(zero_stage=2),
            job_of(zero_stage=2, offload_optimizer="cpu", precision="bf16"),
            job_of(zero_stage=3),
            job_of(zero_stage=3, precision="bf16"),
            job_of(zero_stage=3, offload_optimizer="cpu", offload_param="cpu"),
        ],
        marks=pytest.mark.full,
        id="dp2, all stages",
    ),
    pytest.param(8, [job_of(EIGHT, zero_stage=1)], marks=pytest.mark.full, id="tp2 pp2 dp2 ep2"),
]


@pytest.mark.parametrize(("ranks", "jobs"), RESUMED)
def test_ten_steps_equal_five_saved_loaded_and_five_more_under_zero(
    run_ranks: Callable[..., Any], tmp_path: Path, ranks: int, jobs: list[Job]
) -> None:
    check_resumed(run_ranks(ranks, saved_and_resumed, jobs, str(tmp_path), timeout=500.0), jobs)


def go_on(job: Job, path: str | None, save: str, steps: int, weights: str | None = None) -> dict[str, Any]:
    """Load what there is, take `steps` steps, save, and take two more; then start from 16-bit weights."""
    engine = Engine(job.model(), flags_of(job), Mesh.create(job.layout))
    position = checkpoint.load(engine, Path(path)) if path else checkpoint.Position(0, 0)
    loaded = state_of(engine)
    train(engine, job, position.step, position.step + steps)
    position = checkpoint.Position(position.step + steps, (position.step + steps) * job.global_batch)
    checkpoint.save(engine, Path(save), position, "")
    found = {"loaded": loaded, "saved": state_of(engine)}
    found["losses"] = train(engine, job, position.step, position.step + 2)
    if weights:
        load_weights(engine, Path(weights))
        found["started"] = state_of(engine)
    return found


def whole(results: list[dict[str, Any]], kind: str) -> dict[str, np.ndarray]:
    return assembled([{"state": result[kind]} for result in results])


def check_next(results: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for rank in results:
        for found, wanted in zip(rank["losses"], expected[0]["losses"], strict=True):
            assert found[0] == pytest.approx(wanted[0], rel=1e-5) and found[1] == pytest.approx(wanted[1], rel=1e-3)


LOADERS = [
    (2, job_of(zero_stage=1)),
    (2, job_of(zero_stage=2)),
    (2, job_of(zero_stage=3, offload_optimizer="cpu")),
    (2, job_of(Layout(tp=2))),
    (4, job_of(Layout(tp=2), zero_stage=2)),
    (4, job_of(Layout(cp=2), zero_stage=3)),
    (8, job_of(EIGHT, zero_stage=1)),
]


@pytest.mark.parametrize(
    ("ranks", "job", "loaders"),
    [
        pytest.param(2, job_of(zero_stage=3, save_16bit_weights=True), [], id="stage 3"),
        pytest.param(2, job_of(zero_stage=2, save_16bit_weights=True), [], marks=pytest.mark.full, id="stage 2"),
        pytest.param(8, job_of(EIGHT, zero_stage=1, save_16bit_weights=True), [], marks=pytest.mark.full, id="stage 1"),
        pytest.param(2, job_of(zero_stage=3), LOADERS, marks=pytest.mark.full, id="stage 3 by all"),
        pytest.param(4, job_of(Layout(tp=2), zero_stage=2), LOADERS, marks=pytest.mark.full, id="stage 2 by all"),
        pytest.param(8, job_of(EIGHT, zero_stage=1), LOADERS, marks=pytest.mark.full, id="stage 1 by all"),
    ],
)
def test_any_stage_loads_what_another_saved(
    run_ranks: Callable[..., Any], tmp_path: Path, ranks: int, job: Job, loaders: list[tuple[int, Job]]
) -> None:
    """Saved under ZeRO, loaded and saved by one plain rank, loaded by the first layout again, then by `loaders`."""
    saved = run_ranks(ranks, go_on, job, None, str(tmp_path / "a"), 2)
    step, one = tmp_path / "a" / "step_00000002", job_of()
    plain = run_ranks(1, go_on, one, str(step), str(tmp_path / "b"), 0)
    with_weights = bool(job.flags.get("save_16bit_weights"))
    given = str(step / "weights") if with_weights else None
    again = run_ranks(ranks, go_on, job, str(tmp_path / "b" / "step_00000002"), str(tmp_path / "c"), 0, given)
    expected = whole(saved, "saved")
    for results in (plain, again):
        assert_identical(whole(results, "loaded"), expected)
        check_next(results, saved)
    assert json.loads((step / "meta.json").read_text())["zero_stage"] == job.flags["zero_stage"]
    if with_weights:
        check_weights(step, one)
        assert_identical(whole(again, "started"), rounded(expected))
    for number, (size, loader) in enumerate(loaders):
        results = run_ranks(size, go_on, loader, str(step), str(tmp_path / f"of_{number}"), 0, timeout=300.0)
        assert_identical(whole(results, "loaded"), expected)
        check_next(results, saved)


def check_weights(step: Path, one: Job) -> None:
    """The step's 16-bit weights give the logits, to the bit, of its masters rounded to bf16."""
    plain, reference = (Engine(one.model(), flags_of(one), Mesh.create(Layout())) for _ in range(2))
    load_weights(plain, checkpoint.find_weights(step))
    checkpoint.load(reference, step)
    assert not torch.equal(logits_of(reference), logits_of(plain))
    for _, parameter in reference.named_parameters():
        parameter.data = parameter.data.bfloat16().float()
    assert torch.equal(logits_of(reference), logits_of(plain))
