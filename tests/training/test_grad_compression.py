"""Training with compressed gradients: close to fp32, equal on all copies, once a step, clipped as decoded, never NaN.

Each test runs a tiny model on gloo ranks, several codecs in one call. What codecs do to single buckets is tested in
`tests/parallel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from model.microbatch import MicroBatch
from parallel.compression.options import CompressionOptions
from parallel.gradients import GradientReducer
from parallel.mesh import Layout, Mesh
from parallel.sharding import Sharding
from tests.layouts import Curve, Job, flags_of, microbatches_of_step, relative_errors, train, whole
from training.compression import record_of, what_is_compressed
from training.engine import Engine

SMALL = dict(vocab_size=203, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2)
CODECS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {},
    "int8": {},
    "int4": {"block_size": 64},
    "1bit": {"block_size": 256},
    "topk": {"density": 0.1},
    "powersgd": {"rank": 4},
}
ONE = Layout()  # all ranks are replicas
# The largest error of a parameter's gradient, ‖Δ‖/‖fp32‖, and of two losses: twice what was seen.
BOUNDS = {"bf16": (5e-3, 1e-3), "fp8": (0.08, 2e-3), "int8": (0.05, 1e-3), "int4": (0.5, 0.01)}
COARSE = (1.0, 0.1)
"""What a code of few values may miss of one step: nothing that isn't there may be added."""


def job(codec: str, layout: Layout = ONE, flags: dict[str, Any] | None = None, **changes: Any) -> Job:
    named = {f"grad_compression_{name}": value for name, value in CODECS.get(codec, {}).items()}
    all_flags = {"grad_compression": codec, **named, **(flags or {})}
    return Job(**{"layout": layout, "overrides": SMALL, "flags": all_flags, "length": 16, "steps": 2, **changes})


def engine_of(asked: Job) -> Engine:
    return Engine(asked.model(), flags_of(asked), Mesh.create(asked.layout))


def batches_of(asked: Job, engine: Engine, step: int) -> list[Any]:
    return microbatches_of_step(asked, step, asked.model().vocab_size, engine.mesh.dp.rank, engine.mesh.dp.size)


def state_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Copies of all that a step changes: masters, moments, router biases, residuals."""
    optimizer = engine.optimizer
    kinds = (None, *optimizer.moments)
    state = {f"{kind} {name}": optimizer.read(name, kind) for name in optimizer.parameters for kind in kinds}
    state |= {f"buffer {name}": buffer for name, buffer in engine.named_buffers()}
    state |= {f"residual {name}": part for name, part in engine.reducer.residuals().items()}
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names whose bits differ, or that only one has."""
    names = one.keys() | other.keys()
    return sorted(name for name in names if name not in one or name not in other or not one[name].equal(other[name]))


def train_all(jobs: list[Job]) -> list[Curve]:
    return [train(each) for each in jobs]


@pytest.mark.parametrize(
    "codecs",
    [("int8", "1bit", "powersgd"), pytest.param(("bf16", "fp8", "int4", "topk"), marks=pytest.mark.full)],
    ids=" ".join,
)
def test_gradients_are_those_of_fp32_but_for_the_code_and_all_copies_have_the_same_bits(
    run_ranks: Callable[..., Any], codecs: tuple[str, ...]
) -> None:
    """Shards and copies over tp, each expert on two of the four ranks, replicas over dp."""
    layout = Layout(tp=2, ep=2)
    ranks = run_ranks(4, train_all, [job(codec, layout) for codec in ("none", *codecs)])
    plain, *compressed = ([curves[i] for curves in ranks] for i in range(len(codecs) + 1))
    reference = whole(plain, "first_gradients")
    experts = [name for name in reference if ".experts." in name]
    exact = [
        name
        for name, x in reference.items()
        if x.ndim == 1 or name == "embed_tokens.weight" or name.endswith("mlp.gate.weight")
    ]
    assert len(experts) == 4 and len(exact) > 10 and "lm_head.weight" not in exact
    for codec, curves in zip(codecs, compressed, strict=True):
        errors = relative_errors(whole(curves, "first_gradients"), reference)
        largest, of_loss = BOUNDS.get(codec, COARSE)
        print(codec, max(errors.values()), curves[0].losses[-1], curves[0].norms)
        assert all(errors[name] < 1e-6 for name in exact)
        assert all(errors[name] <= largest * 1.0001 for name in errors)
        assert all(errors[name] > 1e-4 for name in experts), "these were not compressed"
        assert abs(curves[0].losses[-1]["lm"] - plain[0].losses[-1]["lm"]) < of_loss
        whole(curves, "final")  # raises where a copy differs from another rank's
        assert all(curve.norms == curves[0].norms for curve in curves)


@pytest.mark.full
def test_two_hops_and_a_head_in_fp32(run_ranks: Callable[..., Any]) -> None:
    exclude = {"grad_compression_exclude": ("vector", "router", "embedding", "head")}
    flags = exclude | {"grad_compression_inner_size": 2}
    ranks = run_ranks(4, train_all, [job("none"), job("int8", flags=exclude), job("int8", flags=flags)])
    plain, one, two = ([curves[i] for curves in ranks] for i in range(3))
    reference = whole(plain, "first_gradients")
    errors = [relative_errors(whole(curves, "first_gradients"), reference) for curves in (one, two)]
    for found in errors:
        assert found["lm_head.weight"] < 1e-6 and found["embed_tokens.weight"] < 1e-6
        assert max(found.values()) < BOUNDS["int8"][0]
    assert errors[0] != errors[1], "the second hop rounds once more"
    for curves in (one, two):
        whole(curves, "final")
        assert abs(curves[0].losses[-1]["lm"] - plain[0].losses[-1]["lm"]) < BOUNDS["int8"][1]


def test_a_pipeline_and_overlap_change_nothing(run_ranks: Callable[..., Any]) -> None:
    cases = [("1f1b", True), ("1f1b", False), ("zb-h1", True)]
    jobs = [
        job("int8", Layout(pp=2), {"pipeline_schedule": schedule, "overlap_grad_reduce": overlap, "bucket_cap_mb": 0.1})
        for schedule, overlap in cases
    ]
    ranks = run_ranks(4, train_all, [*jobs, job("none", Layout(pp=2))])
    overlapped, plain, zero_bubble, fp32 = ([curves[i] for curves in ranks] for i in range(4))
    assert overlapped[0].losses == plain[0].losses
    final = [whole(curves, "final") for curves in (overlapped, plain, zero_bubble)]
    assert not [name for name, x in final[0].items() if not np.array_equal(x, final[1][name])]
    # Deferred weight gradients are added in another order, which may take a value over the edge between two codes.
    assert max(relative_errors(final[2], final[0]).values()) < 1e-3
    assert abs(overlapped[0].losses[1]["lm"] - fp32[0].losses[1]["lm"]) < BOUNDS["int8"][1]


def sent_in_a_step(
    asked: Job, pieces: int
) -> tuple[dict[str, tuple[int, int]], dict[str, Any], dict[str, torch.Tensor]]:
    """Calls and bytes by axis of the exchanges that only codes use; sizes of buckets; the summed gradients.

    pieces: into how many micro-batches this rank's sequences are cut.
    """
    engine = engine_of(asked)
    engine.mesh.ledger.reset()
    (batch,) = batches_of(asked, engine, 0)
    tensors = (batch.tokens, batch.labels, batch.loss_mask, batch.positions)
    parts = zip(*(x.chunk(pieces) for x in tensors), strict=True)
    engine.forward_backward([MicroBatch(*part) for part in parts])
    sent: dict[str, tuple[int, int]] = {}
    for (axis, operation), entry in engine.mesh.ledger.entries.items():
        if axis in ("dp_cp", "stage", "edp") and operation in ("all_to_all", "all_gather") and entry.calls:
            calls, count = sent.get(axis, (0, 0))
            sent[axis] = calls + entry.calls, count + entry.bytes
    buckets = [
        (bucket.axis.name, bucket.axis.size, [p.numel() for p in bucket.parameters])
        for bucket in engine.reducer.buckets
        if bucket.reduction is not None
    ]
    told = {"buckets": buckets, "record": record_of(engine.reducer)}
    return sent, told, {name: p.main_grad.clone() for name, p in engine.named_parameters()}


def accumulated(asked: Job) -> list[Any]:
    return [sent_in_a_step(asked, pieces) for pieces in (1, 2)]


def padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def test_codes_are_sent_once_a_step_and_their_bytes_are_those_of_the_formula(run_ranks: Callable[..., Any]) -> None:
    layout, block = Layout(ep=2), 256  # experts are summed over two of the four ranks
    asked = job("int8", layout, {"bucket_cap_mb": 0.1}, global_batch=8, micro_batch=2)
    for (sent, told, gradients), (sent_often, _, of_many) in run_ranks(4, accumulated, asked):
        assert sent == sent_often, "accumulated micro-batches are compressed once"
        assert set(sent) == {"dp_cp", "edp"}
        expected: dict[str, tuple[int, int]] = {}
        for axis, ranks, sizes in told["buckets"]:
            values = 0
            for size in sizes:  # each begins with a block of its own
                values = padded(values, block) + size
            row = padded(values, block * ranks) // ranks
            wire = row + padded(4 * row // block, 16)  # codes, and a scale for each block
            calls, count = expected.get(axis, (0, 0))
            expected[axis] = calls + 2, count + 2 * (ranks - 1) * wire
        assert sent == expected and len(told["buckets"]) > 5
        assert told["record"]["grad_sent_bytes"] > sum(count for _, count in sent.values())
        assert 3 < told["record"]["grad_compression_ratio"] < 3.95
        assert 0 < told["record"]["grad_compression_error"] < 0.05
        for name, gradient in gradients.items():
            difference = (gradient - of_many[name]).norm() / gradient.norm().clamp(min=1e-30)
            assert difference < 5e-3, f"{name}: a code of each micro-batch would be off by 1 % and more"


def told_of_factors() -> str | None:
    mesh = Mesh.create(Layout())
    shapes = {"large": (40, 64), "small": (8, 64), "vector": (64,)}
    named = [(name, torch.nn.Parameter(torch.ones(shape))) for name, shape in shapes.items()]
    for _, parameter in named:
        parameter.sharding = Sharding()  # type: ignore[attr-defined]
    return what_is_compressed(GradientReducer(named, mesh, compression=CompressionOptions("powersgd", rank=4)))


def test_matrices_that_two_factors_would_not_shrink_are_told_of_as_exact(run_ranks: Callable[..., Any]) -> None:
    for told in run_ranks(2, told_of_factors):
        assert told.startswith(
            "gradients of 1 parameters, 0.00977 MiB in fp32 on this rank, travel as powersgd, rank 4"
        )
        assert "1 of a shape too small for rank 4" in told and "1 of vector" in told


def clipped(codec: str) -> dict[str, Any]:
    loose, tight = (job(codec, flags={"clip_grad": clip}) for clip in (0.0, 1e-3))
    engines = [engine_of(asked) for asked in (loose, tight)]
    results = [engine.train_step(batches_of(loose, engine, 0), 1e-3) for engine in engines]
    gradients = [{name: p.main_grad.clone() for name, p in engine.named_parameters()} for engine in engines]
    of_decoded = math.sqrt(sum(float(x.double().square().sum()) for x in gradients[0].values()))
    after = math.sqrt(sum(float(x.double().square().sum()) for x in gradients[1].values()))
    residuals = [engine.reducer.residuals() for engine in engines]
    return {
        "norms": [result.grad_norm for result in results],
        "of decoded": of_decoded,
        "after": after,
        "residuals differ": differing(*residuals),
        "residual": max(float(x.float().abs().max()) for x in residuals[0].values()),
    }


def test_clipping_is_by_the_decoded_norm_and_spares_the_residual(run_ranks: Callable[..., Any]) -> None:
    for found in run_ranks(2, clipped, "int4"):
        assert found["norms"] == [pytest.approx(found["of decoded"], rel=1e-6)] * 2
        assert found["after"] == pytest.approx(1e-3, rel=1e-4)
        assert found["residuals differ"] == [] and found["residual"] > 1e-3  # larger than all that is left of a step


def poisoned(engine: Engine, value: float) -> Callable[[], None]:
    """From now on one value of the gradient that enters the last norm is `value`; call the result to end it."""

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[7] = value
        return gradient

    def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        inputs[0].register_hook(poison)

    (stage,) = engine.stages.values()
    return dict(stage.named_modules())["norm"].register_forward_pre_hook(hook).remove


def steps_with_one_that_is_poisoned(codecs: list[str], value: float) -> list[dict[str, Any]]:
    """Beside a twin that never sees that step. The last rank alone has what isn't finite."""
    found = []
    for codec in codecs:
        asked = job(codec)
        engine, twin = engine_of(asked), engine_of(asked)
        for each in (engine, twin):
            each.train_step(batches_of(asked, each, 0), 1e-3)
        before = state_of(engine)
        heal = poisoned(engine, value) if engine.mesh.world.is_last else lambda: None
        bad = engine.train_step(batches_of(asked, engine, 1), 1e-3)
        heal()
        changed = differing(before, state_of(engine))
        good = [each.train_step(batches_of(asked, each, 2), 1e-3) for each in (engine, twin)]
        found.append(
            {
                "taken": (bad.taken, *(result.taken for result in good)),
                "norm": bad.grad_norm,
                "changed": changed,
                "apart": differing(state_of(engine), state_of(twin)),
                "losses": [result.losses for result in good],
                "kept": sum(name.startswith("residual") and bool(x.any()) for name, x in before.items()),
            }
        )
    return found


@pytest.mark.parametrize(
    ("codecs", "value"),
    [
        (["none", "int8", "1bit", "topk", "powersgd"], math.nan),
        pytest.param(["none", *CODECS], math.inf, marks=pytest.mark.full),
    ],
)
def test_what_is_not_finite_on_the_last_rank_skips_the_step_everywhere_and_leaves_no_trace(
    run_ranks: Callable[..., Any], codecs: list[str], value: float
) -> None:
    for rank in run_ranks(2, steps_with_one_that_is_poisoned, codecs, value):
        for codec, found in zip(codecs, rank, strict=True):
            assert found["taken"] == (False, True, True), codec
            assert not math.isfinite(found["norm"])
            assert found["changed"] == [] == found["apart"], codec
            assert found["losses"][0] == found["losses"][1]
            assert (found["kept"] > 0) == (codec not in ("none", "bf16")), codec


def warmed_up(jobs: list[Job]) -> list[Any]:
    told = []
    for asked in jobs:
        engine = engine_of(asked)
        losses, ratios = [], []
        for step in range(asked.steps):
            losses.append(engine.train_step(batches_of(asked, engine, step), 1e-2).losses)
            ratios.append(record_of(engine.reducer).get("grad_compression_ratio"))
        told.append((losses, ratios, {name: p.detach().clone() for name, p in engine.named_parameters()}))
    return told


def test_steps_of_the_warm_up_are_those_of_fp32(run_ranks: Callable[..., Any]) -> None:
    """Bit for bit on two ranks, whose sum has one order."""
    flags = {"clip_grad": 0.0}
    plain = job("none", flags=flags, steps=4)
    warm = job("int8", flags=flags | {"grad_compression_warmup_steps": 2}, steps=4)
    for (losses, nothing, _), (warm_losses, ratios, _) in run_ranks(2, warmed_up, [plain, warm]):
        assert warm_losses[:3] == losses[:3] and warm_losses[3] != losses[3]
        assert nothing == [None] * 4
        assert ratios[:2] == [1.0, 1.0] and min(ratios[2:]) > 3
