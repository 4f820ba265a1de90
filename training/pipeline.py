"""What the flags say about the pipeline: its table, and which layers lie on which stage.

Lives here: pure functions of arguments and the model's configuration, used by the checks before a run, the engine and
the trainer. Imports `parallel.pipeline`, `model.config` and `model.flops`; no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from model.config import DeepSeekConfig
from model.flops import PartFlops, forward_flops
from parallel.pipeline.catalogue import AUTO, placement_of
from parallel.pipeline.make import make_schedule
from parallel.pipeline.placement import (
    ModelCosts,
    as_ranges,
    balanced,
    check_counts,
    layers_of_layout,
    stages_of_layout,
)
from parallel.pipeline.schedule import Schedule
from parallel.pipeline.simulate import ShareCosts
from training.arguments import Arguments


def microbatches_of(arguments: Arguments, world_size: int) -> int:
    """Micro-batches of one step on each data-parallel rank."""
    parallel, training = arguments.parallel, arguments.training
    model_ranks = (
        parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    )
    return training.global_batch_size * model_ranks // (training.micro_batch_size * world_size)


def schedule_of(
    arguments: Arguments, config: DeepSeekConfig, microbatches: int, placement: tuple[int, ...] | None = None
) -> Schedule:
    """The table for a step of so many micro-batches; the same on every rank.

    placement: the rank of each stage, where that is settled already (`auto` may otherwise choose). Raises ValueError
    where the schedule can't have these numbers.
    """
    parallel = arguments.parallel
    ranks, chunks = parallel.pipeline_model_parallel_size, parallel.num_virtual_stages_per_pipeline_rank
    if parallel.pipeline_schedule != AUTO:
        together = parallel.overlap_moe_expert_parallel_comm
        return make_schedule(parallel.pipeline_schedule, ranks, microbatches, chunks, together=together)
    if chunks is None and (stages := stages_given(arguments)):
        chunks = max(1, stages // ranks)
    search = partial(
        make_schedule,
        AUTO,
        ranks,
        microbatches,
        costs=share_costs(arguments, config),
        memory_limit=parallel.pipeline_memory_limit,
    )
    found = search(chunks=chunks, most_stages=config.num_hidden_layers)
    return found if placement in (None, found.placement) else search(placement=placement)


def placement_asked(arguments: Arguments, config: DeepSeekConfig, world_size: int) -> tuple[int, ...]:
    """The rank of each stage under the schedule that the flags name."""
    parallel = arguments.parallel
    if parallel.pipeline_schedule == AUTO:
        return schedule_of(arguments, config, microbatches_of(arguments, world_size)).placement
    return placement_of(
        parallel.pipeline_schedule,
        parallel.pipeline_model_parallel_size,
        parallel.num_virtual_stages_per_pipeline_rank,
    )


def stages_given(arguments: Arguments) -> int:
    """How many stages --pipeline-layers or the layout has; 0 where neither is given."""
    layout = arguments.parallel.pipeline_model_parallel_layout
    return len(arguments.parallel.pipeline_layers) if layout is None else len(stages_of_layout(layout))


def share_costs(arguments: Arguments, config: DeepSeekConfig) -> ShareCosts:
    """--pipeline-costs, or what follows from the model's operations: times of one rank's share, forward = 1.

    A product costs as much in each of the three passes; attention has no weights, and twice as much to do backward.
    Full recomputation adds the forward pass to the input gradient.
    """
    given = arguments.parallel.pipeline_costs
    if given:
        return ShareCosts(*given)
    flops = forward_flops(config, arguments.training.seq_length)
    parts = (*flops.layers, *flops.last)
    products, attention = sum(part.products for part in parts), sum(part.attention for part in parts)
    forward = products + attention
    again = forward if arguments.training.recompute_granularity == "full" else 0.0
    return ShareCosts(1.0, (products + 2 * attention + again) / forward, products / forward)


def layers_of_stages(arguments: Arguments, config: DeepSeekConfig, placement: tuple[int, ...]) -> tuple[int, ...]:
    """How many layers each stage has: as --pipeline-layers or the layout says, else balanced by operations.

    Raises ValueError where what is given doesn't fit the model or the pipeline.
    """
    parallel, stages = arguments.parallel, len(placement)
    if parallel.pipeline_model_parallel_layout is not None:
        layout = parallel.pipeline_model_parallel_layout
        return layers_of_layout(layout, stages, config.num_hidden_layers, config.num_mtp_layers)
    if parallel.pipeline_layers:
        what = f"the list {','.join(map(str, parallel.pipeline_layers))}"
        check_counts(parallel.pipeline_layers, config.num_hidden_layers, stages, what)
        return parallel.pipeline_layers
    return balanced(model_costs(config, arguments.training.seq_length), placement)


def model_costs(config: DeepSeekConfig, seq_length: int) -> ModelCosts:
    """What layers, head and MTP cost a token, in forward operations; looking up in the embedding costs none."""
    flops = forward_flops(config, seq_length)

    def cost(part: PartFlops) -> float:
        return part.products + part.attention

    return ModelCosts(tuple(map(cost, flops.layers)), 0.0, sum(map(cost, flops.last)))


def stages_in_words(placement: Sequence[int], layer_counts: Sequence[int], mtp_layers: int) -> str:
    """Which layers lie on which stage, and the stage on which pipeline rank, in one line.

    placement: the rank of each stage; layer_counts: layers of each stage; mtp_layers: beside the head, of the last one.
    """
    stages = []
    for stage, (rank, layers) in enumerate(zip(placement, as_ranges(layer_counts), strict=True)):
        parts = ["embedding"] if stage == 0 else []
        if len(layers) > 1:
            parts.append(f"layers {layers[0]} to {layers[-1]}")
        else:
            parts.append(f"layer {layers[0]}" if layers else "no layers")
        if stage == len(placement) - 1:
            parts.append("head")
            parts += [f"{mtp_layers} MTP layer{'s' * (mtp_layers > 1)}"] if mtp_layers else []
        stages.append(f"{stage} on pipeline rank {rank}: {', '.join(parts)}")
    return f"stages: {' | '.join(stages)}"
