"""Cross-checks of the layout: whether so many ranks can split this model, its pipeline, its batches and sequences.

Free of torch, as `validate` is, which asks for them. May import model.config and parallel.pipeline. Each check yields
errors that name the numbers and the fix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from training.arguments import Arguments

if TYPE_CHECKING:
    from model.config import DeepSeekConfig


def layout_errors(arguments: Arguments, config: DeepSeekConfig, world_size: int) -> Iterator[str]:
    """Everything wrong with running `arguments` as split over `world_size` ranks."""
    yield from _check_layout(arguments, config, world_size)
    unfit = [*_check_overlap(arguments)]
    yield from unfit
    if unfit:  # the rest of the pipeline is checked as if it weren't asked for
        arguments = arguments.replace(overlap_moe_expert_parallel_comm=False)
    yield from _check_pipeline(arguments, config, world_size)
    yield from _check_batches(arguments, config, world_size)


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
            f": use one of {divisors(config.num_attention_heads)}"
        )
    dense = [layer for layer in range(config.num_hidden_layers) if not config.is_moe_layer(layer)]
    if dense and config.intermediate_size % tp:
        yield (
            f"--tensor-model-parallel-size {tp} doesn't divide the intermediate_size {config.intermediate_size} of the "
            f"model's dense layers: use one of {divisors(config.intermediate_size)}"
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
    fitting = divisors(experts if world_size % pp else math.gcd(stage, experts))
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
    from parallel.pipeline.catalogue import AUTO
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
            yield f"{flag_of(name)} is for --pipeline-schedule auto, not {parallel.pipeline_schedule}: leave it out"
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
        text = f"{flag_of(flag)}: {error}"
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


def _check_overlap(arguments: Arguments) -> Iterator[str]:
    """A forward is run together with a backward where the schedule can, and where that hides something."""
    from parallel.pipeline.catalogue import AUTO, SCHEDULES

    parallel = arguments.parallel
    if not parallel.overlap_moe_expert_parallel_comm:
        return
    if parallel.pipeline_schedule == AUTO or SCHEDULES[parallel.pipeline_schedule].together is None:
        yield (
            "--overlap-moe-expert-parallel-comm is for --pipeline-schedule dualpipe-v, not "
            f"{parallel.pipeline_schedule}: set that, or leave it out"
        )
    elif parallel.expert_model_parallel_size == 1:
        yield (
            "--overlap-moe-expert-parallel-comm hides tokens' way to experts on other ranks, and with "
            "--expert-model-parallel-size 1 none travel: leave it out"
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


def flag_of(name: str) -> str:
    """The flag as it is typed."""
    return "--" + name.replace("_", "-")


def divisors(number: int) -> str:
    """ "1, 2, 4" for 4."""
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)


def _multiples_around(number: int, unit: int) -> str:
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
