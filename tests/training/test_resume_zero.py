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
from tests.training.test_checkpoint import EIGHT, assembled, assert_identical
from tests.training.test_checkpoint_zero import TWO_LAYERS, state_of
from tests.training.test_weights import logits_of, rounded
from training import checkpoint
from training.engine import Engine
from training.weights import load_weights

STEPS = 10
ONE = Layout()


def job_of(layout: Layout = ONE, **flags: Any) -> Job:
    return Job(layout=layout, overrides=TWO_LAYERS, length=16, flags=flags)


def train(engine: Engine, job: Job, first: int, last: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of the steps first … last - 1."""
    results, mesh = [], engine.mesh
    for step in range(first, last):
        batches = microbatches_of_step(job, step, engine.config.vocab_size, mesh.dp.rank, mesh.dp.size)
        results.append(engine.train_step(batches, 1e-3))
        assert results[-1].taken
    return [(result.losses["lm"], result.grad_norm) for result in results]


def saved_and_resumed(job: Job, directory: str) -> dict[str, Any]:
    """On each rank: ten steps with a save in the middle, beside an engine that loads it and goes on."""
    half = STEPS // 2
    engine = Engine(job.model(), flags_of(job), Mesh.create(job.layout))
    train(engine, job, 0, half)
    position = checkpoint.Position(half, half * job.global_batch)
    path = checkpoint.save(engine, Path(directory), position, "")
    found: dict[str, Any] = {"saved": state_of(engine), "losses": train(engine, job, half, STEPS)}
    other = Engine(job.model(), flags_of(job), engine.mesh)
    assert checkpoint.load(other, path) == position and other.steps_done == half
    found |= {"loaded": state_of(other), "resumed": train(other, job, half, STEPS)}
    found |= {"ended": state_of(engine), "ended resumed": state_of(other)}
    scales = [None if e.loss_scale is None else e.loss_scale.state() for e in (engine, other)]
    assert scales[0] == scales[1]
    return found


FP16 = {"precision": "fp16", "initial_loss_scale": 1024.0, "loss_scale_window": 3}
RESUMED = {
    "1": (2, job_of(zero_stage=1)),
    "1 bf16": (2, job_of(zero_stage=1, precision="bf16")),
    "1 bf16 moments": (2, job_of(zero_stage=1, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")),
    "1 fp16": (2, job_of(zero_stage=1, **FP16)),
    "1 sgd": (2, job_of(zero_stage=1, optimizer="sgd")),
    "1 offloaded": (2, job_of(zero_stage=1, offload_optimizer="cpu")),
    "1 int8": (2, job_of(zero_stage=1, grad_compression="int8")),
    "1 tp2-pp2-dp2-ep2": (8, job_of(EIGHT, zero_stage=1)),
    "2": (2, job_of(zero_stage=2)),
    "2 bf16 offloaded": (2, job_of(zero_stage=2, offload_optimizer="cpu", precision="bf16")),
    "2 fp16": (2, job_of(zero_stage=2, **FP16)),
    "3": (2, job_of(zero_stage=3)),
    "3 fp16": (2, job_of(zero_stage=3, **FP16)),
    "3 bf16": (2, job_of(zero_stage=3, precision="bf16")),
    "3 offloaded": (2, job_of(zero_stage=3, offload_optimizer="cpu", offload_param="cpu")),
}


@pytest.mark.parametrize(
    "case", ["1", *(pytest.param(name, marks=pytest.mark.full) for name in RESUMED if name != "1")]
)
def test_ten_steps_equal_five_saved_loaded_and_five_more_under_zero(
    run_ranks: Callable[..., Any], tmp_path: Path, case: str
) -> None:
    ranks, job = RESUMED[case]
    results = run_ranks(ranks, saved_and_resumed, job, str(tmp_path), timeout=250.0)
    assert_identical(whole(results, "loaded"), whole(results, "saved"))
    assert all(rank["resumed"] == rank["losses"] for rank in results)
    assert_identical(whole(results, "ended resumed"), whole(results, "ended"))


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


@pytest.mark.parametrize(
    ("ranks", "job"),
    [
        pytest.param(2, job_of(zero_stage=3, save_16bit_weights=True), id="stage 3"),
        pytest.param(2, job_of(zero_stage=2, save_16bit_weights=True), marks=pytest.mark.full, id="stage 2"),
        pytest.param(8, job_of(EIGHT, zero_stage=1, save_16bit_weights=True), marks=pytest.mark.full, id="stage 1"),
    ],
)
def test_zero_and_plain_runs_load_what_the_other_saved(
    run_ranks: Callable[..., Any], tmp_path: Path, ranks: int, job: Job
) -> None:
    """Saved under ZeRO, loaded and saved by one plain rank, loaded under ZeRO again; the 16-bit weights too."""
    saved = run_ranks(ranks, go_on, job, None, str(tmp_path / "a"), 2)
    step, one = tmp_path / "a" / "step_00000002", job_of()
    plain = run_ranks(1, go_on, one, str(step), str(tmp_path / "b"), 0)
    given = str(step / "weights")
    again = run_ranks(ranks, go_on, job, str(tmp_path / "b" / "step_00000002"), str(tmp_path / "c"), 0, given)
    expected = whole(saved, "saved")
    for results in (plain, again):
        assert_identical(whole(results, "loaded"), expected)
        check_next(results, saved)
    assert json.loads((step / "meta.json").read_text())["zero_stage"] == job.flags["zero_stage"]
    check_weights(step, one)
    assert_identical(whole(again, "started"), rounded(expected))


RUNS = {
    "plain tp2": (2, job_of(Layout(tp=2))),
    "1 tp2-pp2-dp2-ep2": (8, job_of(EIGHT, zero_stage=1)),
    "1 dp2 offloaded": (2, job_of(zero_stage=1, offload_optimizer="cpu")),
    "2 tp2-dp2": (4, job_of(Layout(tp=2), zero_stage=2)),
    "3 cp2-dp2": (4, job_of(Layout(cp=2), zero_stage=3)),
    "3 dp2 offloaded": (2, job_of(zero_stage=3, offload_optimizer="cpu", offload_param="cpu")),
}
PAIRS = [(saver, list(RUNS)[(i + ahead) % len(RUNS)]) for i, saver in enumerate(RUNS) for ahead in (1, 4)]


@pytest.mark.full
@pytest.mark.parametrize(("saver", "loader"), PAIRS)
def test_any_layout_and_stage_loads_what_another_saved(
    run_ranks: Callable[..., Any], tmp_path: Path, saver: str, loader: str
) -> None:
    (ranks, job), (others, other) = RUNS[saver], RUNS[loader]
    saved = run_ranks(ranks, go_on, job, None, str(tmp_path / "a"), 2)
    path = str(tmp_path / "a" / "step_00000002")
    results = run_ranks(others, go_on, other, path, str(tmp_path / "b"), 0)
    assert_identical(whole(results, "loaded"), whole(saved, "saved"))
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
