"""fp32, bf16 and fp16: the table of what runs in which is what tensors say, losses agree, and devices are asked first.

The loss scale has a file of its own, `test_loss_scale.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import model.deepseek
import parallel.buckets
import training.precision
from parallel.mesh import Layout
from parallel.weight_gradient import adds_its_gradient
from tests.layouts import Job, microbatches_of_step, train
from tests.training.test_grad_compression import batches_of, engine_of, job
from training.failures import ConfigurationError
from training.precision import DTYPES, TABLE, check_device, table_lines

ROOT = Path(__file__).parents[2]
NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.complex64: "fp32", torch.float64: "fp64"}
INSIDE_KERNELS = {"matrix products", "attention's softmax", "norms"}
"""Rows that no tensor shows; `tests/kernels` compares these with fp64."""


def recording(seen: set[torch.dtype], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose first argument's and result's dtypes are recorded."""

    def recorded(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        seen.update(x.dtype for x in (args[:1] if result is None else (result,)))
        return result

    return recorded


@pytest.mark.parametrize("precision", DTYPES)
def test_the_table_says_what_tensors_say(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = job("none", flags={"precision": precision})
    seen: dict[str, set[torch.dtype]] = defaultdict(set)
    engine = engine_of(asked)
    (stage,) = engine.stages.values()

    def of_gradient(x: torch.Tensor) -> None:
        x.register_hook(lambda grad: seen["activations"].add(grad.dtype))

    for block in stage.layers.values():
        block.register_forward_hook(lambda module, args, out: (seen["activations"].add(out.dtype), of_gradient(out))[0])
        block.register_forward_pre_hook(lambda module, args: seen["rotary angles"].add(args[1].k_rotation.dtype))
    stage.lm_head.register_forward_hook(lambda module, args, out: seen["logits"].add(out.dtype))
    stage.register_forward_hook(lambda module, args, out: seen["loss"].add(out.dtype))
    for router in engine.routers:
        seen["router bias"].add(router.e_score_correction_bias.dtype)
        router._weights = recording(seen["router scores"], router._weights)  # type: ignore[method-assign]
    entropy = recording(seen["cross entropy"], model.deepseek.vocabulary_parallel_cross_entropy)
    monkeypatch.setattr(model.deepseek, "vocabulary_parallel_cross_entropy", entropy)
    reduce = recording(seen["gradient reduction"], parallel.buckets.all_reduce_)
    monkeypatch.setattr(parallel.buckets, "all_reduce_", reduce)
    for name, parameter in engine.named_parameters():
        seen["weights"].add(parameter.dtype)
        if not adds_its_gradient(parameter):  # autograd makes no tensor for the others
            parameter.register_hook(lambda grad: seen["weight gradients"].add(grad.dtype))
        seen["gradient accumulation"].add(parameter.main_grad.dtype)
        seen["master weights"].add(engine.optimizer.read(name).dtype)
        seen["first moment"].add(engine.optimizer.read(name, "exp_avg").dtype)
        seen["second moment"].add(engine.optimizer.read(name, "exp_avg_sq").dtype)

    assert engine.train_step(batches_of(asked, engine, 0), 1e-3).taken
    seen["gradient norm"].add(engine.reducer.norm().dtype)
    assert engine.runtime.like.dtype == DTYPES[precision], "messages of the pipeline"
    rows = {row.what: row.of(precision) for row in TABLE}
    assert rows.keys() == seen.keys() | INSIDE_KERNELS and not seen.keys() & INSIDE_KERNELS
    for what, dtypes in seen.items():
        assert {NAMES[dtype] for dtype in dtypes} == {rows[what]}, what


def test_the_document_shows_the_table() -> None:
    assert "\n".join(table_lines()) in (ROOT / "docs/precision.md").read_text(encoding="utf-8")


def curves(asked: Job, precisions: list[str]) -> list[list[dict[str, float]]]:
    """The losses of every step in each precision, on a rank."""
    found = []
    for precision in precisions:
        engine = engine_of(Job(**{**vars(asked), "flags": {**asked.flags, "precision": precision}}))
        losses = []
        for step in range(20):
            while True:  # fp16 may overflow at its first scale
                batches = microbatches_of_step(asked, step, 1024, engine.mesh.dp.rank, engine.mesh.dp.size)
                result = engine.train_step(batches, 3e-4)
                if not result.retry:
                    break
            assert result.taken
            losses.append({name: x for name, x in result.losses.items() if name != "aux"})  # 1e-4 of the loss
        found.append(losses)
    return found


WHOLE = {"pipeline_schedule": "zb-h1", "recompute_granularity": "selective", "recompute_modules": ("deepseek",)}


@pytest.mark.parametrize(
    ("world", "asked"),
    [
        pytest.param(2, Job(length=32), id="dp2"),
        pytest.param(
            8, Job(Layout(tp=2, pp=2, ep=2), steps=20, flags=WHOLE), id="tp2 pp2 dp2 ep2", marks=pytest.mark.full
        ),
        pytest.param(4, Job(Layout(tp=2, cp=2), config="tiny_v2", steps=20), id="v2 tp2 cp2", marks=pytest.mark.full),
    ],
)
def test_every_step_is_within_a_percent_of_fp32(run_ranks: Callable[..., Any], world: int, asked: Job) -> None:
    plain, *others = run_ranks(world, curves, asked, list(DTYPES), timeout=500.0)[0]
    assert plain[-1]["lm"] < 0.7 * plain[0]["lm"]
    for losses in others:
        assert losses != plain
        for step, (found, expected) in enumerate(zip(losses, plain, strict=True)):
            print({name: f"{found[name] / expected[name] - 1:.4%}" for name in expected})
            assert found == pytest.approx(expected, rel=0.01), f"step {step + 1}"


@pytest.mark.full
def test_sixty_steps_with_bf16_moments_are_within_a_percent(run_ranks: Callable[..., Any]) -> None:
    bf16 = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    (expected, found) = (run_ranks(2, losses_of, flags, 60, timeout=500.0)[0] for flags in ({}, bf16))
    assert found != expected and expected[-1] < 0.7 * expected[0]
    assert found == pytest.approx(expected, rel=0.01)


def losses_of(flags: dict[str, Any], steps: int) -> list[float]:
    return [losses["lm"] for losses in train(Job(steps=steps, length=32, lr=3e-4, flags=flags)).losses]


def capable(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    monkeypatch.setattr(training.precision, "compute_capability", lambda device: capability)


CPU = torch.device("cpu")


def test_a_device_that_cant_is_refused_and_one_that_is_slow_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for precision in DTYPES:  # with the instructions of this very CPU
        told = check_device(precision, CPU)
        assert told is None or "on a CPU that has no instructions for it: matrix products are computed in fp32" in told
    monkeypatch.setattr(training.precision, "product_dtype", lambda x: x.dtype)
    capable(monkeypatch, (7, 5))
    told = check_device("bf16", CPU)
    assert told is not None and "compute capability 7.5" in told and "--precision fp16 is fast there" in told
    assert check_device("fp16", CPU) is check_device("fp32", CPU) is None
    capable(monkeypatch, (8, 0))
    assert check_device("bf16", CPU) is None
    capable(monkeypatch, (5, 2))
    with pytest.raises(ConfigurationError, match=r"fp16 needs a GPU of compute capability 5\.3 and this one has 5\.2"):
        check_device("fp16", CPU)


def test_an_operation_that_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*args: Any) -> Any:
        raise RuntimeError("\"silu_cpu\" not implemented for 'Half'\nmore")

    monkeypatch.setattr(training.precision, "swiglu", lacking)
    with pytest.raises(ConfigurationError, match="silu_cpu.* not implemented for .*: use --precision fp32") as told:
        check_device("fp16", CPU)
    assert "fp16 doesn't work on this cpu" in str(told.value)
