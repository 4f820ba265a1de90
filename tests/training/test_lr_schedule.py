"""Learning rates against values worked out by hand from Megatron's formulas. Imports training.schedule only."""

from __future__ import annotations

import math
from typing import Any

import pytest

from training.arguments import Arguments
from training.schedule import LearningRateSchedule, lr_at


def schedule(style: Any, **more: Any) -> LearningRateSchedule:
    return LearningRateSchedule(peak=1.0, minimum=0.1, style=style, warmup_samples=100, decay_samples=1100, **more)


@pytest.mark.parametrize("style", ["cosine", "linear", "wsd", "constant"])
def test_warm_up_is_linear_and_ends_at_the_peak(style: str) -> None:
    warm = schedule(style, initial=0.2, wsd_decay_samples=10)
    assert [lr_at(samples, warm) for samples in (0, 50, 100)] == pytest.approx([0.2, 0.6, 1.0], abs=1e-15)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # progress 0.25, 0.5, 1 (samples 350, 600, 1100), then past the end
        (schedule("linear"), [0.775, 0.55, 0.1, 0.1]),
        (schedule("cosine"), [0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2, 0.55, 0.1, 0.1]),
        (schedule("constant"), [1.0, 1.0, 1.0, 1.0]),
        # the last 1000 samples decay: 2 · 0.5^progress - 1
        (
            schedule("wsd", wsd_decay_samples=1000),
            [0.1 + 0.9 * (2**0.75 - 1), 0.1 + 0.9 * (math.sqrt(2) - 1), 0.1, 0.1],
        ),
        # the last 500: the decay starts at 600
        (schedule("wsd", wsd_decay_samples=500, wsd_decay_style="linear"), [1.0, 1.0, 0.1, 0.1]),
    ],
)
def test_decay(given: LearningRateSchedule, expected: list[float]) -> None:
    assert [lr_at(samples, given) for samples in (350, 600, 1100, 1101)] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("style", "share"),
    [("linear", 0.75), ("cosine", (1 + math.sqrt(0.5)) / 2), ("minus_sqrt", 0.5), ("exponential", 2**0.75 - 1)],
)
def test_wsd_decay_styles_after_a_quarter(style: Any, share: float) -> None:
    quarter = schedule("wsd", wsd_decay_samples=400, wsd_decay_style=style)
    assert lr_at(700, quarter) == pytest.approx(1.0, abs=1e-15)
    assert lr_at(800, quarter) == pytest.approx(0.1 + 0.9 * share, abs=1e-12)


def test_flags_in_steps_become_samples() -> None:
    flags = Arguments().replace(
        lr=3e-4, train_iters=50, global_batch_size=16, lr_warmup_iters=5, lr_wsd_decay_iters=10, lr_decay_style="wsd"
    )
    got = LearningRateSchedule.from_arguments(flags)
    assert (got.warmup_samples, got.decay_samples, got.wsd_decay_samples) == (80, 800, 160)
    assert LearningRateSchedule.from_arguments(flags.replace(lr_decay_iters=40)).decay_samples == 640


def test_rate_depends_on_samples_not_on_how_they_were_batched() -> None:
    cosine = schedule("cosine")
    ramped, consumed = [], 0
    for batch in [50, 50, 100, 200, 200, 400]:  # a batch that grows
        ramped.append((consumed, lr_at(consumed, cosine)))
        consumed += batch
    assert ramped == [(samples, lr_at(samples, cosine)) for samples in (0, 50, 100, 200, 400, 600)]
    assert ramped[-1][1] == pytest.approx(0.55, abs=1e-12)


def test_unknown_styles_end_in_an_error() -> None:
    with pytest.raises(ValueError, match="'step' is unknown"):
        lr_at(500, schedule("step"))
    with pytest.raises(ValueError, match="'step' is unknown"):
        lr_at(1000, schedule("wsd", wsd_decay_samples=500, wsd_decay_style="step"))
