"""fp16's loss scale: DeepSpeed's history, and overflows that change nothing, lose no data and are told once.

An overflow is injected on one rank, as an Inf in one gradient: every rank must skip the step, halve the scale and,
trying the same batch again, go on as if nothing had been.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallel.mesh import Layout
from tests.test_pretrain import Ranks, lines_of, ranks, workplace  # noqa: F401 (fixtures)
from tests.training.test_grad_compression import batches_of, differing, engine_of, job, state_of
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


def numbers(result: StepResult) -> tuple[Any, ...]:
    return result.losses, result.grad_norm, result.loss_scale


def disturbed(engine: Engine, asked: Any, spoilt_rank: int, spoilt_step: int) -> dict[str, Any]:
    """What a run with one overflow shows on this rank: results of taken steps, and of the attempt what has changed."""
    vectors = [p for _, p in engine.named_parameters() if p.ndim == 1]  # their gradient comes by autograd's hook
    inf, taken, attempt = Inf(vectors[0]), [], None
    changed: list[str] = []
    for step in range(asked.steps):
        while True:
            inf.on = attempt is None and step == spoilt_step and engine.mesh.rank == spoilt_rank
            before = state_of(engine) | {name: p.detach().clone() for name, p in engine.named_parameters()}
            result = engine.train_step(batches_of(asked, engine, step), 1e-3)
            if result.taken:
                break
            assert attempt is None, "one overflow was injected"
            attempt = result
            after = state_of(engine) | dict(engine.named_parameters())
            changed = differing(before, after)
        taken.append(numbers(result))
    assert attempt is not None
    return {
        "taken": taken,
        "changed": changed,
        "put": inf.put,
        "attempt": (attempt.losses, attempt.retry, attempt.loss_scale),
        "steps": engine.steps_done,
        "state": state_of(engine),
    }


def with_and_without_overflow(cases: list[dict[str, Any]], spoilt_step: int) -> list[tuple[list[Any], dict[str, Any]]]:
    found = []
    for case in cases:
        asked = job(
            case.get("codec", "none"),
            Layout(**case.get("layout", {})),
            {"precision": "fp16", "initial_loss_scale": 2.0**12} | case["flags"],
            steps=4,
        )
        plain = engine_of(asked)
        undisturbed = [numbers(plain.train_step(batches_of(asked, plain, step), 1e-3)) for step in range(asked.steps)]
        found.append((undisturbed, disturbed(engine_of(asked), asked, case["rank"], spoilt_step)))
    return found


CASES = [
    (2, [{"rank": 1, "flags": {}}, {"rank": 0, "codec": "int8", "flags": {"clip_grad": 0.5}}]),
    (4, [{"rank": 3, "layout": {"tp": 2, "pp": 2}, "flags": {}}]),
]


@pytest.mark.parametrize(("world", "cases"), CASES, ids=["dp2, plain and int8", "tp2 pp2"])
def test_an_overflow_on_one_rank_skips_everywhere_and_the_same_batch_goes_on(
    run_ranks: Callable[..., Any], world: int, cases: list[dict[str, Any]]
) -> None:
    spoilt_step = 2
    ranks = run_ranks(world, with_and_without_overflow, cases, spoilt_step)  # noqa: F811
    for number, case in enumerate(cases):
        each = [rank[number] for rank in ranks]
        for rank, (undisturbed, found) in enumerate(each):
            assert found["changed"] == [], "an overflow must leave no trace"
            assert (found["put"] > 0) == (rank == case["rank"])
            losses, retry, scale = found["attempt"]
            assert retry and scale == 2.0**12 and found["steps"] == len(found["taken"])
            assert losses == undisturbed[spoilt_step][0], "the attempt saw the batch of this step"
            for step, ((ours, norm, scale), (expected, its_norm, its_scale)) in enumerate(
                zip(found["taken"], undisturbed, strict=True)
            ):
                assert its_scale == 2.0**12 and scale == (2.0**12 if step < spoilt_step else 2.0**11)
                assert ours == pytest.approx(expected, rel=1e-6) and norm == pytest.approx(its_norm, rel=1e-5)
            assert found["taken"] == each[0][1]["taken"], "all ranks say the same"
