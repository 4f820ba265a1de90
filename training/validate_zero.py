"""Cross-checks of ZeRO, offloading, DeepSpeed's file, the loss scale and the moments' numbers.

Free of torch, as `validate` is, which asks for these. What goes with what is the table of `compositions`; the file is
`deepspeed_config`'s.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from training.arguments import Arguments
from training.compositions import composition_errors
from training.deepspeed_config import completed
from training.failures import ConfigurationError
from training.validate_layout import flag_of

_SCALES = ("loss_scale", "initial_loss_scale", "min_loss_scale")
_DYNAMIC = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_INITIAL, _LEAST = 65536.0, 1.0


def zero_errors(arguments: Arguments, world_size: int) -> Iterator[str]:
    """Everything wrong with these flags, which --deepspeed-config may complete, on `world_size` ranks."""
    try:
        arguments, _ = completed(arguments, world_size)
    except ConfigurationError as error:
        yield from error.errors
        return
    yield from composition_errors(arguments)
    yield from _check_disk(arguments)
    yield from _check_loss_scale(arguments)
    yield from _check_moments(arguments)


def zero_warnings(arguments: Arguments, world_size: int) -> Iterator[str]:
    """What works and is hardly meant: shards over a single replica."""
    parallel, stage = arguments.parallel, arguments.zero.zero_stage
    tp, ep = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    if stage and world_size // parallel.pipeline_model_parallel_size == tp and tp in (1, ep):
        yield (
            f"--zero-stage {stage} shards nothing: {world_size} ranks as tensor {tp} · pipeline "
            f"{parallel.pipeline_model_parallel_size} are 1 replica"
        )


def _check_disk(arguments: Arguments) -> Iterator[str]:
    """A disk that is swapped to has a directory which this host can write, or make."""
    zero = arguments.zero
    swapped = [f"{flag_of(name)} nvme" for name in ("offload_optimizer", "offload_param") if _on_disk(arguments, name)]
    if not swapped:
        if zero.nvme_path is not None:
            yield f"--nvme-path {zero.nvme_path} is for --offload-optimizer nvme or --offload-param nvme: leave it out"
        return
    if not zero.nvme_path:
        yield f"{' and '.join(swapped)} needs --nvme-path: a directory on each node's own fast disk"
        return
    place = Path(zero.nvme_path)
    there = next((folder for folder in (place, *place.absolute().parents) if folder.exists()), Path("/"))
    if not there.is_dir():
        yield f"--nvme-path {zero.nvme_path}: {there} is a file; name a directory"
    elif not os.access(there, os.W_OK | os.X_OK):
        doing = "written" if there == place else f"made in {there}"
        yield f"--nvme-path {zero.nvme_path} can't be {doing}: name a directory that this user can write"


def _on_disk(arguments: Arguments, name: str) -> bool:
    return getattr(arguments.zero, name) == "nvme"


def _check_loss_scale(arguments: Arguments) -> Iterator[str]:
    training = arguments.training
    given = {name: x for name in (*_SCALES, *_DYNAMIC) if (x := getattr(training, name)) is not None}
    if training.precision != "fp16":
        for name, value in given.items():
            yield f"{flag_of(name)} {value:g} is for --precision fp16, not {training.precision}: leave it out"
        return
    for name in _SCALES:
        value = given.get(name, _LEAST)
        if math.isfinite(value) and not (value > 0 and math.frexp(value)[0] == 0.5):
            yield f"{flag_of(name)} {value:g} must be a power of two above 0, so that scaling rounds nothing"
    for name in ("loss_scale_window", "hysteresis"):
        if name in given and given[name] < 1:
            yield f"{flag_of(name)} {given[name]} must be at least 1"
    if "loss_scale" in given:
        for name in _DYNAMIC:
            if name in given:
                yield (
                    f"{flag_of(name)} {given[name]:g} is for a dynamic loss scale and --loss-scale "
                    f"{given['loss_scale']:g} is constant: leave one of them out"
                )
    elif given.get("min_loss_scale", _LEAST) > given.get("initial_loss_scale", _INITIAL):
        yield (
            f"--min-loss-scale {given.get('min_loss_scale', _LEAST):g} is above --initial-loss-scale "
            f"{given.get('initial_loss_scale', _INITIAL):g}: lower it"
        )


def _check_moments(arguments: Arguments) -> Iterator[str]:
    optimizer = arguments.optimizer
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if (dtype := getattr(optimizer, name)) != "fp32" and optimizer.optimizer != "adamw":
            yield (
                f"{flag_of(name)} {dtype} is for --optimizer adamw, not {optimizer.optimizer}, which has no such "
                "moment: leave it out"
            )
