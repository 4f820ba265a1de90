"""Layers on stages: every layer once, no stage without work, Megatron's layout text, a fair share for every rank."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.config import DeepSeekConfig
from parallel.pipeline.catalogue import placement_of
from parallel.pipeline.placement import (
    ModelCosts,
    as_ranges,
    balanced,
    check_counts,
    layers_of_layout,
    stage_costs,
)
from training.pipeline import model_costs

V = (0, 1, 1, 0)


def busiest(counts: tuple[int, ...], costs: ModelCosts, placement: tuple[int, ...]) -> float:
    by_rank = [0.0] * (max(placement) + 1)
    for rank, cost in zip(placement, stage_costs(counts, costs), strict=True):
        by_rank[rank] += cost
    return max(by_rank)


@given(st.integers(1, 60), st.integers(1, 24))
def test_every_layer_lies_on_one_stage(layers: int, stages: int) -> None:
    costs = ModelCosts((1.0,) * layers, 0.0, 0.0)
    if layers < stages - 2:
        with pytest.raises(
            ValueError, match=f"{stages} pipeline stages need .* has {layers}: with 1 .* use at most {layers + 2}"
        ):
            balanced(costs, range(stages))
        return
    counts = balanced(costs, range(stages))
    check_counts(counts, layers, stages, "balanced")
    assert [layer for part in as_ranges(counts) for layer in part] == list(range(layers))
    if layers >= stages:
        assert max(counts) - min(counts) <= 1, "equal layers are spread evenly"


@given(
    st.lists(st.sampled_from([1.0, 2.0, 3.5]), min_size=4, max_size=9),
    st.floats(0, 4),
    st.floats(0, 8),
    st.sampled_from([(0, 1), (0, 1, 2), (0, 1, 2, 3), V, (0, 1, 0, 1)]),
)
def test_no_other_split_makes_the_busiest_rank_much_less_busy(
    layers: list[float], first: float, last: float, placement: tuple[int, ...]
) -> None:
    """Against all splits there are. One layer at a time finds the best but for a rest below the largest layer."""
    costs, stages = ModelCosts(tuple(layers), first, last), len(placement)
    least = [0 if stage in (0, stages - 1) else 1 for stage in range(stages)]
    splits = itertools.product(*(range(low, len(layers) + 1) for low in least))
    best = min(busiest(split, costs, placement) for split in splits if sum(split) == len(layers))
    assert busiest(balanced(costs, placement), costs, placement) <= best + max(layers)


def test_equal_layers_are_balanced_as_well_as_any_split_could() -> None:
    for layers, last in itertools.product(range(4, 12), (0.0, 0.7, 1.0, 2.5, 5.0)):
        for placement in ((0, 1), (0, 1, 2, 3), V, (0, 1, 0, 1)):
            costs, stages = ModelCosts((1.0,) * layers, 0.0, last), len(placement)
            splits = itertools.product(
                *([range(layers + 1)] + [range(1, layers + 1)] * (stages - 2) + [range(layers + 1)])
            )
            best = min(busiest(split, costs, placement) for split in splits if sum(split) == layers)
            assert busiest(balanced(costs, placement), costs, placement) == pytest.approx(best)


@pytest.mark.parametrize("schedule, ranks", [("1f1b", 16), ("zb-v", 16), ("interleaved", 8)])
def test_deepseek_v3s_head_and_mtp_weigh_as_layers_do(schedule: str, ranks: int) -> None:
    """61 layers, the head and MTP: the last stage gets fewer layers, and no rank has a tenth more than the mean."""
    config = DeepSeekConfig.from_file("configs/models/deepseek_v3.json")
    costs, placement = model_costs(config, 4096), placement_of(schedule, ranks)
    counts = balanced(costs, placement)
    even = balanced(ModelCosts((1.0,) * 61, 0.0, 0.0), placement)
    mean = (sum(costs.layers) + costs.last) / ranks
    assert counts[-1] < even[-1]
    assert busiest(counts, costs, placement) < busiest(even, costs, placement)
    granularity = max(costs.layers)
    assert busiest(counts, costs, placement) <= mean + granularity


@pytest.mark.parametrize("counts, words", [
    ((3, 4), "x names 2 stages and the pipeline has 3: give 3"),
    ((3, 3, 2), "x adds up to 8 layers and the model has 7: take 1 away"),
    ((4, 0, 3), "x leaves stage 1 with 0 layers: give it at least 1"),
    ((-1, 4, 4), "x leaves stage 0 with -1 layers: give it at least 0"),
])  # fmt: skip
def test_counts_that_do_not_fit_are_refused(counts: tuple[int, ...], words: str) -> None:
    check_counts((0, 7, 0), 7, 3, "x")
    with pytest.raises(ValueError) as error:
        check_counts(counts, 7, 3, "x")
    assert str(error.value) == words


@pytest.mark.parametrize("text, stages, layers, mtp, counts", [
    ("Et|tt|tL", 3, 4, 0, (1, 2, 1)),
    ("E|t*3|L", 3, 3, 0, (0, 3, 0)),
    ("Et*3|(tt|)*29,mL", 31, 61, 1, (3, *[2] * 29, 0)),
    ("E t | ((t|)*2, tt|)*2 Lm", 8, 9, 1, (1, 1, 1, 2, 1, 1, 2, 0)),
    ("EttmmL", 1, 2, 2, (2,)),
])  # fmt: skip
def test_megatrons_layout_text_is_read(text: str, stages: int, layers: int, mtp: int, counts: tuple[int, ...]) -> None:
    assert layers_of_layout(text, stages, layers, mtp) == counts


@pytest.mark.parametrize("text, words", [
    ("Et|t|t", "has 0 L, for the head, and the model 1"),
    ("Et|tL|t", "has L in stage 1: here the last stage has it"),
    ("t|Et|tL", "has E in stage 1: here the first stage has it"),
    ("Et|tm|tL", "has m in stage 1: here the last stage has it, since MTP shares the head"),
    ("Et||ttL", "leaves stage 1 empty: give it a layer (t)"),
    ("Et|tt|L", "has 0 m, for the MTP layers, and the model 1"),
    ("Et|tt|mL", "adds up to 3 layers and the model has 4: add 1"),
    ("Et|tttmL", "names 2 stages and the pipeline has 3"),
    ("Et|tt|tmLt", "in another order than the model"),
    ("Et|tx|tL", "has 'x': it is made of E, t, m, L"),
    ("Et|(t|*2tmL", "has '('"),
    ("Et|(t|)*2mmL", "has 2 m"),
])  # fmt: skip
def test_layouts_that_do_not_fit_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError) as error:
        layers_of_layout(text, 3, 4, 1)
    assert words in str(error.value)
