"""Pictures of time lines, simulated or measured, in a terminal; what they show is shared with `plot_png`.

Lives here: `draw_text`. Imports `schedule` and `simulate`; no torch. A row for each rank as in the schedules' papers:
time runs to the right, a cell is an action of one micro-batch.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from parallel.pipeline.schedule import Kind, Schedule
from parallel.pipeline.simulate import Costs, ShareCosts, Span, Timeline, peak_memory

LEAST_WIDTH = 60
"""Columns that a drawing in a terminal takes at least: those of its table."""
WIDEST = 400
"""Columns of the widest drawing that is proposed."""
KIND_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "gradient of inputs",
    Kind.WEIGHT_GRADIENT: "gradient of weights",
}
# Backgrounds of a terminal with 256 colours, for the first, second … stage of a rank.
_ANSI = {
    Kind.FORWARD: (25, 75, 31, 117),
    Kind.BACKWARD: (124, 210, 161, 217),
    Kind.INPUT_GRADIENT: (166, 215, 172, 222),
    Kind.WEIGHT_GRADIENT: (28, 114, 34, 157),
}
_FILLS = "-=~+"
_JOINED = "&"


class Cell(NamedTuple):
    """One action in the picture. chunk: which of its rank's stages it runs on, 0 first; joined: with the next one."""

    kind: Kind
    chunk: int
    microbatch: int
    start: float
    end: float
    joined: bool = False


def cells(timeline: Timeline) -> list[list[Cell]]:
    """For each rank its actions as they are drawn, in order; time 0 is the first start of any rank."""
    schedule = timeline.schedule
    first = _first_start(timeline)
    drawn = []
    for rank, (row, spans) in enumerate(zip(schedule.actions, timeline.spans, strict=True)):
        chunks = {stage: chunk for chunk, stage in enumerate(schedule.stages_of(rank))}
        joined = [len(places) == 2 and place == places[0] for places in schedule.cells(rank) for place in places]
        drawn.append(
            [
                Cell(action.kind, chunks[action.stage], action.microbatch, span.start - first, span.end - first, pair)
                for action, span, pair in zip(row, spans, joined, strict=True)
            ]
        )
    return drawn


def draw_text(
    timeline: Timeline,
    costs: Costs | None = None,
    width: int = 100,
    colour: bool = False,
    title: str = "",
    until: float | None = None,
    unit: str = "",
) -> str:
    """The time line as lines of at most `width` columns (60 at least): picture, axis, table of ranks, legend.

    A column shows the action that takes most of it, so one shorter than a column may not be seen; a line below the
    axis then says so. costs: what activations weigh; by default a rank's share of the layers weighs 1. colour: with
    ANSI's colours; title: by default the schedule's name; until: the time at the right edge, by default `right_edge` of
    this one; unit: of time.
    """
    width = max(width, LEAST_WIDTH)
    drawn, schedule = cells(timeline), timeline.schedule
    names = [f"rank {rank}" for rank in range(schedule.ranks)]
    margin = _margin(schedule)
    until = until or right_edge([timeline], width)
    per_column = until / (width - margin)
    columns = min(width - margin, math.ceil(timeline.makespan / per_column - 1e-6))
    lines = textwrap.wrap(f"{title or schedule.name}: {facts(timeline, costs, unit)}", width)
    for name, row in zip(names, drawn, strict=True):
        shown = columns_of([Span(cell.start, cell.end) for cell in row], per_column, columns)
        lines.append(f"{name:<{margin}}" + _paint(row, shown, colour))
    lines.append(" " * margin + _axis(per_column, columns, unit))
    shortest = min((cell.end - cell.start for row in drawn for cell in row if cell.end > cell.start), default=until)
    if shortest < per_column * (1 - 1e-6):
        lines += textwrap.wrap(_too_short(per_column, margin + math.ceil(until / shortest - 1e-6), unit), width)
    lines += _table(timeline, costs, names)
    return "\n".join([*lines, *_legend(schedule, width, colour)])


def draw_texts(
    panels: Sequence[tuple[str, Timeline]],
    costs: Costs | None = None,
    width: int = 100,
    colour: bool = False,
    unit: str = "",
) -> str:
    """Time lines, each with its title, below one another on one time axis; else as `draw_text`."""
    until = right_edge([timeline for _, timeline in panels], width)
    return "\n\n".join(draw_text(timeline, costs, width, colour, title, until, unit) for title, timeline in panels)


def right_edge(timelines: Sequence[Timeline], width: int) -> float:
    """The time at the right edge of drawings of `width` columns with a common axis.

    It is the longest makespan, or, where all actions take a multiple of the shortest one's time, the first time beyond
    it that gives that one a whole number of columns: the same action then looks the same everywhere.
    """
    columns = max(width, LEAST_WIDTH) - max(_margin(timeline.schedule) for timeline in timelines)
    longest = max(timeline.makespan for timeline in timelines)
    times = {end - start for timeline in timelines for row in timeline.spans for start, end in row}
    unit = min(times)
    even = unit > 0 and all(abs(time / unit - round(time / unit)) < 1e-6 for time in times)
    whole = math.floor(columns * unit / longest + 1e-9) if even else 0
    return columns * unit / whole if whole else longest


def facts(timeline: Timeline, costs: Costs | None = None, unit: str = "") -> str:
    """One line: sizes, makespan, the idle share of all ranks by wall and by span, and the largest peak memory."""
    schedule = timeline.schedule
    return (
        f"{_count(schedule.ranks, 'rank')}, "
        f"{_count(schedule.microbatches, 'micro-batch', 'es')}, "
        f"makespan {_time(timeline.makespan, unit)}, idle {timeline.idle_share:.1%} "
        f"(within spans {_span_idle_share(timeline):.1%}), peak memory {max(_peaks(timeline, costs)):.3g}"
    )


def columns_of(spans: Sequence[Span], per_column: float, columns: int) -> list[int | None]:
    """For each column of the picture the place of the span that takes most of it; None where idle time does."""
    shown: list[int | None] = []
    first = 0
    for column in range(columns):
        left, right = column * per_column, (column + 1) * per_column
        while first < len(spans) and spans[first].end <= left:
            first += 1
        most, place, busy = 0.0, None, 0.0
        for i in range(first, len(spans)):
            if spans[i].start >= right:
                break
            overlap = min(right, spans[i].end) - max(left, spans[i].start)
            busy += overlap
            # The first one wins a tie, whatever rounding says: each of two halves then gets its column.
            if overlap > most + 1e-6 * per_column:
                most, place = overlap, i
        shown.append(None if per_column - busy > most + 1e-6 * per_column else place)
    return shown


def _paint(row: Sequence[Cell], shown: Sequence[int | None], colour: bool) -> str:
    """One rank's row; the columns of an action carry its letter (without colours) and its micro-batch where it fits."""
    painted, column = "", 0
    while column < len(shown):
        place, end = shown[column], column
        while end < len(shown) and shown[end] == place:
            end += 1
        width = end - column
        idle = "." * width
        if place is not None:
            painted += _painted(row[place], width, colour)
        else:
            painted += f"\x1b[2m{idle}\x1b[0m" if colour else idle
        column = end
    return painted


def _painted(cell: Cell, width: int, colour: bool) -> str:
    letter = cell.kind.value if cell.chunk % 2 == 0 else cell.kind.value.lower()
    number = str(cell.microbatch)
    if colour:
        label, fill = number if len(number) <= width else letter, " "
    else:
        label, fill = letter + number if len(number) < width else letter, _FILLS[cell.chunk % len(_FILLS)]
    text = label.ljust(width, fill)
    if cell.joined and len(label) < width:
        text = text[:-1] + _JOINED
    return _coloured(text, cell.kind, cell.chunk) if colour else text


def _coloured(text: str, kind: Kind, chunk: int) -> str:
    shades = _ANSI[kind]
    # White on the dark shades, black on the light ones.
    return f"\x1b[48;5;{shades[chunk % len(shades)]};38;5;{(15, 16)[chunk % 2]}m{text}\x1b[0m"


def _axis(per_column: float, columns: int, unit: str) -> str:
    """Round times under their columns, at least ten columns apart."""
    least = 10 * per_column
    power = 10 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
    line = ""
    for tick in range(columns):
        label = f"{tick * step:.6g}" + (f" {unit}" if unit and tick == 0 else "")
        column = round(tick * step / per_column)
        if column + len(label) > columns:
            break
        line = line.ljust(column) + label
    return line


def _too_short(per_column: float, enough: int, unit: str) -> str:
    """What is said where an action is shorter than a column. enough: columns in which none is."""
    wider = f"--width {enough} or " if enough <= WIDEST else ""
    column = f"{per_column:.3g} {unit}".rstrip()
    return f"a column is {column} long: shorter actions may not be seen; {wider}--png shows more"


def _table(timeline: Timeline, costs: Costs | None, names: Sequence[str]) -> list[str]:
    margin = max(map(len, names)) + 1
    lines = [" " * margin + f"{'wall idle':>17}{'span idle':>18}{'peak memory':>15}"]
    for rank, (name, peak) in enumerate(zip(names, _peaks(timeline, costs), strict=True)):
        wall, span, length = timeline.wall_idle(rank), timeline.span_idle(rank), _length(timeline, rank)
        lines.append(
            f"{name:<{margin}}{_near_zero(wall, timeline):>8.4g}{wall / timeline.makespan:>9.1%}"
            f"{_near_zero(span, timeline):>9.4g}{abs(span) / length:>9.1%}{peak:>15.3g}"
        )
    return lines


def _legend(schedule: Schedule, width: int, colour: bool) -> list[str]:
    """What letters, fills and colours mean; kinds and chunks that the table has only."""
    chunks = chunks_of(schedule)
    entries = []
    for kind in kinds_of(schedule):
        keys = [
            _coloured(f" {kind.value} ", kind, chunk) if colour else _painted(Cell(kind, chunk, 0, 0, 0), 3, False)
            for chunk in range(min(chunks, len(_FILLS)))
        ]
        entries.append((" ".join(keys) + f" {KIND_NAMES[kind]}", 4 * len(keys) + len(KIND_NAMES[kind])))
    stages = "" if chunks == 1 else f"; of a rank's {', '.join(map(ordinal, range(chunks)))} stage"
    pairs = f"; {_JOINED} (where there is room) runs together with the next" if any(schedule.together) else ""
    entries.append((note := f"number: micro-batch{stages}; . idle{pairs}", len(note)))
    lines, used = [""], 0
    for text, length in entries:  # by hand: textwrap would count colours as columns
        if used and used + 3 + length > width:
            lines.append("")
            used = 0
        lines[-1] += ("   " if used else "") + text
        used += length + (3 if used else 0)
    return lines


def chunks_of(schedule: Schedule) -> int:
    """How many stages a rank holds, at most."""
    return max(len(schedule.stages_of(rank)) for rank in range(schedule.ranks))


def ordinal(chunk: int) -> str:
    """ "1st" for chunk 0, which is a rank's first stage."""
    return f"{chunk + 1}{ {0: 'st', 1: 'nd', 2: 'rd'}.get(chunk, 'th') }"


def kinds_of(schedule: Schedule) -> list[Kind]:
    there = {action.kind for row in schedule.actions for action in row}
    return [kind for kind in Kind if kind in there]


def _margin(schedule: Schedule) -> int:
    """Columns of the names of ranks, "rank 15 "."""
    return len(f"rank {schedule.ranks - 1} ")


def _first_start(timeline: Timeline) -> float:
    return min(span.start for row in timeline.spans for span in row)


def _length(timeline: Timeline, rank: int) -> float:
    """A rank's time from its first start to its last end."""
    return timeline.spans[rank][-1].end - timeline.spans[rank][0].start


def _span_idle_share(timeline: Timeline) -> float:
    ranks = range(timeline.schedule.ranks)
    idle = sum(timeline.span_idle(rank) for rank in ranks)
    return abs(idle) / sum(_length(timeline, rank) for rank in ranks)


def _even(timeline: Timeline) -> Costs:
    return Costs.even(timeline.schedule.placement, ShareCosts())


def _peaks(timeline: Timeline, costs: Costs | None) -> list[float]:
    return peak_memory(timeline, costs or _even(timeline))


def _near_zero(time: float, timeline: Timeline) -> float:
    """Time without the rounding of sums: 1e-15 of nothing reads as something."""
    return 0.0 if abs(time) < 1e-9 * timeline.makespan else time


def _time(time: float, unit: str) -> str:
    return f"{time:.4g} {unit}".rstrip()


def _count(number: int, of: str, plural: str = "s") -> str:
    return f"{number} {of}" + (plural if number != 1 else "")
