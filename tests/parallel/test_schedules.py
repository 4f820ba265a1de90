"""Tables as data: some written out as in their papers, and illegal ones are refused by rank and action."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from parallel.pipeline import check as check_module
from parallel.pipeline.catalogue import placement_of
from parallel.pipeline.check import check
from parallel.pipeline.make import make_schedule
from parallel.pipeline.messages import plan_messages
from parallel.pipeline.one_stage import gpipe, one_f_one_b
from parallel.pipeline.schedule import Action, Kind, Schedule, dependencies, peak_activations
from parallel.pipeline.simulate import Costs, ShareCosts, simulate


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


def test_one_f_one_b_keeps_less_on_later_ranks() -> None:
    """On rank r the activations of ranks - r micro-batches (2006.09503); GPipe all of them on every rank."""
    for microbatches in range(1, 12):
        assert peak_activations(one_f_one_b(5, microbatches)) == [min(5 - rank, microbatches) for rank in range(5)]
        assert peak_activations(gpipe(5, microbatches)) == [microbatches] * 5


def test_one_f_one_b_is_the_figure() -> None:
    """2104.04473, figure 4, four ranks: the last alternates from the start, the first runs three ahead."""
    rows = [" ".join(map(str, row)) for row in one_f_one_b(4, 5).actions]
    assert rows == [
        "F0.0 F0.1 F0.2 F0.3 B0.0 F0.4 B0.1 B0.2 B0.3 B0.4",
        "F1.0 F1.1 F1.2 B1.0 F1.3 B1.1 F1.4 B1.2 B1.3 B1.4",
        "F2.0 F2.1 B2.0 F2.2 B2.1 F2.3 B2.2 F2.4 B2.3 B2.4",
        "F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F3.3 B3.3 F3.4 B3.4",
    ]


WRITTEN_OUT = [
    # 2401.10241, figure 2: W is delayed on later ranks, and fills the end.
    ("zb-h1", 4, 5, """
    F0.0 F0.1 F0.2 F0.3 I0.0 W0.0 F0.4 I0.1 W0.1 I0.2 W0.2 I0.3 W0.3 I0.4 W0.4
    F1.0 F1.1 F1.2 I1.0 F1.3 I1.1 W1.0 F1.4 I1.2 W1.1 I1.3 W1.2 I1.4 W1.3 W1.4
    F2.0 F2.1 I2.0 F2.2 I2.1 F2.3 I2.2 W2.0 F2.4 I2.3 W2.1 I2.4 W2.2 W2.3 W2.4
    F3.0 I3.0 F3.1 I3.1 F3.2 I3.2 F3.3 I3.3 W3.0 F3.4 I3.4 W3.1 W3.2 W3.3 W3.4
    """),
    ("zb-h2", 2, 4, """
    F0.0 F0.1 F0.2 I0.0 W0.0 F0.3 I0.1 W0.1 I0.2 W0.2 I0.3 W0.3
    F1.0 I1.0 F1.1 I1.1 F1.2 I1.2 W1.0 F1.3 I1.3 W1.1 W1.2 W1.3
    """),
    # 2104.04473, figure 4: a group of two micro-batches through both stages of a rank, then the next group.
    ("interleaved", 2, 4, """
    F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3
    F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3
    """),
    # The same without its last micro-batch.
    ("interleaved", 2, 3, """
    F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 B2.1 F2.2 B0.0 B0.1 B2.2 B0.2
    F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 B1.1 F3.2 B3.2 B1.2
    """),
    ("zb-v", 2, 3, """
    F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 F3.2 I3.2 W3.2 I0.1 W0.1 I0.2 W0.2
    F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 W2.1 I1.1 I2.2 I1.2 W1.1 W2.2 W1.2
    """),
    ("dualpipe-v", 2, 4, """
    F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 F0.3 B3.1 F3.2 B0.0 B3.2 F3.3 B0.1 B3.3 I0.2 W0.2 I0.3 W0.3
    F1.0 F2.0 F1.1 F2.1 F1.2 B2.0 F2.2 B1.0 F1.3 B2.1 F2.3 B1.1 B2.2 B1.2 I2.3 I1.3 W2.3 W1.3
    """),
]  # fmt: skip


@pytest.mark.parametrize("name, ranks, microbatches, text", WRITTEN_OUT)
def test_tables_are_the_ones_of_their_papers(name: str, ranks: int, microbatches: int, text: str) -> None:
    made = make_schedule(name, ranks, microbatches)
    assert made.actions == table(text, made.placement, microbatches).actions


def test_v_min_runs_a_rank_a_cell() -> None:
    """2405.15362: as long as nothing repeats, every wave goes down the V and up again without a wait."""
    made = make_schedule("v-min", 4, 1)
    times = simulate(made, Costs.even(made.placement, ShareCosts(2, 2, 2)))
    cells = {
        str(action): span.start
        for row, spans in zip(made.actions, times.spans, strict=True)
        for action, span in zip(row, spans, strict=True)
    }
    assert [cells[f"F{stage}.0"] for stage in range(8)] == list(range(8))
    assert [cells[f"I{stage}.0"] for stage in range(8)] == list(range(15, 7, -1))


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
        # A split backward pass: W before I, one half without the other, whole and split at once.
        ("F0.0 F0.1 W0.0 I0.0 B0.1\nF1.0 B1.0 F1.1 B1.1", (0, 1), "deadlocks: rank 0 at W0.0"),
        ("F0.0 F0.1 I0.0 B0.1\nF1.0 B1.0 F1.1 B1.1", (0, 1), "rank 0 never runs W0.0"),
        ("F0.0 F0.1 B0.0 B0.1\nF1.0 W1.0 F1.1 B1.1", (0, 1), "rank 1 never runs I1.0"),
        ("F0.0 F0.1 B0.0 I0.0 W0.0 B0.1\nF1.0 B1.0 F1.1 B1.1", (0, 1), "rank 0 runs B0.0, which is not its own"),
        ("F0.0 F0.1 B0.0 B0.1 W0.1\nF1.0 B1.0 F1.1 B1.1", (0, 1), "rank 0 never runs I0.1"),
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


def test_a_table_that_needs_buffered_sends_is_refused() -> None:
    """It runs where a send is over at once; on NCCL the send of F0.0 waits for a receive behind that of F0.1."""
    overtaking = table("F0.0 F0.1 B0.1 B0.0\nF1.1 B1.1 F1.0 B1.0", (0, 1), 2)
    assert simulate(overtaking, Costs.even((0, 1), ShareCosts())).makespan > 0
    with pytest.raises(ValueError, match="rank 0 sends activations to rank 1 in another order than they are received"):
        check(overtaking)


def test_a_broken_promise_of_memory_is_refused() -> None:
    promised = replace(gpipe(2, 3), promised_peak=2)
    with pytest.raises(ValueError, match="rank 0 keeps 3 micro-batches' activations, 2 were promised"):
        check(promised)


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


@pytest.mark.parametrize("name, ranks, microbatches, chunks, words", [
    ("zigzag", 2, 2, None, "'zigzag' is unknown: choose one of 1f1b, auto, dualpipe-v, gpipe"),
    ("1f1b", 0, 2, None, "1f1b needs at least 1 pipeline rank, got 0: use 1"),
    ("zb-v", 3, 0, None, "zb-v on 3 ranks needs at least 1 micro-batch, got 0: use 1, or 6"),
    ("dualpipe-v", 4, 8, 3, "dualpipe-v has 2 stages a rank, not 3: use interleaved"),
    ("zb-h1", 4, 8, 2, "zb-h1 has 1 stage a rank, not 2"),
    ("interleaved", 4, 8, 0, "interleaved needs at least 1 stage a rank, got 0: use 1"),
])  # fmt: skip
def test_settings_that_do_not_fit_are_refused(
    name: str, ranks: int, microbatches: int, chunks: int | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make_schedule(name, ranks, microbatches, chunks)
    if microbatches:
        with pytest.raises(ValueError, match=words):
            placement_of(name, ranks, chunks)


def test_sends_that_would_hold_each_other_up_are_refused() -> None:
    """With receives posted only when they're needed, 1F1B's crossing messages would wait for each other."""
    schedule = make_schedule("1f1b", 2, 4)
    plans = plan_messages(schedule)
    check_module._check_sends(schedule, plans)
    late = []
    for plan, row in zip(plans, schedule.actions, strict=True):
        posts = tuple((i,) if i in plan.received else () for i in range(len(row)))
        late.append(dataclasses.replace(plan, posts=posts))
    with pytest.raises(
        ValueError, match="1f1b needs sends that are buffered, or deadlocks: rank 0 at F0.1; rank 1 at B1.0"
    ):
        check_module._check_sends(schedule, tuple(late))


def test_any_number_of_chunks_keeps_what_it_promises() -> None:
    """Sums of elevenths, too, which no float holds exactly."""
    for ranks, chunks in ((7, 11), (13, 11), (3, 7)):
        check(make_schedule("interleaved", ranks, 2 * ranks, chunks))
