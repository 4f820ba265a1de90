"""One rank of the convergence benchmark: trains the same model under each kind of gradient compression in turn.

Lives here: what `benchmarks/compression_convergence.py` starts, with its options as JSON. May import every room. Rank 0
writes one file a run as soon as it is done, so that a broken benchmark goes on where it was.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

from data.batches import Batches, MicroBatchTensors, ValidationSteps
from data.files import atomic_file
from model.microbatch import MicroBatch
from parallel.comm import all_reduce_
from parallel.gradients import GradientReducer
from parallel.launch import destroy, init_distributed
from parallel.mesh import Layout, Mesh
from training.arguments import Arguments
from training.datasets import open_data
from training.engine import Engine
from training.schedule import LearningRateSchedule, lr_at
from training.validate import read_model_config, validate


class AccumulatedError:
    """‖Σ of decoded gradients − Σ of true ones‖ / ‖Σ of true ones‖ over the compressed steps of a reducer.

    The true sum is an fp32 all-reduce of the same gradients. Error feedback keeps the difference as small as one step's
    residual, however many steps there are; without it errors add up. The reducer must not overlap.
    """

    def __init__(self, reducer: GradientReducer, mesh: Mesh):
        self.reducer, self.mesh, self._finish = reducer, mesh, reducer.finish
        self.buckets = [bucket for bucket in reducer.buckets if bucket.reduction is not None]
        self.true = [torch.zeros_like(bucket.buffer) for bucket in self.buckets]
        self.off = [torch.zeros_like(bucket.buffer) for bucket in self.buckets]
        reducer.finish = self.finish  # type: ignore[method-assign]

    def finish(self) -> None:
        """The reducer's, and the sum that it should be."""
        exact = [bucket.buffer.clone() for bucket in self.buckets] if self.reducer.compressing else []
        self._finish()
        for bucket, exact_n, true_n, off_n in zip(self.buckets, exact, self.true, self.off, strict=False):
            all_reduce_(exact_n, bucket.axis)
            true_n += exact_n
            off_n += bucket.buffer
            off_n -= exact_n

    def value(self) -> float:
        """Over all ranks, on every rank; 0 where nothing is compressed."""
        squares = torch.zeros(2, dtype=torch.float64)
        for true_n, off_n in zip(self.true, self.off, strict=True):
            squares += torch.stack([off_n.double().square().sum(), true_n.double().square().sum()])
        all_reduce_(squares, self.mesh.world)
        off, true = squares.tolist()
        return math.sqrt(off / true) if true else 0.0


def train(flags: dict[str, Any], points: int, mesh: Mesh) -> dict[str, Any]:
    """One run: its curve, validation losses over an eighth of the --eval-iters batches at about `points` steps; the
    final loss over all of them; `AccumulatedError`; how many times fewer bytes travelled than in fp32; seconds.
    """
    arguments = Arguments().replace(**flags)
    config = read_model_config(arguments)
    validate(arguments, config, mesh.world_size, 0)
    data = open_data(arguments, config)
    assert data.valid is not None
    engine = Engine(config, arguments, mesh)
    accumulated = AccumulatedError(engine.reducer, mesh)
    training, schedule = arguments.training, LearningRateSchedule.from_arguments(arguments)
    common: dict[str, Any] = {
        "seq_length": training.seq_length,
        "micro_batch_size": training.micro_batch_size,
        "global_batch_size": training.global_batch_size,
        "dp_rank": mesh.dp.rank,
        "dp_size": mesh.dp.size,
    }
    last, every = training.train_iters, max(1, training.train_iters // points)
    every_batch = ValidationSteps(data.valid, training.eval_iters, **common)
    few_batches = ValidationSteps(data.valid, max(1, training.eval_iters // 8), **common)
    curve: list[tuple[int, float]] = [(0, _validation_loss(engine, few_batches))]
    started = time.perf_counter()
    with Batches(data.train, **common) as batches:
        for step in range(1, last + 1):
            lr = lr_at(batches.consumed_samples, schedule)
            engine.train_step(_micro_batches(batches.next_step()), lr)
            if step % every == 0 or step == last:
                curve.append((step, _validation_loss(engine, few_batches)))
    statistics = engine.reducer.compression_statistics()
    return {
        "curve": curve,
        "loss": _validation_loss(engine, every_batch),
        "seconds": time.perf_counter() - started,
        "accumulated_error": accumulated.value(),
        "ratio": 1.0 if statistics is None else statistics.ratio,
    }


def _micro_batches(step: list[MicroBatchTensors]) -> list[MicroBatch]:
    return [MicroBatch(**tensors) for tensors in step]


def _validation_loss(engine: Engine, steps: ValidationSteps) -> float:
    loss = tokens = 0.0
    for step in steps:
        losses, counted = engine.evaluate(_micro_batches(step))
        loss, tokens = loss + losses["lm"] * counted, tokens + counted
    return loss / tokens


def main() -> None:
    options = json.loads(sys.argv[1])
    init_distributed("gloo")
    meshes: dict[tuple[int, int, int], Mesh] = {}
    for path, flags in options["runs"]:
        sizes = tuple(flags[f"{kind}_parallel_size"] for kind in ("tensor_model", "pipeline_model", "expert_model"))
        if sizes not in meshes:
            tp, pp, ep = sizes
            meshes[sizes] = Mesh.create(Layout(tp=tp, pp=pp, ep=ep))
        found = train(flags, options["points"], meshes[sizes])
        if meshes[sizes].rank == 0:
            with atomic_file(path, "w") as file:
                json.dump(found, file)
            print(f"{Path(path).stem}: {found['loss']:.4f}, {found['seconds']:.0f} s", file=sys.stderr, flush=True)
    destroy()


if __name__ == "__main__":
    main()
