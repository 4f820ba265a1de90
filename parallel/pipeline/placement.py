"""Which layers lie on which stage.

Lives here: pure functions over counts. Imports nothing.
"""

from __future__ import annotations


def split_layers(layers: int, stages: int, explicit: tuple[int, ...] | None = None) -> list[range]:
    """Consecutive layer numbers for each stage, every layer once.

    Evenly by default; where it doesn't divide, earlier stages get the extra ones, since the last one also computes the
    head (and multi-token prediction). explicit: the number of layers of each stage. Raises ValueError naming the
    numbers.
    """
    if stages > layers:
        raise ValueError(
            f"pipeline-model-parallel-size {stages} needs at least {stages} layers; the model has {layers}: lower it"
        )
    if explicit is None:
        counts = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    else:
        counts = list(explicit)
        if len(counts) != stages:
            raise ValueError(f"pipeline-layers lists {len(counts)} stages, the pipeline has {stages}")
        if sum(counts) != layers:
            raise ValueError(f"pipeline-layers {counts} adds up to {sum(counts)} layers, the model has {layers}")
        if min(counts) < 1:
            raise ValueError(f"pipeline-layers {counts} leaves stage {counts.index(min(counts))} without a layer")
    first = 0
    split = []
    for count in counts:
        split.append(range(first, first + count))
        first += count
    return split
