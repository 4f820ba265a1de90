"""Every cross-check of the flags, in one step before any rank waits for another (decision 8).

May import model.config, data.blend and the standard library; free of torch. Each check gives errors that name the
numbers and the fix, and all of them are shown at once.
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
        *_check_layout(arguments, model_config, world_size),
        *_check_pipeline(arguments, model_config, world_size),
        *_check_not_yet(arguments),
        *_check_balance(arguments, model_config),
        *_check_recomputation(arguments),
        *_check_batches(arguments, model_config, world_size),
        *_check_schedule(arguments),
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
)
_ABOVE_ZERO = (
    "moe_expert_capacity_factor",
    "pipeline_memory_limit",
    "adam_eps",
    "bucket_cap_mb",
    "distributed_timeout_minutes",
    "distributed_start_timeout_seconds",
    "peak_tflops",
)
_BALANCES_EXPERTS = ("aux_loss_alpha", "moe_z_loss_coeff", "moe_expert_capacity_factor")
_BALANCES_GROUPS = ("moe_device_level_aux_loss_coeff", "moe_comm_aux_loss_coeff", "moe_token_drop_level")
_BELOW_ONE = ("adam_beta1", "adam_beta2", "sgd_momentum")


def _check_ranges(arguments: Arguments) -> Iterator[str]:
    values = {name: value for name, value in arguments.flat().items() if value is not None}
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{_flag(name)} {value} must be a finite number"
    values = {name: x for name, x in values.items() if not isinstance(x, float) or math.isfinite(x)}
    for name in _AT_LEAST_ONE:
        if name in values and values[name] < 1:
            yield f"{_flag(name)} {values[name]} must be at least 1"
    for name in _AT_LEAST_ZERO:
        if name in values and values[name] < 0:
            yield f"{_flag(name)} {values[name]} must not be negative"
    for name in _ABOVE_ZERO:
        if name in values and values[name] <= 0:
            yield f"{_flag(name)} {values[name]} must be above 0"
    for name in _BELOW_ONE:
        if name in values and not 0 <= values[name] < 1:
            yield f"{_flag(name)} {values[name]} must be at least 0 and below 1"


def _check_layout(arguments: Arguments, config: DeepSeekConfig, world_size: int) -> Iterator[str]:
    parallel = arguments.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp, ep = parallel.context_parallel_size, parallel.expert_model_parallel_size
    if min(tp, pp, cp, ep) < 1:
        return  # said already
    if world_size % (tp * pp * cp):
        yield (
            f"{world_size} ranks can't be laid out as tensor {tp} · pipeline {pp} · context {cp}: "
            f"start a multiple of {tp * pp * cp} ranks, or change these sizes"
        )
    if config.num_attention_heads % tp:
        yield (
            f"--tensor-model-parallel-size {tp} doesn't divide the model's {config.num_attention_heads} attention heads"
            f": use one of {_divisors(config.num_attention_heads)}"
        )
    dense = [layer for layer in range(config.num_hidden_layers) if not config.is_moe_layer(layer)]
    if dense and config.intermediate_size % tp:
        yield (
            f"--tensor-model-parallel-size {tp} doesn't divide the intermediate_size {config.intermediate_size} of the "
            f"model's dense layers: use one of {_divisors(config.intermediate_size)}"
        )
    yield from _check_experts(arguments, config, world_size)


def _check_experts(arguments: Arguments, config: DeepSeekConfig, world_size: int) -> Iterator[str]:
    """Every rank of an expert-parallel group holds equally many experts, and groups lie within a stage."""
    ep, pp = arguments.parallel.expert_model_parallel_size, arguments.parallel.pipeline_model_parallel_size
    if ep == 1:
        return
    if not any(map(config.is_moe_layer, range(config.num_layers_with_mtp))):
        yield (
            f"--expert-model-parallel-size {ep} needs routed experts, and none of the model's "
            f"{config.num_hidden_layers} layers has them (n_routed_experts null, or first_k_dense_replace "
            f"{config.first_k_dense_replace}): use 1"
        )
        return
    stage, experts = world_size // pp, config.n_routed_experts
    fitting = _divisors(experts if world_size % pp else math.gcd(stage, experts))
    fix = f"use one of {fitting}" if fitting != "1" else "use 1"
    if experts % ep:
        yield (f"--expert-model-parallel-size {ep} doesn't divide the model's {experts} routed experts: {fix}")
    if world_size % pp == 0 and stage % ep:
        yield (
            f"--expert-model-parallel-size {ep} doesn't divide the {stage} ranks of a pipeline stage ({world_size} "
            f"ranks / pipeline {pp}), which share the experts: {fix}"
        )


def _check_pipeline(arguments: Arguments, config: DeepSeekConfig, world_size: int) -> Iterator[str]:
    """The schedule can have these numbers, and every stage gets something to do."""
    from parallel.pipeline.catalogue import AUTO, SCHEDULES
    from training.pipeline import layers_of_stages, microbatches_of, placement_asked, schedule_of, stages_given

    parallel, training = arguments.parallel, arguments.training
    sizes = (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.context_parallel_size)
    if min(*sizes, training.micro_batch_size, training.global_batch_size) < 1:
        return  # said already
    costs, limit = parallel.pipeline_costs, parallel.pipeline_memory_limit
    pp, layers = parallel.pipeline_model_parallel_size, config.num_hidden_layers
    if costs and (
        len(costs) not in (3, 4) or not all(map(math.isfinite, costs)) or min(costs[:3]) <= 0 or min(costs) < 0
    ):
        yield (
            f"--pipeline-costs {','.join(f'{cost:g}' for cost in costs)} must be three times above 0, of forward, "
            "input gradient and weight gradient, such as 1,1.2,0.8, and maybe a fourth of a message, at least 0"
        )
        return
    for name, value in (("pipeline_costs", costs), ("pipeline_memory_limit", limit)):
        if value and parallel.pipeline_schedule != AUTO:
            yield f"{_flag(name)} is for --pipeline-schedule auto, not {parallel.pipeline_schedule}: leave it out"
    if parallel.overlap_moe_expert_parallel_comm:
        if parallel.pipeline_schedule == AUTO or SCHEDULES[parallel.pipeline_schedule].together is None:
            yield (
                "--overlap-moe-expert-parallel-comm is for --pipeline-schedule dualpipe-v, not "
                f"{parallel.pipeline_schedule}: leave it out"
            )
            return
        if parallel.expert_model_parallel_size == 1:
            yield (
                "--overlap-moe-expert-parallel-comm hides tokens' way to experts on other ranks, and with "
                "--expert-model-parallel-size 1 none travel: leave it out"
            )
    if parallel.pipeline_layers and parallel.pipeline_model_parallel_layout is not None:
        yield "--pipeline-layers and --pipeline-model-parallel-layout say the same: leave one out"
        return
    try:
        given = stages_given(arguments)
    except ValueError as error:
        yield f"--pipeline-model-parallel-layout: {error}"
        return
    try:
        microbatches = microbatches_of(arguments, world_size)
        if microbatches < 1 or (limit is not None and not limit > 0):
            return  # said already
        if pp > layers + 2:  # before a search for so many ranks
            yield (
                f"--pipeline-model-parallel-size {pp} needs at least {pp - 2} layers and the model has {layers}: use "
                f"at most {layers + 2}"
            )
            return
        placement = placement_asked(arguments, config, world_size)
    except ValueError as error:
        yield f"--pipeline-schedule {error}"
        return
    try:
        layers_of_stages(arguments, config, placement)
    except ValueError as error:
        flag = "pipeline_model_parallel_size"
        if given:
            flag = "pipeline_layers" if parallel.pipeline_layers else "pipeline_model_parallel_layout"
        text = f"{_flag(flag)}: {error}"
        if given != len(placement) and given % pp == 0 < given:
            text += f", or a --pipeline-schedule with {given // pp} stages a rank, such as " + (
                "1f1b" if given == pp else "interleaved with --num-virtual-stages-per-pipeline-rank"
            )
        yield text
        return
    try:
        schedule_of(arguments, config, microbatches, placement)
    except ValueError as error:
        yield f"--pipeline-schedule {error}"


def _check_not_yet(arguments: Arguments) -> Iterator[str]:
    """Flags whose meaning is fixed (groups, checks) but which the model can't run with yet."""
    if arguments.training.deepspeed_config is not None:
        yield f"--deepspeed-config {arguments.training.deepspeed_config} isn't supported yet: leave it out"


def _check_balance(arguments: Arguments, config: DeepSeekConfig) -> Iterator[str]:
    """What balances experts has experts, and what balances groups of them has groups."""
    model = arguments.model
    given = {name: value for name in (*_BALANCES_EXPERTS, *_BALANCES_GROUPS) if (value := getattr(model, name))}
    if model.moe_token_drop_level == "expert":
        del given["moe_token_drop_level"]
    if not any(config.is_moe_layer(layer) for layer in range(config.num_layers_with_mtp)):
        for name, value in given.items():
            yield f"{_flag(name)} {value} needs experts and no layer of the model has any: leave it out"
    elif config.n_group == 1 or config.topk_method == "greedy":
        for name in filter(given.get, _BALANCES_GROUPS):
            yield (
                f"{_flag(name)} {given[name]} needs groups of experts and the router has none (n_group "
                f"{config.n_group}, topk_method {config.topk_method}): leave it out, or give both in --model's file"
            )
    for name, plain in (("moe_token_drop_policy", "probs"), ("moe_token_drop_level", "expert")):
        if (value := getattr(model, name)) != plain and model.moe_expert_capacity_factor is None:
            yield f"{_flag(name)} {value} needs --moe-expert-capacity-factor: nothing is dropped without it"


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


def _check_batches(arguments: Arguments, config: DeepSeekConfig, world_size: int) -> Iterator[str]:
    training, parallel = arguments.training, arguments.parallel
    tp, cp, longest = (
        parallel.tensor_model_parallel_size,
        parallel.context_parallel_size,
        config.max_position_embeddings,
    )
    model_ranks = tp * parallel.pipeline_model_parallel_size * cp
    micro, whole, length = training.micro_batch_size, training.global_batch_size, training.seq_length
    if min(model_ranks, micro, whole, length) < 1:
        return  # said already
    if world_size % model_ranks == 0:
        dp = world_size // model_ranks
        if whole % (micro * dp):
            yield (
                f"--global-batch-size {whole} isn't a multiple of {micro * dp} = --micro-batch-size {micro} · data "
                f"parallel size {dp}: use {_multiples_around(whole, micro * dp)}, or change the others"
            )
    unit = cp * math.lcm(2, tp) if cp > 1 else tp
    if length % unit and cp > 1:
        parts = f", and --tensor-model-parallel-size {tp} each rank's two of them into {tp} parts" if tp > 1 else ""
        yield (
            f"--seq-length {length} isn't divisible by {unit}, as --context-parallel-size {cp} cuts it into {2 * cp} "
            f"chunks{parts}: use {_multiples_around(length, unit)}, or change these sizes; sequences aren't padded"
        )
    elif length % unit:
        yield (
            f"--seq-length {length} isn't divisible by --tensor-model-parallel-size {tp}, which splits the sequence "
            f"between blocks: use {_multiples_around(length, tp)}"
        )
    if length > longest:
        yield f"--seq-length {length} is beyond the model's max_position_embeddings {longest}: lower it, or raise that"


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


def _check_data(arguments: Arguments) -> Iterator[str]:
    from data.blend import parse_data_path, parse_split  # numpy: a sixth of the time of --help

    data = arguments.data
    if data.tokenizer_model is not None and not Path(data.tokenizer_model).is_file():
        yield (
            f"--tokenizer-model {data.tokenizer_model} doesn't exist: give the SentencePiece model that made the data, "
            "or train one with tools/train_tokenizer.py"
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


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _divisors(number: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)


def _multiples_around(number: int, unit: int) -> str:
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


if __name__ == "__main__":  # WORLD_SIZE FLAGS, of scripts/lib/node.sh: what is wrong is told before ranks start
    from training.command_line import parse

    try:
        asked = parse(sys.argv[2:])
        validate(asked, read_model_config(asked), int(sys.argv[1]), gpus=1)  # ranks know better whether there are any
    except ConfigurationError as mistake:
        sys.exit(str(mistake))
