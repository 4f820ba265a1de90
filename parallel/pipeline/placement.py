"""Which layers lie on which stage: by hand, by Megatron-LM's layout text, or balanced by cost.

Lives here: pure functions over counts and costs. Imports nothing of ours. The first stage has the embedding besides its
layers, the last one the head and multi-token prediction; these two may go without layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

MOST_LETTERS = 10_000
"""Of a layout written out: more than any model has parts."""


class ModelCosts(NamedTuple):
    """What the parts of a model cost a step, in any one unit; `last`: head, loss and multi-token prediction."""

    layers: tuple[float, ...]
    first: float
    last: float


def stage_costs(counts: Sequence[int], costs: ModelCosts) -> list[float]:
    """The cost of each stage with so many layers."""
    found = [sum(costs.layers[part.start : part.stop]) for part in as_ranges(counts)]
    found[0] += costs.first
    found[-1] += costs.last
    return found


def as_ranges(counts: Sequence[int]) -> list[range]:
    """The consecutive layer numbers of each stage."""
    ranges, first = [], 0
    for count in counts:
        ranges.append(range(first, first + count))
        first += count
    return ranges


def check_counts(counts: Sequence[int], layers: int, stages: int, what: str) -> None:
    """Raise ValueError, naming the numbers and what to change, unless every layer lies on one stage and none is empty.

    what: how the counts were given, such as "--pipeline-layers 2,1,1".
    """
    if len(counts) != stages:
        named = f"{len(counts)} stage{'s' * (len(counts) != 1)}"
        raise ValueError(f"{what} names {named} and the pipeline has {stages}: give {stages}")
    for stage, count in enumerate(counts):
        if count < (least := _fewest(stage, stages)):
            raise ValueError(f"{what} leaves stage {stage} with {count} layers: give it at least {least}")
    if sum(counts) != layers:
        change = layers - sum(counts)
        raise ValueError(
            f"{what} adds up to {sum(counts)} layers and the model has {layers}: "
            + (f"add {change}" if change > 0 else f"take {-change} away")
        )


def _fewest(stage: int, stages: int) -> int:
    """The fewest layers of a stage: the ends have other things to do."""
    return 1 if 0 < stage < stages - 1 or stages == 1 else 0


def balanced(costs: ModelCosts, placement: Sequence[int]) -> tuple[int, ...]:
    """Layers of each stage such that the busiest rank has as little to do as can be, then the busiest stage.

    placement: the rank of each stage. Starts from an even split and moves one layer at a time from a stage of the
    busiest rank, or the busiest stage, to another as long as that helps. Raises ValueError where there are fewer layers
    than stages that need one.
    """
    stages, layers = len(placement), len(costs.layers)
    needed, held = max(stages - 2, 1), stages // len(set(placement))
    if layers < needed:
        raise ValueError(
            f"{stages} pipeline stages need at least {needed} layers and the model has {layers}: with {held} of them "
            f"on a rank use at most {max(1, (layers + 2) // held)} pipeline ranks, or fewer stages on each"
        )
    counts = [_fewest(stage, stages) for stage in range(stages)]
    for _ in range(layers - sum(counts)):
        counts[counts.index(min(counts))] += 1

    def badness(counts: Sequence[int]) -> tuple[float, float, float]:
        by_stage = stage_costs(counts, costs)
        by_rank = [0.0] * (max(placement) + 1)
        for rank, cost in zip(placement, by_stage, strict=True):
            by_rank[rank] += cost
        # Rounded: sums of equal layers in another order must not look like progress.
        squares = sum(cost * cost for cost in (*by_rank, *by_stage))
        return tuple(float(f"{x:.9g}") for x in (max(by_rank), max(by_stage), squares))  # type: ignore[return-value]

    while True:
        best, found = badness(counts), counts
        for source in range(stages):
            if counts[source] == _fewest(source, stages):
                continue
            for target in range(stages):
                moved = list(counts)
                moved[source] -= 1
                moved[target] += 1
                if source != target and (worth := badness(moved)) < best:
                    best, found = worth, moved
        if found is counts:
            return tuple(counts)
        counts = found


def layers_of_layout(text: str, stages: int, layers: int, mtp_layers: int) -> tuple[int, ...]:
    """The layers of each stage from Megatron-LM's --pipeline-model-parallel-layout, such as "Et*3|(tt|)*28,mL".

    E is the embedding, t a layer, m an MTP layer, L the head with the loss; | ends a stage, *n repeats the letter or
    the group in parentheses before it, commas mean nothing. Raises ValueError naming what is wrong, with numbers.
    """
    what = f"the layout {text!r}"
    parts = stages_of_layout(text)
    for stage, part in enumerate(parts):
        if not part:
            raise ValueError(f"{what} leaves stage {stage} empty: give it a layer (t)")
        for letter, only, where in (("E", 0, "first"), ("L", len(parts) - 1, "last"), ("m", len(parts) - 1, "last")):
            if letter in part and stage != only:
                raise ValueError(
                    f"{what} has {letter} in stage {stage}: here the {where} stage has it"
                    + (", since MTP shares the head" if letter == "m" else "")
                )
    for letter, wanted, meaning in (("E", 1, "embedding"), ("L", 1, "head"), ("m", mtp_layers, "MTP layers")):
        if (count := sum(part.count(letter) for part in parts)) != wanted:
            raise ValueError(f"{what} has {count} {letter}, for the {meaning}, and the model {wanted}")
    if not re.fullmatch("E?t*[mL]*", parts[0]) or not re.fullmatch("E?t*[mL]*", parts[-1]):
        raise ValueError(f"{what} has its letters in another order than the model: E, then t, then m and L")
    counts = tuple(part.count("t") for part in parts)
    check_counts(counts, layers, stages, what)
    return counts


def stages_of_layout(text: str) -> list[str]:
    """The layout's stages, with repetitions written out: "Et|(t|)*2tL" as Et, t, t, tL.

    Raises ValueError for anything it isn't made of.
    """
    rest = re.sub(r"[\s,]", "", text)
    while found := re.search(r"\(([^()]*)\)(?:\*([0-9]+))?|([EtmL|])\*([0-9]+)", rest):
        group, times, letter, letter_times = found.groups()
        repeated, count = (group, int(times or 1)) if letter is None else (letter, int(letter_times))
        if len(rest) + len(repeated) * count > MOST_LETTERS:
            raise ValueError(f"the layout {text!r} has more than {MOST_LETTERS} parts: repeat fewer")
        rest = rest[: found.start()] + repeated * count + rest[found.end() :]
    if strange := re.search(r"[^EtmL|]", rest):
        raise ValueError(f"the layout {text!r} has {strange[0]!r}: it is made of E, t, m, L, |, (...) and *n")
    return rest.split("|")
