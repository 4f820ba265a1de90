"""Pictures of time lines: every action is in them, as wide as it is long, and texts fit. Pixels aren't compared."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from parallel.pipeline.catalogue import SCHEDULES
from parallel.pipeline.make import make_schedule
from parallel.pipeline.plot import cells, columns_of, draw_text, right_edge
from parallel.pipeline.plot_png import draw_figure, draw_png
from parallel.pipeline.schedule import Action, Kind
from parallel.pipeline.simulate import Costs, ShareCosts, Span, Timeline, simulate

ANSI = re.compile(r"\x1b\[[\d;]*m")
SIZES = [(name, 4, 8) for name in SCHEDULES] + [("zb-v", 8, 32), ("1f1b", 1, 1), ("interleaved", 11, 13)]


def timeline_of(name: str, ranks: int, microbatches: int, chunks: int | None = None, send: float = 0.0) -> Timeline:
    schedule = make_schedule(name, ranks, microbatches, chunks)
    return simulate(schedule, Costs.even(schedule.placement, ShareCosts(send=send)))


def shaken(timeline: Timeline, seed: int) -> Timeline:
    """As if measured: every action takes its own time, and the first one doesn't start at 0."""
    draw = random.Random(seed)
    now, spans = draw.random(), []
    for row in timeline.spans:
        moved = []
        for span in row:
            now += draw.random() * 0.3
            moved.append(Span(now, now := now + draw.uniform(0.05, 2.0) * (span.end - span.start)))
        spans.append(tuple(moved))
        now = draw.random()
    return Timeline(timeline.schedule, tuple(spans))


def rows_of(drawn: str) -> list[str]:
    return [line.split(maxsplit=2)[2] for line in drawn.splitlines() if re.match(r"rank \d+ +[.A-Za-z]", line)]


@pytest.mark.parametrize(("name", "ranks", "microbatches"), SIZES)
def test_every_action_is_drawn_once_with_its_time(name: str, ranks: int, microbatches: int) -> None:
    timeline = shaken(timeline_of(name, ranks, microbatches), seed=ranks)
    first = min(span.start for row in timeline.spans for span in row)
    for rank, row in enumerate(cells(timeline)):
        stages = timeline.schedule.stages_of(rank)
        drawn = [Action(cell.kind, stages[cell.chunk], cell.microbatch) for cell in row]
        assert drawn == list(timeline.schedule.actions[rank])
        for cell, span in zip(row, timeline.spans[rank], strict=True):
            assert (cell.start + first, cell.end + first) == pytest.approx(span)


def test_columns_are_proportional_to_time() -> None:
    draw = random.Random(5)
    now, spans = 0.0, []
    for _ in range(200):
        now += draw.choice([0.0, draw.random()])
        spans.append(Span(now, now := now + draw.uniform(0.2, 3.0)))
    per_column = 0.2
    shown = columns_of(spans, per_column, round(now / per_column) + 1)
    for place, span in enumerate(spans):
        assert abs(shown.count(place) - (span.end - span.start) / per_column) <= 1.001, (place, span)
    there = [place for place in shown if place is not None]
    assert there == sorted(there)  # each in one piece, in order


def test_an_action_of_one_column_is_seen_wherever_it_starts() -> None:
    for offset in (0.0, 0.25, 0.5, 0.7):
        spans = [Span(i + offset, i + 1 + offset) for i in range(30)]
        assert set(columns_of(spans, 1.0, 31)) >= set(range(30))


def test_a_small_table_is_drawn_as_by_hand() -> None:
    lines = draw_text(timeline_of("1f1b", 2, 3), width=72).splitlines()
    assert lines[:4] == [
        "1f1b: 2 ranks, 3 micro-batches, makespan 12, idle 25.0% (within spans",
        "14.3%), peak memory 2",
        "rank 0 F0---F1---..........B0--------F2---B1--------.....B2--------",
        "rank 1 .....F0---B0--------F1---B1--------F2---B2--------..........",
    ]
    assert re.findall(r"\d+", lines[4]) == ["0", "2", "4", "6", "8", "10"]
    assert [lines[4].index(f" {number}") + 1 - len("rank 0 ") for number in (2, 10)] == [10, 50]


@pytest.mark.parametrize("name", ["zb-v", "1f1b", "zb-h1", "v-half"])
def test_with_room_every_action_is_legible_without_colour(name: str) -> None:
    timeline = timeline_of(name, 3, 5, send=0.3)
    for rank, row in enumerate(rows_of(draw_text(timeline, width=400))):
        stages = timeline.schedule.stages_of(rank)
        read = [
            Action(Kind(letter.upper()), stages[letter.islower()], int(number))
            for letter, number in re.findall(r"([FBIWfbiw])(\d+)", row)
        ]
        assert read == list(timeline.schedule.actions[rank])


@pytest.mark.parametrize("width", [60, 80, 133])
@pytest.mark.parametrize(("name", "ranks", "microbatches"), SIZES)
def test_text_fits_its_width_with_and_without_colour(name: str, ranks: int, microbatches: int, width: int) -> None:
    timeline = timeline_of(name, ranks, microbatches)
    plain, coloured = draw_text(timeline, width=width), draw_text(timeline, width=width, colour=True)
    assert max(map(len, plain.splitlines())) <= width
    assert max(len(ANSI.sub("", line)) for line in coloured.splitlines()) <= width
    assert "\x1b" not in plain
    widths = [[len(row) for row in rows_of(drawn)] for drawn in (plain, ANSI.sub("", coloured).replace(" ", "_"))]
    assert len(widths[0]) == ranks and len(set(widths[0])) == 1
    assert widths[0][0] >= 0.5 * (width - 8)


def test_narrow_terminals_get_sixty_columns() -> None:
    assert draw_text(timeline_of("zb-v", 4, 8), width=10) == draw_text(timeline_of("zb-v", 4, 8), width=60)


def test_the_table_tells_idle_time_and_memory_of_each_rank() -> None:
    timeline = timeline_of("zb-h1", 4, 8)
    lines = [line.split() for line in draw_text(timeline, width=100).splitlines() if line.startswith("rank")][4:]
    assert [line[2:] for line in lines] == [
        ["3", "11.1%", f"{n}", p, "4"] for n, p in zip((3, 2, 1, 0), spans_of(24), strict=True)
    ]
    weighed = Costs.even(timeline.schedule.placement, ShareCosts())
    heavier = Costs(weighed.forward, weighed.input_gradient, weighed.weight_gradient, 0.0, (1.0, 2.0, 3.0, 4.0))
    lines = [line.split() for line in draw_text(timeline, heavier).splitlines() if line.startswith("rank")][4:]
    assert [line[-1] for line in lines] == ["4", "8", "12", "16"]


def spans_of(work: int) -> list[str]:
    """Shares of span idle times 3, 2, 1 and 0 beside so much work."""
    return [f"{idle / (work + idle):.1%}" for idle in (3, 2, 1, 0)]


@pytest.mark.parametrize(("width", "unit"), [(60, ""), (100, "ms")])
def test_actions_shorter_than_a_column_are_told_with_the_width_that_shows_them(width: int, unit: str) -> None:
    timeline = timeline_of("zb-v", 8, 32)
    drawn = " ".join(draw_text(timeline, width=width, unit=unit).split())
    column = timeline.makespan / (width - len("rank 7 "))
    assert f"a column is {column:.3g}{' ' * bool(unit)}{unit} long: shorter actions may not be seen" in drawn
    match = re.search(r"seen; --width (\d+) or --png shows more", drawn)
    assert match is not None
    # There every action has a column, and one column less leaves some without.
    for enough, said in ((int(match[1]), False), (int(match[1]) - 1, True)):
        wide = draw_text(timeline, width=enough)
        assert ("a column is" in wide) is said
    assert "." not in "".join(rows_of(draw_text(timeline, width=int(match[1])))[7].strip("."))


def test_a_width_that_no_terminal_has_is_not_proposed() -> None:
    timeline = timeline_of("zb-v", 8, 32)
    # One action of a thousandth.
    (start, _), *rest = timeline.spans[0]
    cut = Timeline(timeline.schedule, ((Span(start, start + 1e-3), *rest), *timeline.spans[1:]))
    drawn = draw_text(cut, width=100)
    assert "shorter actions may not be seen; --png shows more" in drawn


def test_drawings_with_a_common_edge_have_one_scale() -> None:
    short, long = timeline_of("zb-v", 4, 8), timeline_of("1f1b", 4, 8)
    until = right_edge([short, long], 120)
    rows = [rows_of(draw_text(timeline, width=120, until=until))[0] for timeline in (short, long)]
    assert len(rows[0]) / len(rows[1]) == pytest.approx(short.makespan / long.makespan, abs=0.02)


PANELS = {
    "p 4 m 8": [(name, timeline_of(name, 4, 8)) for name in ("1f1b", "zb-v")],
    "p 8 m 12": [("zb-v", timeline_of("zb-v", 8, 12))],
    "as measured": [("measured", shaken(timeline_of("zb-h1", 4, 8), 3)), ("simulated", timeline_of("zb-h1", 4, 8))],
}


@pytest.mark.parametrize("what", PANELS)
def test_the_picture_has_every_action_in_its_rank_and_time(what: str) -> None:
    panels = PANELS[what]
    figure = draw_figure(panels)
    charts = figure.axes[::2]
    assert len(figure.axes) == 2 * len(panels)  # each with its memory below
    assert len({chart.get_xlim() for chart in figure.axes}) == 1
    for (_, timeline), chart in zip(panels, charts, strict=True):
        found = []
        for bars in chart.collections:
            for path in bars.get_paths():
                box = path.get_extents()
                found.append((round((box.y0 + box.y1) / 2), round(box.x0, 6), round(box.x1, 6)))
        rows = enumerate(cells(timeline))
        wanted = [(rank, round(cell.start, 6), round(cell.end, 6)) for rank, row in rows for cell in row]
        assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("what", PANELS)
def test_no_text_of_the_picture_overlaps_another_or_leaves_it(what: str) -> None:
    figure = draw_figure(PANELS[what])
    figure.draw_without_rendering()  # makes the labels of the ticks
    texts = list(figure.legends[0].get_texts())
    for axes in figure.axes:
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, sorted(axes.get_ylim()))):
            texts += [axis.label, *(tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high)]
        texts += axes.texts
        texts += [] if axes.get_legend() is None else axes.get_legend().get_texts()
    texts = [text for text in texts if text.get_text() and text.get_visible()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    for text, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text
    boxes.sort(key=lambda entry: entry[1].x0)
    for i, (text, box) in enumerate(boxes):
        for other, beside in boxes[i + 1 :]:
            if beside.x0 >= box.x1:
                break
            assert not box.overlaps(beside) or min(box.y1, beside.y1) - max(box.y0, beside.y0) < 1, (text, other)


def test_the_picture_is_written(tmp_path: Path) -> None:
    draw_png(tmp_path / "a.png", PANELS["p 4 m 8"], unit="ms")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
