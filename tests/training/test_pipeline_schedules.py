"""Every schedule computes one rank's loss and gradients: tiny V3 with MTP and auxiliary loss on four pipeline ranks.

Per tensor ‖Δ‖ ≤ 1e-5·‖reference‖: with and without recomputation, with accumulation, data-parallel, and uneven.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parallel.mesh import Layout, Mesh
from parallel.pipeline.catalogue import SCHEDULES
from tests.layouts import Curve, Job, microbatches_of_step, train, whole
from tests.layouts import flags_of as arguments_of
from training.arguments import RECOMPUTE_MODULES
from training.engine import Engine

RunRanks = Callable[..., list[Any]]
RANKS, LAYERS, BOUND = 4, 9, 1e-5
MODEL = {"num_hidden_layers": LAYERS, "aux_loss_alpha": 0.01, "hidden_size": 64, "vocab_size": 256}
UNEVEN = {
    1: (1, 3, 3, 2),
    2: (0, 2, 1, 1, 1, 1, 3, 0),  # the ends go without: embedding and head are enough
}


def job(microbatches: int, dp: int = 1, **flags: Any) -> Job:
    """One step of so many micro-batches on each of `dp` replicas; the fewest tokens that make it a real one."""
    batch = {"steps": 1, "length": 24, "global_batch": microbatches * dp}
    return Job(overrides=MODEL, flags={"optimizer": "sgd", **flags}, **batch)


@functools.lru_cache
def one_rank(run_ranks: RunRanks, sequences: int) -> Curve:
    return run_ranks(1, train, job(sequences))[0]


def several(jobs: list[Job]) -> list[Curve]:
    return [train(one) for one in jobs]


def assert_equal(found: list[Curve], reference: Curve, what: str) -> None:
    assert reference.losses[0]["aux"] > 0 and reference.losses[0]["mtp_1"] > 0
    for curve in found:
        assert curve.losses[0] == pytest.approx(reference.losses[0], rel=BOUND), what
        assert curve.norms[0] == pytest.approx(reference.norms[0], rel=BOUND), what
    gradients, expected = whole(found, "first_gradients"), whole([reference], "first_gradients")
    assert gradients.keys() == expected.keys()
    for name, wanted in expected.items():
        error = np.linalg.norm((gradients[name] - wanted).astype(np.float64).ravel())
        assert error <= BOUND * np.linalg.norm(wanted.ravel()), f"{what}: gradient of {name}"
    whole(found, "final")  # copies are still bit-identical


def flags_of(schedule: str) -> dict[str, Any]:
    return {"pipeline_schedule": schedule}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_has_one_ranks_loss_and_gradients(run_ranks: RunRanks, schedule: str) -> None:
    stages = SCHEDULES[schedule].chunks or 2
    uneven = {"pipeline_layers": UNEVEN[stages]}
    jobs = {"uneven layers, full recomputation": job(8, recompute_granularity="full", **uneven, **flags_of(schedule))}
    if schedule in ("1f1b", "zb-v", "interleaved"):
        jobs["even layers"] = job(8, **flags_of(schedule))
    if schedule in ("zb-v", "interleaved"):
        selective = {"recompute_granularity": "selective", "recompute_modules": RECOMPUTE_MODULES}
        jobs["selective recomputation"] = job(8, **selective, **flags_of(schedule))
    layout = Layout(pp=RANKS)
    by_rank = run_ranks(RANKS, several, [dataclasses.replace(one, layout=layout) for one in jobs.values()])
    for number, what in enumerate(jobs):
        assert_equal([curves[number] for curves in by_rank], one_rank(run_ranks, 8), f"{schedule}, {what}")


def test_a_table_that_was_searched_for_is_run(run_ranks: RunRanks) -> None:
    """auto, for costs far from even and little memory, and the same table on every rank."""
    flags = {"pipeline_schedule": "auto", "pipeline_costs": (1.0, 1.9, 0.4, 0.2), "pipeline_memory_limit": 3.0}
    searched = dataclasses.replace(job(8, **flags), layout=Layout(pp=RANKS))
    assert_equal(run_ranks(RANKS, train, searched), one_rank(run_ranks, 8), "auto")


DATA_PARALLEL = ("zb-v", "zb-h2")


@pytest.mark.parametrize(
    "schedule",
    [name if name in DATA_PARALLEL else pytest.param(name, marks=pytest.mark.full) for name in SCHEDULES],
)
def test_every_schedule_reduces_over_replicas(run_ranks: RunRanks, schedule: str) -> None:
    """Also with small buckets, several for each stage, which start at the last weight gradient of their parameters."""
    replicas = dataclasses.replace(job(4, dp=2, bucket_cap_mb=0.05, **flags_of(schedule)), layout=Layout(pp=RANKS))
    assert_equal(run_ranks(2 * RANKS, train, replicas), one_rank(run_ranks, 8), f"{schedule}, dp 2")


def forwards_of_layers(schedule: str, microbatches: int) -> dict[str, int]:
    """How often each layer's forward runs in one step with full recomputation."""
    settings = job(microbatches, recompute_granularity="full", **flags_of(schedule))
    settings = dataclasses.replace(settings, layout=Layout(pp=RANKS))
    mesh = Mesh.create(settings.layout)
    config = settings.model()
    engine = Engine(config, arguments_of(settings), mesh)
    counts: dict[str, int] = {}
    for stage in engine.stages.values():
        for name, layer in stage.layers.items():

            def counted(module: Any, inputs: Any, name: str = name) -> None:
                counts[name] = counts.get(name, 0) + 1

            layer.register_forward_pre_hook(counted)
    batches = microbatches_of_step(settings, 0, config.vocab_size, 0, 1)
    engine.forward_backward(batches)
    left = [batch for batch in batches if batch.routing or batch.k_rotation is not None]
    assert not left, "what layers leave in a micro-batch is freed after its last action"
    return counts


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v"])
def test_full_recomputation_runs_each_layer_twice_a_micro_batch(run_ranks: RunRanks, schedule: str) -> None:
    """Once forward, once again before the input gradient; the deferred weight gradient uses what that made."""
    found = run_ranks(RANKS, forwards_of_layers, schedule, 4)
    counts = {name: count for counts in found for name, count in counts.items()}
    assert counts == {str(layer): 2 * 4 for layer in range(LAYERS + 1)}  # MTP's layer comes after the others
