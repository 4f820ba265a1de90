"""Checkpoints under ZeRO: what replicas share is saved without a layout and read by any; no rank holds the whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.mesh import Layout, Mesh
from parallel.sharding import sharding_of
from tests.layouts import Job, Shard, flags_of, shards
from tests.training.sharded_state import SharedState
from tests.training.test_checkpoint import EIGHT, SMALL, assembled, assert_identical
from training import checkpoint
from training.engine import Engine

TWO_LAYERS = SMALL | {"num_hidden_layers": 2}


def state_of(engine: Engine) -> dict[str, Shard]:
    """Every tensor of the state, this rank's block, by global name."""
    state: dict[str, torch.Tensor] = {}
    for name, parameter in engine.optimizer.parameters.items():
        for kind in (None, *engine.optimizer.moments):
            value = engine.optimizer.read(name, kind).detach().clone()
            value.sharding = sharding_of(parameter)  # type: ignore[attr-defined]
            state[f"{kind}.{name}"] = value
    found = shards(state, engine.mesh)
    return found | {name: Shard(buffer.numpy().copy(), None, 0) for name, buffer in engine.named_buffers()}


def random_state(engine: Engine, seed: int) -> None:
    """Masters, moments and router biases, on one rank."""
    generator = torch.Generator().manual_seed(seed)
    for name in engine.optimizer.parameters:
        for moment in (None, *engine.optimizer.moments):
            value = engine.optimizer.read(name, moment)
            drawn = torch.randn(value.shape, generator=generator) * value.shape[-1] ** -0.5
            engine.optimizer.write(name, drawn + (value.ndim == 1), moment)
    engine.optimizer.written()
    for _, buffer in engine.named_buffers():
        buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)


def shared_to_and_from(job: Job, plain: str, shared: str, chunk: int) -> dict[str, Any]:
    """Load a plain checkpoint, save it from a state that replicas share, and load this again."""
    mesh = Mesh.create(job.layout)
    engine = Engine(job.model(), flags_of(job), mesh)
    engine.optimizer = state = SharedState(engine.optimizer, mesh)
    before, checkpoint._CHUNK_BYTES = checkpoint._CHUNK_BYTES, chunk
    try:
        position = checkpoint.load(engine, Path(plain))
        steps = state.steps
        found = state_of(engine)
        state.live_bytes = 0
        path = checkpoint.save(engine, Path(shared), position, "")
        live = state.live_bytes
        other = Engine(job.model(), flags_of(job), mesh)
        other.optimizer = SharedState(other.optimizer, mesh)
        checkpoint.load(other, path)
        rounded = all(
            torch.equal(parameter.detach(), other.optimizer.read(name).to(parameter.dtype))
            for name, parameter in other.named_parameters()
        )
    finally:
        checkpoint._CHUNK_BYTES = before
    sizes = {"live": live, "own": state.own_bytes, "largest": state.largest_bytes}
    return {"state": found, "again": state_of(other), "rounded": rounded, "steps": steps, **sizes}


def saved_plain(job: Job, path: str) -> dict[str, Any]:
    mesh = Mesh.create(job.layout)
    engine = Engine(job.model(), flags_of(job), mesh)
    random_state(engine, seed=3)
    checkpoint.save(engine, Path(path), checkpoint.Position(3, 12), "")
    return {"state": state_of(engine)}


def loaded_plain(job: Job, path: str) -> dict[str, Any]:
    engine = Engine(job.model(), flags_of(job), Mesh.create(job.layout))
    checkpoint.load(engine, Path(path))
    return {"state": state_of(engine)}


@pytest.mark.parametrize(
    ("ranks", "layout", "flags"),
    [
        (2, Layout(), {"precision": "bf16"}),
        pytest.param(4, Layout(tp=2, ep=2), {}, marks=pytest.mark.full),
        pytest.param(4, Layout(pp=2), {}, marks=pytest.mark.full),
        pytest.param(8, EIGHT, {}, marks=pytest.mark.full),
        pytest.param(4, Layout(cp=2, ep=4), {"optimizer": "sgd"}, marks=pytest.mark.full),
    ],
)
def test_state_that_replicas_share_is_saved_as_any_other_and_never_held_whole(
    run_ranks: Callable[..., Any], tmp_path: Path, ranks: int, layout: Layout, flags: dict[str, Any]
) -> None:
    one = Job(overrides=TWO_LAYERS, length=16, flags=flags)
    job = Job(layout=layout, overrides=TWO_LAYERS, length=16, flags=flags)
    saved = assembled(run_ranks(1, saved_plain, one, str(tmp_path / "plain")))
    plain = str(tmp_path / "plain" / "step_00000003")
    chunk = 1 << 17  # many of them
    results = run_ranks(ranks, shared_to_and_from, job, plain, str(tmp_path / "shared"), chunk)
    assert_identical(assembled(results), saved)
    assert_identical(assembled([{"state": result["again"]} for result in results]), saved)
    for rank in results:
        assert rank["rounded"] and rank["steps"] == 3
        # One replica's share, uneven by a block at most, and the block that is being read.
        assert rank["live"] <= rank["own"] + 2 * rank["largest"] + 4096, rank
    again = run_ranks(1, loaded_plain, one, str(tmp_path / "shared" / "step_00000003"))
    assert_identical(assembled(again), saved)


def engine_of(**flags: Any) -> Engine:
    job = Job(overrides=TWO_LAYERS, length=16, flags=flags)
    return Engine(job.model(), flags_of(job), Mesh.create(Layout()))


def test_the_loss_scale_goes_on_and_starts_anew_after_a_checkpoint_without_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(precision="fp16", hysteresis=2)
    assert engine.loss_scale is not None
    engine.loss_scale.update(overflow=True)
    path = checkpoint.save(engine, tmp_path, checkpoint.Position(1, 4), "")
    engine.loss_scale.update(overflow=True)
    lowered = checkpoint.save(engine, tmp_path, checkpoint.Position(2, 8), "")
    other = engine_of(precision="fp16", hysteresis=2)
    assert other.loss_scale is not None
    for saved, state in ((path, {"value": 65536.0, "taken": 0, "left": 1}), (lowered, engine.loss_scale.state())):
        checkpoint.load(other, saved)
        assert other.loss_scale.state() == state
    assert other.loss_scale.value == 32768.0

    meta = json.loads((path / checkpoint.META).read_text())  # as it was before there were loss scales and stages
    for key in ("loss_scale", "zero_stage"):
        del meta[key]
    (path / checkpoint.META).write_text(json.dumps(meta))
    anew = engine_of(precision="fp16", hysteresis=2)
    assert anew.loss_scale is not None
    with caplog.at_level("INFO", "training.checkpoint"):
        assert checkpoint.load(anew, path) == checkpoint.Position(1, 4)
    assert anew.loss_scale.value == 65536.0 and "no loss scale: it starts at 65536" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO", "training.checkpoint"):
        checkpoint.load(engine_of(), path)
    assert not caplog.records  # fp32 has none


def test_moments_become_those_that_the_run_asks_for(tmp_path: Path) -> None:
    full, halved = engine_of(), engine_of(exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    random_state(full, seed=5)
    checkpoint.load(halved, checkpoint.save(full, tmp_path, checkpoint.Position(1, 4), ""))
    back = engine_of()
    checkpoint.load(back, checkpoint.save(halved, tmp_path, checkpoint.Position(2, 8), ""))
    for name in full.optimizer.parameters:
        assert torch.equal(full.optimizer.read(name), back.optimizer.read(name))
        for moment in full.optimizer.moments:
            ours, theirs = full.optimizer.read(name, moment), halved.optimizer.read(name, moment)
            assert theirs.dtype == torch.bfloat16 and torch.equal(ours.bfloat16(), theirs)
            assert torch.equal(back.optimizer.read(name, moment), theirs.float())
