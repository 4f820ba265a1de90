"""Checkpoints under ZeRO: what replicas share is saved without a layout and read by any; no rank holds the whole."""

from __future__ import annotations

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

JOB = Job(overrides=SMALL, length=16)


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
    """Moments as after many steps, and router biases; the same in any layout is not asked for."""
    generator = torch.Generator().manual_seed(seed)
    for name in engine.optimizer.parameters:
        for moment in engine.optimizer.moments:
            whole = torch.rand(engine.optimizer.read(name).shape, generator=generator)
            engine.optimizer.write(name, whole, moment)
    for _, buffer in engine.named_buffers():
        buffer.copy_(torch.randn(buffer.shape, generator=generator))


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
    one = Job(overrides=SMALL, length=16, flags=flags)
    job = Job(layout=layout, overrides=SMALL, length=16, flags=flags)
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
