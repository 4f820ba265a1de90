"""fp16's loss scale: DeepSpeed's history, and overflows that change nothing, lose no data and are told once.

An overflow is injected on one rank, as an Inf in one gradient: every rank must skip the step, halve the scale and,
trying the same batch again, go on as if nothing had been.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.gradients import GradientReducer
from parallel.mesh import Layout
from tests.layouts import Job
from tests.test_pretrain import Ranks, lines_of, ranks, workplace  # noqa: F401 (fixtures)
from tests.training.test_grad_compression import batches_of, differing, engine_of, job
from training.engine import Engine, StepResult
from training.precision import LossScale


def histories(seed: int) -> tuple[list[float], list[float]]:
    """Scales after each update, of ours and of DeepSpeed's; where one gives up at the minimum the other must too."""
    from deepspeed.runtime.fp16 import loss_scaler

    draw = random.Random(seed)
    initial, minimum = 2.0 ** draw.randint(0, 20), 2.0 ** draw.randint(-3, 3)
    window, hysteresis, often = draw.randint(1, 6), draw.randint(1, 4), draw.choice([0.05, 0.3, 0.6])
    initial = max(initial, minimum)
    ours = LossScale(initial, minimum, window, hysteresis)
    theirs = loss_scaler.DynamicLossScaler(initial, window, minimum, hysteresis, consecutive_hysteresis=False)
    found: tuple[list[float], list[float]] = ([], [])
    for step in range(80):
        overflow = draw.random() < often
        worth = ours.update(overflow)
        try:
            theirs.update_scale(overflow)
        except Exception as error:  # it raises no narrower class
            assert "already at minimum" in str(error) and overflow and not worth
            break
        assert worth == overflow
        if step % 20 == 10:  # as if it had been saved and loaded
            state, ours = ours.state(), LossScale(initial, minimum, window, hysteresis)
            ours.load(state)
        found[0].append(ours.value)
        found[1].append(theirs.loss_scale)
    return found


def test_the_history_is_that_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.fp16 import loss_scaler

    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)  # it logs on rank 0, and no group is there
    first = random.randrange(10**6)
    print(f"seeds from {first}")
    ends = []
    for seed in range(first, first + 200):
        ours, theirs = histories(seed)
        assert ours == theirs, f"seed {seed}"
        ends.append(len(ours))
    assert min(ends) < 80 == max(ends), "some sequences reach the minimum, others don't"


def test_a_constant_scale_stays_and_gives_no_second_attempt() -> None:
    scale = LossScale(64.0, constant=True)
    assert [scale.update(overflow) for overflow in (False, True, False)] == [False] * 3 and scale.value == 64.0
    scale.load({"value": 8.0, "taken": 3, "left": 1})
    assert scale.value == 64.0 and "--loss-scale 64 is constant" in scale.limit()


class Inf:
    """Puts an Inf into one gradient of this rank for as long as it is on."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.on, self.put = False, 0
        parameter.register_hook(self)

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if not self.on:
            return None
        self.put += 1
        spoilt = gradient.clone()
        spoilt.flatten()[0] = torch.inf
        return spoilt


def state_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Copies of all that a step changes, whole blocks, whoever holds them. Collective where ZeRO shards them."""
    optimizer = engine.optimizer
    kinds = (None, *optimizer.moments)
    state = {f"{kind} {name}": optimizer.read(name, kind) for name in optimizer.parameters for kind in kinds}
    # Stage 3 fills and empties a parameter itself; what it keeps of it is its `ds_tensor`.
    state |= {f"parameter {name}": getattr(p, "ds_tensor", p) for name, p in engine.named_parameters()}
    state |= {f"buffer {name}": buffer for name, buffer in engine.named_buffers()}
    if isinstance(engine.reducer, GradientReducer):
        state |= {f"residual {name}": part for name, part in engine.reducer.residuals().items()}
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def run(asked: Job, halve_at: int | None = None) -> tuple[list[StepResult], dict[str, torch.Tensor]]:
    """Results and the last state of a run without overflow; halve_at: a step from which on its scale is half."""
    engine, results = engine_of(asked), []
    for step in range(asked.steps):
        if step == halve_at:
            assert engine.loss_scale is not None
            engine.loss_scale.update(overflow=True)
        results.append(engine.train_step(batches_of(asked, engine, step), 1e-3))
    return results, state_of(engine)


def disturbed_run(asked: Job, spoilt_rank: int, spoilt_step: int) -> tuple[list[StepResult], dict[str, torch.Tensor]]:
    """As `run`, of a run in which a rank has an Inf at a step; asserts, on this rank, what the attempt does."""
    engine, results = engine_of(asked), []
    inf = Inf(next(p for name, p in engine.named_parameters() if "norm" in name))  # its gradient is autograd's
    for step in range(asked.steps):
        if step == spoilt_step:
            before = state_of(engine)
            inf.on = engine.mesh.rank == spoilt_rank
            attempt = engine.train_step(batches_of(asked, engine, step), 1e-3)
            assert (inf.put > 0) == inf.on
            assert not attempt.taken and attempt.retry and not math.isfinite(attempt.grad_norm)
            assert differing(before, state_of(engine)) == [], "an overflow must leave no trace"
            inf.on = False
        results.append(engine.train_step(batches_of(asked, engine, step), 1e-3))
        assert results[-1].taken
    if attempt.losses != results[spoilt_step].losses:
        raise AssertionError("the second attempt saw other tokens or another model")
    assert engine.steps_done == asked.steps
    return results, state_of(engine)


SPOILT_STEP, STEPS = 1, 4


def three_runs(cases: list[dict[str, Any]]) -> list[dict[str, list[StepResult]]]:
    """Of each case: with an overflow, without one, and without one but with half the scale from that step on."""
    found = []
    for case in cases:
        flags = {"precision": "fp16", **case["flags"]}
        asked = job(case.get("codec", "none"), Layout(**case.get("layout", {})), flags, steps=STEPS)
        disturbed, state = disturbed_run(asked, case["rank"], SPOILT_STEP)
        halved, expected = run(asked, halve_at=SPOILT_STEP)
        assert differing(state, expected) == [], "nothing is lost"
        found.append({"disturbed": disturbed, "halved": halved, "undisturbed": run(asked)[0]})
    return found


CASES = [
    pytest.param(
        2, [{"rank": 1, "flags": {}}, {"rank": 0, "codec": "int8", "flags": {"clip_grad": 0.5}}], id="dp2 and int8"
    ),
    pytest.param(4, [{"rank": 3, "layout": {"tp": 2, "pp": 2}, "flags": {}}], id="tp2 pp2"),
    pytest.param(
        8,
        [{"rank": 6, "layout": {"tp": 2, "pp": 2, "ep": 2}, "flags": {"pipeline_schedule": "zb-h1"}}],
        id="tp2 pp2 dp2 ep2",
        marks=pytest.mark.full,
    ),
]


def losses_and_norms(results: list[StepResult]) -> list[Any]:
    return [(result.losses, result.grad_norm) for result in results]


@pytest.mark.parametrize(("world", "cases"), CASES)
def test_an_overflow_on_one_rank_skips_everywhere_and_the_same_batch_goes_on(
    run_ranks: Callable[..., Any],
    world: int,
    cases: list[dict[str, Any]],
) -> None:
    for of_ranks in zip(*run_ranks(world, three_runs, cases), strict=True):
        for found in of_ranks:
            assert losses_and_norms(found["disturbed"]) == losses_and_norms(of_ranks[0]["disturbed"])
            assert losses_and_norms(found["disturbed"]) == losses_and_norms(found["halved"])
            scales = [result.loss_scale for result in found["disturbed"]]
            assert scales == [2.0**16] * SPOILT_STEP + [2.0**15] * (STEPS - SPOILT_STEP)
            # What a halved scale changes: gradients below 6e-5 times the scale have fewer bits in fp16.
            for result, expected in zip(found["disturbed"], found["undisturbed"], strict=True):
                assert expected.loss_scale == 2.0**16 and result.losses == pytest.approx(expected.losses, rel=5e-5)


OFFLOADED = {"offload_optimizer": "cpu"}
DEEPSPEED = {
    "stage 1": {"zero_stage": 1},
    "stage 1 offloaded": {"zero_stage": 1, **OFFLOADED},
    "stage 2": {"zero_stage": 2},
    "stage 2 offloaded": {"zero_stage": 2, **OFFLOADED},
    "stage 3": {"zero_stage": 3},
    "stage 3 offloaded": {"zero_stage": 3, **OFFLOADED},
}


@pytest.mark.parametrize(
    "stage", ["stage 1", *(pytest.param(name, marks=pytest.mark.full) for name in DEEPSPEED if name != "stage 1")]
)
def test_through_deepspeed_the_scales_are_the_same(run_ranks: Callable[..., Any], stage: str) -> None:
    cases = [{"rank": 1, "flags": flags} for flags in ({}, DEEPSPEED[stage])]
    for native, found in run_ranks(2, three_runs, cases, timeout=500.0):
        for kind, expected in native.items():
            for result, one in zip(found[kind], expected, strict=True):
                assert result.loss_scale == one.loss_scale and result.taken
                print(kind, result.losses["lm"] / one.losses["lm"] - 1, result.grad_norm / one.grad_norm - 1)
                assert result.losses == pytest.approx(one.losses, rel=1e-4)
                assert result.grad_norm == pytest.approx(one.grad_norm, rel=1e-3)


def test_a_forward_pass_that_overflows_lowers_no_scale(run_ranks: Callable[..., Any]) -> None:
    run_ranks(1, overflowing_forward)


def overflowing_forward() -> None:
    asked = job("none", flags={"precision": "fp16"})
    engine = engine_of(asked)
    with torch.no_grad():
        dict(engine.named_parameters())["lm_head.weight"].fill_(6e4)  # logits beyond 65504
    result = engine.train_step(batches_of(asked, engine, 0), 1e-3)
    assert not result.taken and not result.retry and not math.isfinite(result.losses["lm"])
    assert engine.loss_scale is not None and engine.loss_scale.value == 2.0**16


def test_a_run_starts_at_a_high_scale_loses_no_sample_and_ends_at_the_minimum(
    ranks: Ranks,  # noqa: F811
    workplace: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    flags = ["--precision", "fp16", "--train-iters", "2", "--eval-iters", "0"]
    high, low = tmp_path / "high", tmp_path / "low"
    ranks.start(workplace, *flags, "--run-dir", str(high), "--initial-loss-scale", str(2.0**26))
    for code, _, err in ranks.finish():
        assert code == 0, err
    first, second = lines_of(high / "metrics.jsonl")
    overflows = first["overflows"] + second["overflows"]
    assert first["overflows"] > 2 and second["loss_scale"] == 2.0 ** (26 - overflows)
    assert [first["tokens"], second["tokens"]] == [4 * 16, 8 * 16], "every batch is trained on once"
    told = [
        [
            line["message"]
            for line in lines_of(high / "logs" / f"rank_0000{rank}.jsonl")
            if "fp16 overflow" in line["message"]
        ]
        for rank in range(2)
    ]
    assert len(told[0]) == overflows and told[1] == []
    assert told[0][0] == (
        "step 1: fp16 overflow at loss scale 67108864: nothing has changed, trying the same batch at 33554432"
    )
    scales = ["--initial-loss-scale", str(2.0**26), "--min-loss-scale", str(2.0**25)]
    ranks.start(workplace, *flags, "--run-dir", str(low), *scales)
    for code, _, err in ranks.finish():
        assert code == 1
        assert "at the loss scale 33554432, which can't be lowered (--min-loss-scale is 33554432)" in err
        assert "or --precision bf16" in err and not lines_of(low / "metrics.jsonl")
