"""Every cross-check of the flags, in one step before any rank waits for another (decision 8).

May import model.config, data.blend and the standard library; free of torch. Each check gives errors that name the
numbers and the fix, and all of them are shown at once. Those of the layout are in `validate_layout`, those of
compressed gradients in `validate_compression`, of numbers in `validate_precision`, of ZeRO in `validate_zero`.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.arguments import DEEPSEEK, RECOMPUTE_MODULES, Arguments
from training.failures import ConfigurationError
from training.run_directory import earlier_run_error
from training.validate_compression import compression_errors
from training.validate_layout import flag_of, layout_errors
from training.validate_precision import precision_errors
from training.validate_zero import zero_errors

if TYPE_CHECKING:
    from model.config import DeepSeekConfig


def read_model_config(arguments: Arguments) -> DeepSeekConfig:
    """The configuration of `--model` with the flags that change it (--init-method-std, --aux-loss-alpha) put in.

    Raises ConfigurationError where the file is missing, isn't one of a DeepSeek-V2/V3 model, or a flag doesn't suit it.
    """
    from model.config import DeepSeekConfig

    path = arguments.model.model
    if path is None:
        raise ConfigurationError("--model is missing: give a config.json, such as configs/models/tiny_v3.json")
    overrides: dict[str, Any] = {
        "initializer_range": arguments.model.init_method_std,
        "aux_loss_alpha": arguments.model.aux_loss_alpha,
    }
    try:
        config = DeepSeekConfig.from_file(path)
        return dataclasses.replace(config, **{name: x for name, x in overrides.items() if x is not None})
    except OSError as error:
        raise ConfigurationError(f"--model {path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"--model {error}") from error


def validate(arguments: Arguments, model_config: DeepSeekConfig, world_size: int, gpus: int = 0) -> None:
    """Raises ConfigurationError that lists everything wrong with running `arguments` on `world_size` ranks.

    `gpus` is the number of GPUs of this host. Every rank looks for an earlier run in --run-dir too: the directory is
    made only after all ranks have met, so none can take this run's for an earlier one.
    """
    errors = [
        *_check_ranges(arguments),
        *layout_errors(arguments, model_config, world_size),
        *_check_balance(arguments, model_config),
        *_check_recomputation(arguments),
        *_check_schedule(arguments),
        *compression_errors(arguments, world_size),
        *precision_errors(arguments),
        *zero_errors(arguments, world_size),
        *_check_checkpoints(arguments),
        *_check_data(arguments),
    ]
    if arguments.distributed.distributed_backend == "nccl" and gpus == 0:
        errors.append(
            "--distributed-backend nccl needs a GPU and this host has none: use gloo "
            "(TORCH_DISTRIBUTED_BACKEND sets it too)"
        )
    if error := earlier_run_error(arguments):
        errors.append(error)
    if errors:
        raise ConfigurationError(*errors)


_AT_LEAST_ONE = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "train_iters",
    "micro_batch_size",
    "global_batch_size",
    "seq_length",
    "eval_interval",
    "save_interval",
    "log_interval",
    "lr_decay_iters",
    "grad_compression_rank",
    "grad_compression_inner_size",
)
_AT_LEAST_ZERO = (
    "seed",
    "eval_iters",
    "lr",
    "min_lr",
    "lr_warmup_iters",
    "lr_warmup_init",
    "weight_decay",
    "clip_grad",
    "mtp_loss_scaling_factor",
    "aux_loss_alpha",
    "moe_device_level_aux_loss_coeff",
    "moe_comm_aux_loss_coeff",
    "moe_z_loss_coeff",
    "router_bias_update_rate",
    "init_method_std",
    "grad_compression_warmup_steps",
)
_ABOVE_ZERO = (
    "moe_expert_capacity_factor",
    "pipeline_memory_limit",
    "adam_eps",
    "bucket_cap_mb",
    "distributed_timeout_minutes",
    "distributed_start_timeout_seconds",
    "peak_tflops",
    "grad_compression_density",
    "grad_compression_decay",
)
_BALANCES_EXPERTS = ("aux_loss_alpha", "moe_z_loss_coeff", "moe_expert_capacity_factor")
_BALANCES_GROUPS = ("moe_device_level_aux_loss_coeff", "moe_comm_aux_loss_coeff", "moe_token_drop_level")
_BELOW_ONE = ("adam_beta1", "adam_beta2", "sgd_momentum")


def _check_ranges(arguments: Arguments) -> Iterator[str]:
    values = {name: value for name, value in arguments.flat().items() if value is not None}
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{flag_of(name)} {value} must be a finite number"
    values = {name: x for name, x in values.items() if not isinstance(x, float) or math.isfinite(x)}
    for name in _AT_LEAST_ONE:
        if name in values and values[name] < 1:
            yield f"{flag_of(name)} {values[name]} must be at least 1"
    for name in _AT_LEAST_ZERO:
        if name in values and values[name] < 0:
            yield f"{flag_of(name)} {values[name]} must not be negative"
    for name in _ABOVE_ZERO:
        if name in values and values[name] <= 0:
            yield f"{flag_of(name)} {values[name]} must be above 0"
    for name in _BELOW_ONE:
        if name in values and not 0 <= values[name] < 1:
            yield f"{flag_of(name)} {values[name]} must be at least 0 and below 1"


def _check_balance(arguments: Arguments, config: DeepSeekConfig) -> Iterator[str]:
    """What balances experts has experts, and what balances groups of them has groups."""
    model = arguments.model
    given = {name: value for name in (*_BALANCES_EXPERTS, *_BALANCES_GROUPS) if (value := getattr(model, name))}
    if model.moe_token_drop_level == "expert":
        del given["moe_token_drop_level"]
    if not any(config.is_moe_layer(layer) for layer in range(config.num_layers_with_mtp)):
        for name, value in given.items():
            yield f"{flag_of(name)} {value} needs experts and no layer of the model has any: leave it out"
    elif config.n_group == 1 or config.topk_method == "greedy":
        for name in filter(given.get, _BALANCES_GROUPS):
            yield (
                f"{flag_of(name)} {given[name]} needs groups of experts and the router has none (n_group "
                f"{config.n_group}, topk_method {config.topk_method}): leave it out, or give both in --model's file"
            )
    for name, plain in (("moe_token_drop_policy", "probs"), ("moe_token_drop_level", "expert")):
        if (value := getattr(model, name)) != plain and model.moe_expert_capacity_factor is None:
            yield f"{flag_of(name)} {value} needs --moe-expert-capacity-factor: nothing is dropped without it"


def _check_recomputation(arguments: Arguments) -> Iterator[str]:
    modules, granularity = arguments.training.recompute_modules, arguments.training.recompute_granularity
    if unknown := [name for name in modules if name not in (*RECOMPUTE_MODULES, DEEPSEEK)]:
        known = " ".join((*RECOMPUTE_MODULES, DEEPSEEK))
        yield f"--recompute-modules {' '.join(unknown)}: unknown; there are, with spaces between them, {known}"
    if modules and granularity != "selective":
        yield (
            f"--recompute-modules {' '.join(modules)} needs --recompute-granularity selective and it is "
            f"{granularity}: set it, or leave the modules out"
        )


def _check_schedule(arguments: Arguments) -> Iterator[str]:
    optimizer, steps = arguments.optimizer, arguments.training.train_iters
    warmup, wsd = optimizer.lr_warmup_iters, optimizer.lr_wsd_decay_iters
    decay = steps if optimizer.lr_decay_iters is None else optimizer.lr_decay_iters
    if min(steps, decay) < 1:
        return  # said already
    if optimizer.min_lr > optimizer.lr and math.isfinite(optimizer.min_lr):
        yield f"--min-lr {optimizer.min_lr} is above --lr {optimizer.lr}: lower it"
    if warmup > steps:
        yield f"--lr-warmup-iters {warmup} is more than --train-iters {steps}: the warm-up would never end; lower it"
    elif optimizer.lr_decay_style == "constant":
        return
    elif warmup >= decay:
        name = "--train-iters" if optimizer.lr_decay_iters is None else "--lr-decay-iters"
        yield f"--lr-warmup-iters {warmup} leaves no step for the decay, which ends at {name} {decay}: lower it"
    if optimizer.lr_decay_style == "wsd":
        if wsd is None:
            yield f"--lr-decay-style wsd needs --lr-wsd-decay-iters: say how many of the {decay} steps decay"
        elif not 1 <= wsd <= decay - warmup and warmup < decay:
            yield f"--lr-wsd-decay-iters {wsd} must be from 1 to the {decay - warmup} steps between warm-up and end"


def _check_checkpoints(arguments: Arguments) -> Iterator[str]:
    load, weights = arguments.checkpoint.load, arguments.checkpoint.pretrained_checkpoint
    if load and weights:
        yield (
            f"--load {load} and --pretrained-checkpoint {weights} exclude each other: the first goes on with a run, "
            "the second starts one, at step 0, from weights alone"
        )
    if weights and not Path(weights).is_dir():
        yield f"--pretrained-checkpoint {weights} is no directory: give a run, a checkpoint or Hugging Face's files"


def _check_data(arguments: Arguments) -> Iterator[str]:
    from data.blend import parse_data_path, parse_split  # numpy: a sixth of the time of --help

    data = arguments.data
    if data.tokenizer_model is not None and not Path(data.tokenizer_model).exists():
        yield (
            f"--tokenizer-model {data.tokenizer_model} doesn't exist: give the SentencePiece model or tokenizer.json "
            "that made the data, or train one with tools/train_tokenizer.py"
        )
    try:
        parse_split(data.split)
    except ValueError as error:
        yield f"--{error}"
    if not data.data_path:
        yield "--data-path is missing: give the prefix of .bin/.idx files made by tools/preprocess_data.py"
        return
    try:
        prefixes, _ = parse_data_path(data.data_path)
    except ValueError as error:
        yield f"--{error}"
        return
    for prefix in prefixes:
        missing = [prefix + end for end in (".idx", ".bin") if not Path(prefix + end).is_file()]
        if missing:
            yield (
                f"--data-path {prefix}: {' and '.join(missing)} not found; give the prefix without extension, "
                "as written by tools/preprocess_data.py"
            )


if __name__ == "__main__":  # WORLD_SIZE FLAGS, of scripts/lib/node.sh: what is wrong is told before ranks start
    from training.command_line import parse

    try:
        asked = parse(sys.argv[2:])
        validate(asked, read_model_config(asked), int(sys.argv[1]), gpus=1)  # ranks know better whether there are any
    except ConfigurationError as mistake:
        sys.exit(str(mistake))
