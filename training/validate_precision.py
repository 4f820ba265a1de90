"""Cross-checks of the flags on numbers: the loss scale and the dtypes of Adam's moments.

May import the standard library and `training.arguments`; free of torch. Each check gives errors that name the numbers
and the fix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from training.arguments import INITIAL_LOSS_SCALE, Arguments
from training.validate_layout import flag_of

_DYNAMIC = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_SCALES = ("loss_scale", "initial_loss_scale", "min_loss_scale")
_MOMENTS = {"exp_avg_dtype": "adam_beta1", "exp_avg_sq_dtype": "adam_beta2"}
_HALF_STEP = 2.0**-8
"""The largest change, as a share of a number, that rounding to bf16 undoes."""


def precision_errors(arguments: Arguments) -> Iterator[str]:
    """What is wrong with the loss scale's flags and with the moments' dtypes."""
    yield from _check_loss_scale(arguments)
    yield from _check_moments(arguments)


def _check_loss_scale(arguments: Arguments) -> Iterator[str]:
    training = arguments.training
    given = {name: value for name in ("loss_scale", *_DYNAMIC) if (value := getattr(training, name)) is not None}
    if training.precision != "fp16":
        for name, value in given.items():
            yield (
                f"{flag_of(name)} {value} needs --precision fp16 and it is {training.precision}, whose range needs no "
                "loss scale: leave it out"
            )
        return
    if training.loss_scale is not None:
        for name in _DYNAMIC:
            if name in given:
                yield f"{flag_of(name)} {given[name]} contradicts --loss-scale {training.loss_scale}, which is constant"
    for name in _SCALES:
        value = given.get(name)
        if value is not None and not (value > 0 and math.isfinite(value) and math.frexp(value)[0] == 0.5):
            yield f"{flag_of(name)} {value} must be {_powers_near(value)}: only then it changes no bit of a gradient"
    for name in ("loss_scale_window", "hysteresis"):
        if name in given and given[name] < 1:
            yield f"{flag_of(name)} {given[name]} must be at least 1"
    initial, minimum = given.get("initial_loss_scale", INITIAL_LOSS_SCALE), given.get("min_loss_scale", 1.0)
    if training.loss_scale is None and minimum > initial:
        yield f"--min-loss-scale {minimum} is above --initial-loss-scale {initial}: lower it"


def _powers_near(value: float) -> str:
    if not (value > 0 and math.isfinite(value)):
        return "a power of two"
    above = math.frexp(value)[1]
    return f"a power of two, such as {2.0 ** (above - 1):g} or {2.0**above:g}"


def _check_moments(arguments: Arguments) -> Iterator[str]:
    optimizer = arguments.optimizer
    for name, decay in _MOMENTS.items():
        if getattr(optimizer, name) != "bf16":
            continue
        beta = getattr(optimizer, decay)
        if optimizer.optimizer != "adamw":
            yield f"{flag_of(name)} bf16 is for --optimizer adamw, not {optimizer.optimizer}: leave it out"
        elif beta > 1 - _HALF_STEP:
            yield (
                f"{flag_of(name)} bf16 with {flag_of(decay)} {beta}: a step changes the moment by a share of "
                f"{1 - beta:.2g}, which rounding to bf16 undoes below {_HALF_STEP:.2g}, so that it would never "
                f"decay; use at most {1 - _HALF_STEP:.4g}, or fp32"
            )
