"""DeepSpeed's JSON file beside the flags: what completes them, what contradicts them, and what DeepSpeed is handed.

Imports neither torch nor DeepSpeed. The file is read by `deepspeed_file`; what the settings of each stage do is in
docs/zero.md. Follows DeepSpeed 0.19.8, https://www.deepspeed.ai/docs/config-json/.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from training.arguments import Arguments
from training.deepspeed_file import DeepSpeedFile, as_text, read_file
from training.deepspeed_keys import DTYPES, GATHER, OPTIMIZERS, TOP_LEVEL, ZERO, Key
from training.failures import ConfigurationError

_AGREE = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_clipping": "clip_grad",
    "optimizer.params.max_grad_norm": "clip_grad",
    "optimizer.params.lr": "lr",
    "optimizer.params.eps": "adam_eps",
    "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.momentum": "sgd_momentum",
}
"""Key -> the flag that must have its value."""
_COMPLETE = {
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer.device": "offload_optimizer",
    "zero_optimization.offload_param.device": "offload_param",
}
"""Key -> the flag that takes its value where it isn't given."""
_DYNAMIC = {
    "fp16.initial_scale_power": "initial_loss_scale",
    "fp16.min_loss_scale": "min_loss_scale",
    "fp16.loss_scale_window": "loss_scale_window",
    "fp16.hysteresis": "hysteresis",
}
"""The same, of a dynamic loss scale."""
_OFFLOADS = ("offload_optimizer", "offload_param")


def completed(arguments: Arguments, world_size: int | None = None) -> tuple[Arguments, tuple[str, ...]]:
    """The flags with those filled in that only --deepspeed-config says, and what a user should be told, a line each.

    Filled in: ZeRO's stage, offloading, --nvme-path, the loss scale's flags, --save-16bit-weights; afterwards stage and
    offloading aren't None. Without a file the flags come back as they are. Doing it twice changes nothing. `world_size`
    is needed to check gradient_accumulation_steps. Raises ConfigurationError that lists everything wrong with the
    file: unreadable, unknown keys, values of a wrong kind, contradictions to flags, what isn't DeepSpeed's to do here.
    """
    path = arguments.zero.deepspeed_config
    if path is None:
        return arguments, ()
    file = read_file(path)
    values: dict[str, Any] = {}
    errors = [*file.errors, *_fill(file, arguments, values), *_contradictions(file, arguments, world_size)]
    if errors:
        raise ConfigurationError(*errors)
    notices = list(file.notices)
    stage = values["zero_stage"]
    if stage == 0:
        notices.append(f"{path}: says no stage of ZeRO above 0, nor does --zero-stage: DeepSpeed isn't used")
    for name, value in file.content.get("zero_optimization", {}).items():
        key = ZERO[name]
        if stage and stage not in key.stages and value not in key.nothing:
            notices.append(f"{path}: zero_optimization.{name} {as_text(value)} is left out: {key.line}")
    if file.get(f"zero_optimization.{GATHER}"):
        if stage == 3:
            values["save_16bit_weights"] = True
        else:
            notices.append(
                f"{path}: {GATHER} is for stage 3 and is left out: at stage {stage} --save-16bit-weights says it"
            )
    return arguments.replace(**values), tuple(notices)


def engine_config(arguments: Arguments) -> dict[str, Any]:
    """What deepspeed.initialize is handed at the stage of `arguments`, which are completed.

    Stage 1 gets whole gradients from this project's reducer, in fp32 and clipped: so precision and clipping are off and
    masters are fp32. At stages 2 and 3 the engine reduces and clips; what its arithmetic depends on, such as the dtype,
    `parallel.zero_engine` sets. Keys that are DeepSpeed's alone come from the file.
    Raises ValueError at stage 0, and ConfigurationError where the file has become unreadable.
    """
    zero, stage = arguments.zero, arguments.zero.zero_stage
    if not stage:
        raise ValueError("ZeRO stage 0 has no DeepSpeed configuration: the native optimizer runs")
    file = DeepSpeedFile("", {}, (), ()) if zero.deepspeed_config is None else read_file(zero.deepspeed_config)
    config: dict[str, Any] = {
        **_passed(file.content, TOP_LEVEL, stage),
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    sections = {"stage": stage, **_passed(file.content.get("zero_optimization", {}), ZERO, stage)}
    for name in _OFFLOADS:
        device = getattr(zero, name) or "none"
        if device != "none":
            given = file.get(f"zero_optimization.{name}") or {}
            path = {"nvme_path": zero.nvme_path} if device == "nvme" else {}
            sections[name] = {**_passed(given, ZERO[name].section, stage), "device": device, **path}
    config["zero_optimization"] = sections
    if stage < 3:  # grouped products on a GPU take weights at multiples of 16 bytes only
        sections["parameter_alignment"] = True
    if stage == 1:
        # An fp16 section that is off but says 1 keeps DeepSpeed from scaling by 65536 where parameters are fp16. With
        # an offloaded optimizer the norm must stay on, though nobody asks for it.
        config |= {"gradient_clipping": 0.0, "fp16": {"enabled": False, "loss_scale": 1.0}}
        sections |= {
            "contiguous_gradients": False,
            "overlap_comm": False,
            "compute_grad_norm": "offload_optimizer" in sections,
        }
        return config
    sections.setdefault("reduce_bucket_size", int(arguments.distributed.bucket_cap_mb * 2**20 / 4))
    sections.setdefault("overlap_comm", arguments.distributed.overlap_grad_reduce)
    config["gradient_clipping"] = arguments.optimizer.clip_grad
    return config


def _passed(content: Mapping[str, Any], table: Mapping[str, Key], stage: int) -> dict[str, Any]:
    """What of `content` DeepSpeed gets at a stage."""
    kept = {name: value for name, value in content.items() if table[name].use == "passed"}
    return {name: value for name, value in kept.items() if stage in table[name].stages}


def _fill(file: DeepSpeedFile, arguments: Arguments, values: dict[str, Any]) -> Iterator[str]:
    """Puts the flags that the file completes into `values`; yields contradictions to those that are given."""
    flags = arguments.flat()

    def take(key: str, flag: str, value: Any) -> Iterator[str]:
        if value is not None and flags[flag] is not None and flags[flag] != value:
            yield _contradiction(file.path, key, file.get(key), flag, flags[flag], value)
        values[flag] = value if flags[flag] is None else flags[flag]

    for key, flag in _COMPLETE.items():
        yield from take(key, flag, file.get(key))
        if values[flag] is None:
            values[flag] = 0 if flag == "zero_stage" else "none"
    for section in _OFFLOADS:
        if values[section] == "nvme" and (path := file.get(f"zero_optimization.{section}.nvme_path")) is not None:
            if values.get("nvme_path") not in (None, path, flags["nvme_path"]):
                yield (
                    f"{file.path}: zero_optimization.{section}.nvme_path {path} isn't that of the other section, "
                    f"{values['nvme_path']}: use one directory for both"
                )
            yield from take(f"zero_optimization.{section}.nvme_path", "nvme_path", path)
    if arguments.training.precision == "fp16":
        constant = file.get("fp16.loss_scale")
        if constant == 0:
            if flags["loss_scale"] is not None:
                yield (
                    f"{file.path}: fp16.loss_scale 0, which is dynamic, contradicts --loss-scale "
                    f"{as_text(flags['loss_scale'])}: take one of them out"
                )
        else:
            yield from take("fp16.loss_scale", "loss_scale", constant)
        if (values.get("loss_scale") or flags["loss_scale"]) is None:  # else DeepSpeed too ignores the rest
            for key, flag in _DYNAMIC.items():
                value = file.get(key)
                if key == "fp16.initial_scale_power" and value is not None:
                    if value >= sys.float_info.max_exp:
                        yield f"{file.path}: {key} {value} is too much: 2 to its power is no number; DeepSpeed's is 16"
                        continue
                    value = 2.0**value
                yield from take(key, flag, float(value) if flag == "min_loss_scale" and value is not None else value)
    stage, gather = values["zero_stage"], file.get(f"zero_optimization.{GATHER}")
    if stage == 3 and gather is False and arguments.checkpoint.save_16bit_weights:
        yield (f"{file.path}: zero_optimization.{GATHER} false contradicts --save-16bit-weights: take one of them out")


def _contradictions(file: DeepSpeedFile, arguments: Arguments, world_size: int | None) -> Iterator[str]:
    """Where file and flags both have a value, and not the same."""
    flags = arguments.flat()
    for key, flag in _AGREE.items():
        if (value := file.get(key)) is not None and value != flags[flag]:
            yield _contradiction(file.path, key, value, flag, flags[flag], value)
    if (betas := file.get("optimizer.params.betas")) is not None:
        ours = [flags["adam_beta1"], flags["adam_beta2"]]
        if betas != ours:
            yield (
                f"{file.path}: optimizer.params.betas {as_text(betas)} contradicts --adam-beta1 {ours[0]} --adam-beta2 "
                f"{ours[1]}: make them equal, or take betas out of the file"
            )
    if (kind := file.get("optimizer.type")) is not None:
        wanted = OPTIMIZERS.get(kind.lower())
        if wanted is None:
            text = ": for compressed gradients use --grad-compression" if "bit" in kind.lower() else ""
            yield f"{file.path}: optimizer.type {kind} isn't there: Adam, AdamW and SGD are, as --optimizer{text}"
        elif wanted != flags["optimizer"]:
            yield _contradiction(file.path, "optimizer.type", kind, "optimizer", flags["optimizer"], wanted)
    yield from _precision_contradictions(file, arguments.training.precision)
    yield from _accumulation_contradiction(file, arguments, world_size)


def _precision_contradictions(file: DeepSpeedFile, precision: str) -> Iterator[str]:
    for name in ("fp16", "bf16"):
        enabled = file.get(f"{name}.enabled")
        if enabled is not None and enabled != (precision == name):
            fix = f"give --precision {name}, or take it out of the file" if enabled else "take it out of the file"
            yield f"{file.path}: {name}.enabled {as_text(enabled)} contradicts --precision {precision}: {fix}"
    dtype = file.get("data_types.param_dtype")
    if dtype is not None and dtype.lower() not in DTYPES[precision]:
        yield (
            f"{file.path}: data_types.param_dtype {dtype} contradicts --precision {precision}: make them equal, or "
            "take it out of the file"
        )


def _accumulation_contradiction(file: DeepSpeedFile, arguments: Arguments, world_size: int | None) -> Iterator[str]:
    steps, parallel, training = file.get("gradient_accumulation_steps"), arguments.parallel, arguments.training
    if steps is None or world_size is None:
        return
    ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    micro, whole = training.micro_batch_size, training.global_batch_size
    if min(ranks, micro, whole) < 1 or world_size % ranks:
        return  # said by the checks of the layout
    dp = world_size // ranks
    if steps * micro * dp != whole:
        yield (
            f"{file.path}: gradient_accumulation_steps {steps} contradicts --global-batch-size {whole}, which is "
            f"{whole / (micro * dp):g} times --micro-batch-size {micro} · data parallel size {dp}: give "
            f"--global-batch-size {steps * micro * dp}, or take it out of the file"
        )


def _contradiction(path: str, key: str, value: Any, flag: str, ours: Any, wanted: Any) -> str:
    dashed = "--" + flag.replace("_", "-")
    return (
        f"{path}: {key} {as_text(value)} contradicts {dashed} {as_text(ours)}: give {dashed} {as_text(wanted)}, or "
        f"take {key} out of the file"
    )
