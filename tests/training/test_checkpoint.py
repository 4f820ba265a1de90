"""Checkpoints: a resumed run goes on bit for bit, any layout loads any other's, nothing half-written is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parallel.mesh import Layout, Mesh
from parallel.sharding import sharding_of
from tests.layouts import Job, Shard, flags_of, microbatches_of_step, shards
from training import checkpoint
from training.engine import Engine
from training.failures import ConfigurationError

SMALL = dict(vocab_size=203, hidden_size=64, intermediate_size=64, moe_intermediate_size=32)
ONE = Layout()
EIGHT = Layout(tp=2, pp=2, ep=2)


def run(job: Job, first: int, last: int, load: str | None, save: str | None) -> dict[str, Any]:
    """Steps first … last-1 on a rank of a pool; returns losses and every tensor of the state, by global name."""
    mesh = Mesh.create(job.layout)
    config = job.model()
    engine = Engine(config, flags_of(job), mesh)
    done = checkpoint.load(engine, Path(load)) if load else checkpoint.Position(0, 0)
    assert done.step == first and done.consumed_samples == first * job.global_batch
    losses = []
    for step in range(first, last):
        batches = microbatches_of_step(job, step, config.vocab_size, mesh.dp.rank, mesh.dp.size)
        losses.append(engine.train_step(batches, 1e-3))
    if save:
        progress = checkpoint.Position(last, last * job.global_batch)
        checkpoint.save(engine, Path(save), progress, "flags: none\n")
    state: dict[str, torch.Tensor] = {}
    for name, parameter in engine.optimizer.parameters.items():
        for kind in (None, *engine.optimizer.moments):
            value = engine.optimizer.read(name, kind).detach().clone()
            value.sharding = sharding_of(parameter)
            state[f"{kind}.{name}"] = value
    found: dict[str, Shard] = shards(state, mesh)
    for name, buffer in engine.named_buffers():
        found[name] = Shard(buffer.numpy().copy(), None, 0)
    return {"losses": [(r.losses["lm"], r.grad_norm) for r in losses], "state": found}


def assembled(results: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    parts: dict[str, dict[int, Shard]] = {}
    for result in results:
        for name, shard in result["state"].items():
            parts.setdefault(name, {})[shard.index] = shard
    return {
        name: by[0].tensor
        if by[0].split_dim is None
        else np.concatenate([by[i].tensor for i in sorted(by)], by[0].split_dim)
        for name, by in parts.items()
    }


def assert_identical(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value), f"{name} differs"


@pytest.mark.parametrize(
    ("ranks", "layout", "flags"),
    [(8, EIGHT, {}), (2, Layout(tp=2, ep=2), {"precision": "bf16"}), (1, ONE, {"optimizer": "sgd"})],
    ids=["tp2-pp2-dp2-ep2 adamw", "tp2-ep2 bf16", "one rank sgd"],
)
def test_ten_steps_equal_five_saved_loaded_and_five_more(
    run_ranks: Callable[..., Any], tmp_path: Path, ranks: int, layout: Layout, flags: dict[str, Any]
) -> None:
    job = Job(layout=layout, overrides=SMALL, flags=flags, length=16)
    straight = run_ranks(ranks, run, job, 0, 10, None, None)
    first = run_ranks(ranks, run, job, 0, 5, None, str(tmp_path))
    second = run_ranks(ranks, run, job, 5, 10, str(tmp_path / "step_00000005"), None)
    assert first[0]["losses"] + second[0]["losses"] == straight[0]["losses"]
    assert_identical(assembled(second), assembled(straight))


def test_any_layout_loads_what_another_saved(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    def job(layout: Layout) -> Job:
        return Job(layout=layout, overrides=SMALL, length=16)

    saved = assembled(run_ranks(8, run, job(EIGHT), 0, 3, None, str(tmp_path)))
    path = str(tmp_path / "step_00000003")
    again = tmp_path / "again"
    assert_identical(assembled(run_ranks(1, run, job(ONE), 3, 3, path, str(again))), saved)
    # Experts in other blocks than they were saved in, from ranks that share them in another way.
    assert_identical(assembled(run_ranks(4, run, job(Layout(tp=2, ep=4)), 3, 3, path, None)), saved)
    for ranks, layout in ((4, Layout(pp=4)), (4, Layout(tp=4)), (2, Layout(ep=2))):
        assert_identical(assembled(run_ranks(ranks, run, job(layout), 3, 3, str(again / "step_00000003"), None)), saved)


def test_an_interrupted_save_is_never_taken_for_a_checkpoint(tmp_path: Path) -> None:
    job = Job(overrides=SMALL, length=16)
    engine = Engine(job.model(), flags_of(job), Mesh.create(ONE))
    complete = checkpoint.save(engine, tmp_path, checkpoint.Position(7, 28), "")
    assert checkpoint.newest(tmp_path) == complete
    (tmp_path / ".step_00000008.partial").mkdir()
    (tmp_path / "step_00000009").mkdir()  # no meta.json
    (tmp_path / "notes").mkdir()
    assert checkpoint.newest(tmp_path) == complete
    assert checkpoint.newest(tmp_path / "nowhere") is None
    (tmp_path / ".step_00000007.replaced" / "full").mkdir(parents=True)  # a save was killed between its renames
    assert checkpoint.save(engine, tmp_path, checkpoint.Position(7, 28), "") == complete
    assert checkpoint.save(engine, tmp_path, checkpoint.Position(8, 32), "") == checkpoint.newest(tmp_path)
    assert not list(tmp_path.glob(".*"))


def test_a_checkpoint_of_another_model_or_optimizer_is_refused_before_anything_changes(tmp_path: Path) -> None:
    job = Job(overrides=SMALL, length=16)
    engine = Engine(job.model(), flags_of(job), Mesh.create(ONE))
    path = checkpoint.save(engine, tmp_path, checkpoint.Position(1, 4), "")
    for changed, message in (
        (dataclasses.replace(job, overrides=SMALL | {"num_hidden_layers": 3}), "num_hidden_layers 4 there, 3 here"),
        (dataclasses.replace(job, flags={"optimizer": "sgd"}), "--optimizer adamw"),
        (dataclasses.replace(job, flags={"global_batch_size": 2}), "--global-batch-size 8, this run has 2"),
    ):
        other = Engine(changed.model(), flags_of(changed), Mesh.create(ONE))
        before = {name: p.clone() for name, p in other.named_parameters()}
        with pytest.raises(ConfigurationError, match=message):
            checkpoint.load(other, path)
        assert all(torch.equal(before[name], p) for name, p in other.named_parameters())
    (path / checkpoint.META).write_text("{")
    with pytest.raises(ConfigurationError, match="no complete checkpoint"):
        checkpoint.load(engine, path)
