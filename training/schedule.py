"""The learning rate as a pure function of the samples consumed before a step.

Imports nothing of ours but the flags. Source: Megatron-LM's `megatron/core/optimizer_param_scheduler.py`, whose unit is
the sample too, so that a batch size that grows during the run neither stretches nor shortens the schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from training.arguments import Arguments


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warm-up from `initial` to `peak`, then a decay to `minimum`. Lengths in samples (sequences)."""

    peak: float
    minimum: float = 0.0
    style: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    decay_samples: int = 0
    """Samples after which `minimum` is reached, warm-up included. Not read where the style is constant."""
    warmup_samples: int = 0
    initial: float = 0.0
    wsd_decay_samples: int = 0
    """Length of wsd's decay, which ends at `decay_samples`."""
    wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"

    @classmethod
    def from_arguments(cls, arguments: Arguments) -> LearningRateSchedule:
        """Steps of the flags become samples by --global-batch-size."""
        flags, batch = arguments.optimizer, arguments.training.global_batch_size
        decay_iters = arguments.training.train_iters if flags.lr_decay_iters is None else flags.lr_decay_iters
        return cls(
            peak=flags.lr,
            minimum=flags.min_lr,
            style=flags.lr_decay_style,
            decay_samples=decay_iters * batch,
            warmup_samples=flags.lr_warmup_iters * batch,
            initial=flags.lr_warmup_init,
            wsd_decay_samples=(flags.lr_wsd_decay_iters or 0) * batch,
            wsd_decay_style=flags.lr_wsd_decay_style,
        )


def lr_at(samples: int, schedule: LearningRateSchedule) -> float:
    """Learning rate of the step before which `samples` sequences were consumed (0 for the first step).

    As in Megatron, the first step of a warm-up has the rate `initial`, and the peak comes with the step after it.
    """
    peak, minimum, warmup = schedule.peak, schedule.minimum, schedule.warmup_samples
    if warmup > 0 and samples <= warmup:
        return schedule.initial + (peak - schedule.initial) * samples / warmup
    if schedule.style == "constant":
        return peak
    if samples > schedule.decay_samples:
        return minimum
    progress = (samples - warmup) / (schedule.decay_samples - warmup)
    if schedule.style == "linear":
        return minimum + (peak - minimum) * (1.0 - progress)
    if schedule.style == "cosine":
        return minimum + (peak - minimum) * 0.5 * (math.cos(math.pi * progress) + 1.0)
    if schedule.style == "wsd":
        return minimum + (peak - minimum) * _wsd(samples, schedule)
    raise ValueError(f"learning-rate style {schedule.style!r} is unknown: use cosine, wsd, linear or constant")


def _wsd(samples: int, schedule: LearningRateSchedule) -> float:
    """Share of the way from minimum to peak: 1 until the decay starts, 0 at its end."""
    decayed = samples - (schedule.decay_samples - schedule.wsd_decay_samples)
    if decayed <= 0:
        return 1.0
    progress = decayed / schedule.wsd_decay_samples
    if schedule.wsd_decay_style == "linear":
        return 1.0 - progress
    if schedule.wsd_decay_style == "cosine":
        return 0.5 * (math.cos(math.pi * progress) + 1.0)
    if schedule.wsd_decay_style == "exponential":
        return 2.0 * math.pow(0.5, progress) - 1.0
    if schedule.wsd_decay_style == "minus_sqrt":
        return 1.0 - math.sqrt(progress)
    raise ValueError(
        f"wsd decay {schedule.wsd_decay_style!r} is unknown: use exponential, linear, cosine or minus_sqrt"
    )
