"""Schedules as data: legal for every size, as much memory as published, and illegal tables are refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.pipeline.catalogue import make_schedule
from parallel.pipeline.check import check
from parallel.pipeline.one_stage import gpipe, one_f_one_b
from parallel.pipeline.placement import split_layers
from parallel.pipeline.schedule import Action, Kind, Schedule, dependencies, peak_activations


def table(text: str, placement: tuple[int, ...], microbatches: int) -> Schedule:
    """A schedule written down: a line for each rank, actions as they print."""
    rows = []
    for line in text.strip().splitlines():
        row = []
        for word in line.split():
            stage, microbatch = word[1:].split(".")
            row.append(Action(Kind(word[0]), int(stage), int(microbatch)))
        rows.append(tuple(row))
    return Schedule("hand-made", microbatches, placement, tuple(rows))


@pytest.mark.parametrize("ranks", range(1, 17))
def test_schedules_are_legal_and_keep_what_was_published(ranks: int) -> None:
    """GPipe keeps every micro-batch's activations; 1F1B on rank r those of ranks - r (2006.09503, 2104.04473)."""
    # Every number around the ranks', where the tables change shape, and some far beyond.
    for microbatches in (*range(1, 2 * ranks + 2), 37, 64):
        all_forward = make_schedule("gpipe", ranks, microbatches)
        alternating = make_schedule("1f1b", ranks, microbatches)
        check(all_forward)
        check(alternating)
        assert peak_activations(all_forward) == [microbatches] * ranks
        assert peak_activations(alternating) == [min(ranks - rank, microbatches) for rank in range(ranks)]
        if microbatches in (1, ranks, 37):
            check(all_forward.forward_only())
            check(alternating.forward_only())


def test_one_f_one_b_is_the_figure() -> None:
    """2104.04473, figure 4, four ranks: the last alternates from the start, the first runs three ahead."""
    rows = [" ".join(map(str, row)) for row in one_f_one_b(4, 5).actions]
    assert rows == [
        "F0.0 F0.1 F0.2 F0.3 B0.0 F0.4 B0.1 B0.2 B0.3 B0.4",
        "F1.0 F1.1 F1.2 B1.0 F1.3 B1.1 F1.4 B1.2 B1.3 B1.4",
        "F2.0 F2.1 B2.0 F2.2 B2.1 F2.3 B2.2 F2.4 B2.3 B2.4",
        "F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F3.3 B3.3 F3.4 B3.4",
    ]


def test_forward_only_keeps_order_and_drops_backward() -> None:
    for schedule in (one_f_one_b(3, 5), gpipe(3, 5)):
        evaluation = schedule.forward_only()
        assert evaluation.placement == schedule.placement and evaluation.microbatches == 5
        expected = tuple(tuple(Action(Kind.FORWARD, rank, m) for m in range(5)) for rank in range(3))
        assert evaluation.actions == expected


def test_dependencies_are_the_neighbours() -> None:
    split = table("F0.0 F1.0 F2.0 I2.0 W2.0 B1.0 I0.0 W0.0", (0, 0, 0), 1)
    found = {str(action): set(map(str, before)) for action, before in dependencies(split).items()}
    assert found == {
        "F0.0": set(),
        "F1.0": {"F0.0"},
        "F2.0": {"F1.0"},
        "I2.0": {"F2.0"},
        "W2.0": {"I2.0"},
        "B1.0": {"F1.0", "I2.0"},
        "I0.0": {"F0.0", "B1.0"},
        "W0.0": {"I0.0"},
    }


LEGAL = """
F0.0 F0.1 B0.0 B0.1
F1.0 B1.0 F1.1 B1.1
"""


@pytest.mark.parametrize(
    "text, placement, words",
    [
        ("F0.0 F0.1 B0.0 B0.1 F0.1\nF1.0 B1.0 F1.1 B1.1", (0, 1), "rank 0 runs F0.1 twice"),
        ("F0.0 F0.1 B0.0 B0.1\nF1.0 B1.0 F1.1", (0, 1), "rank 1 never runs B1.1"),
        ("F0.0 F0.1 B0.0 B0.1 F1.1\nF1.0 B1.0 F1.1 B1.1", (0, 1), "rank 0 runs F1.1, which is not its own"),
        ("F0.0 F0.1 B0.0 B0.1\nF1.0 B1.0 F1.1 B1.1 F1.2", (0, 1), "rank 1 runs F1.2, which is not its own"),
        # Each waits for what the other does later.
        ("F0.0 B0.0 F0.1 B0.1\nF1.0 F1.1 B1.0 B1.1", (0, 1), "deadlocks: rank 0 at B0.0; rank 1 at F1.1"),
        ("B0.0 F0.0 F0.1 B0.1\nF1.0 B1.0 F1.1 B1.1", (0, 1), "deadlocks: rank 0 at B0.0; rank 1 at F1.0"),
        # All dependencies hold, but messages overtake each other: activations here, gradients in the next.
        ("F0.0 F0.1 B0.0 B0.1\nF1.1 F1.0 B1.0 B1.1", (0, 1), "rank 0 sends activations to rank 1 in another order"),
        ("F0.0 F0.1 B0.1 B0.0\nF1.0 F1.1 B1.0 B1.1", (0, 1), "rank 1 sends gradients to rank 0 in another order"),
        # Two stages a rank share the edge between their ranks: each stage's messages in order isn't enough.
        (
            "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1\nF1.0 F3.0 F1.1 F3.1 B3.0 B3.1 B1.0 B1.1",
            (0, 1, 0, 1),
            "rank 0 sends activations to rank 1 in another order",
        ),
        (
            "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1\nF1.0 F1.1 F3.1 F3.0 B3.0 B3.1 B1.0 B1.1",
            (0, 1, 0, 1),
            "rank 0 sends activations to rank 1 in another order",
        ),
        # A stage on a rank that isn't there would otherwise be left out by everyone.
        ("F0.0 F0.1\nF1.0 F1.1", (0, 1, 2), "stage 2 lies on rank 2, the table has 2 ranks"),
    ],
)
def test_illegal_tables_are_refused_by_rank_and_action(text: str, placement: tuple[int, ...], words: str) -> None:
    check(table(LEGAL, (0, 1), 2))
    with pytest.raises(ValueError) as error:
        check(table(text, placement, 2))
    assert words in str(error.value)


def test_v_shaped_tables_are_legal() -> None:
    """Stages 0 and 3 on rank 0, 1 and 2 on rank 1: stages on one rank pass on without a message."""
    text = """
    F0.0 F0.1 F3.0 B3.0 F3.1 B3.1 B0.0 B0.1
    F1.0 F2.0 F1.1 F2.1 B2.0 B1.0 B2.1 B1.1
    """
    schedule = table(text, (0, 1, 1, 0), 2)
    check(schedule)
    assert schedule.stages_of(0) == (0, 3) and schedule.stages_of(1) == (1, 2)
    assert peak_activations(schedule) == [1.5, 2]


@pytest.mark.parametrize("name, ranks, microbatches, words", [
    ("zigzag", 2, 2, "'zigzag' is unknown: choose one of 1f1b, dualpipe-v, gpipe"),
    ("1f1b", 0, 2, "1f1b needs at least 1 pipeline rank, got 0: use 1"),
    ("zb-v", 3, 0, "zb-v on 3 ranks needs at least 1 micro-batch, got 0: use 1, or 6"),
])  # fmt: skip
def test_unknown_names_and_empty_pipelines_are_refused(name: str, ranks: int, microbatches: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_schedule(name, ranks, microbatches)


@given(st.integers(1, 100), st.integers(1, 100))
def test_every_layer_lies_on_one_stage(layers: int, stages: int) -> None:
    if stages > layers:
        with pytest.raises(ValueError, match=f"needs at least {stages} layers; the model has {layers}"):
            split_layers(layers, stages)
        return
    split = split_layers(layers, stages)
    assert len(split) == stages
    assert [layer for part in split for layer in part] == list(range(layers))
    counts = [len(part) for part in split]
    # Even, and the last stages, which also compute the head, get no more than the first.
    assert max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_an_explicit_list_is_followed(counts: list[int]) -> None:
    split = split_layers(sum(counts), len(counts), tuple(counts))
    assert [len(part) for part in split] == counts
    assert [layer for part in split for layer in part] == list(range(sum(counts)))


@pytest.mark.parametrize(
    "explicit, words",
    [
        ((3, 4), "lists 2 stages, the pipeline has 3"),
        ((3, 3, 2), "adds up to 8 layers, the model has 7"),
        ((4, 0, 3), "leaves stage 1 without a layer"),
        ((9, -1, -1), "leaves stage 1 without a layer"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(explicit: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split_layers(7, 3, explicit)
