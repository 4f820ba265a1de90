"""Pictures of time lines as PNG, one below another, each with its ranks' memory over time.

Lives here: `draw_png`. Imports `schedule`, `simulate` and `plot`, no torch, and matplotlib inside functions only: a run
that draws nothing needn't have it. Colours: a hue for each kind, lighter for the further stages of a rank; a frame
around two actions that run together.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from statistics import median
from typing import TYPE_CHECKING

from parallel.pipeline.plot import KIND_NAMES, Cell, cells, chunks_of, facts, kinds_of, ordinal
from parallel.pipeline.schedule import Kind, Schedule
from parallel.pipeline.simulate import Costs, ShareCosts, Timeline, memory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

_RGB = {
    Kind.FORWARD: (0.22, 0.42, 0.69),
    Kind.BACKWARD: (0.80, 0.28, 0.30),
    Kind.INPUT_GRADIENT: (0.93, 0.53, 0.13),
    Kind.WEIGHT_GRADIENT: (0.25, 0.58, 0.36),
}


def draw_png(
    path: str | PathLike[str],
    panels: Sequence[tuple[str, Timeline]],
    costs: Costs | None = None,
    unit: str = "",
) -> None:
    """Time lines below one another on one time axis, each with the memory of its ranks over time.

    panels: (title, time line); costs: what activations weigh on the stages, the same for all panels; by default a
    rank's share of the layers weighs 1. Raises ModuleNotFoundError without matplotlib.
    """
    draw_figure(panels, costs, unit).savefig(path, dpi=110)


def draw_figure(panels: Sequence[tuple[str, Timeline]], costs: Costs | None = None, unit: str = "") -> Figure:
    """The figure that `draw_png` saves. Sizes are in inches, laid out by hand, so that nothing can overlap."""
    from matplotlib.figure import Figure

    drawn = [cells(timeline) for _, timeline in panels]
    until = max(timeline.makespan for _, timeline in panels)
    typical = median(cell.end - cell.start for rows in drawn for row in rows for cell in row)
    left, right, top, bottom, title, between, trace = 0.75, 0.95, 0.34, 0.5, 0.45, 0.12, 1.15
    width = min(22.0, max(9.0, left + right + 0.17 * until / max(typical, until / 400)))
    handles = _legend([timeline.schedule for _, timeline in panels])
    columns = min(len(handles), int((width - left) / 1.45))
    top += 0.2 * (-(-len(handles) // columns) - 1)
    bars = [(0.36 if len(rows) <= 4 else 0.27) * len(rows) for rows in drawn]
    height = top + bottom + sum(title + bar + between + trace for bar in bars) + 0.2 * (len(panels) - 1)
    figure = Figure(figsize=(width, height), facecolor="white")
    place = (width - left - right) / width
    y = height - top
    axes: list[Axes] = []
    for (name, timeline), rows, bar in zip(panels, drawn, bars, strict=True):
        y -= title + bar
        chart = figure.add_axes((left / width, y / height, place, bar / height))
        chart.text(0, 1 + 0.24 / bar, name, fontsize=10, fontweight="bold", transform=chart.transAxes)
        chart.text(0, 1 + 0.07 / bar, facts(timeline, costs, unit), fontsize=9, transform=chart.transAxes)
        _draw_rows(chart, rows, until, place * width * 72, bar * 72)
        y -= between + trace
        curve = figure.add_axes((left / width, y / height, place, trace / height), sharex=chart)
        _draw_memory(curve, timeline, costs)
        y -= 0.2
        axes += [chart, curve]
    for above in axes[:-1]:
        above.tick_params(labelbottom=False)
    axes[-1].set_xlabel(f"time ({unit})" if unit else "time")
    anchor = (left / width, 1 - 0.05 / height)
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=anchor, ncols=columns, fontsize=8, frameon=False)
    return figure


def _draw_rows(axes: Axes, rows: Sequence[Sequence[Cell]], until: float, width: float, height: float) -> None:
    """The cells of one time line. width, height: of the panel in points, by which the size of numbers is chosen."""
    by_colour: dict[tuple[int, Kind, int], list[Cell]] = {}
    for rank, row in enumerate(rows):
        for cell in row:
            by_colour.setdefault((rank, cell.kind, cell.chunk), []).append(cell)
    for (rank, kind, chunk), alike in by_colour.items():
        spans = [(cell.start, cell.end - cell.start) for cell in alike]
        axes.broken_barh(spans, (rank - 0.45, 0.9), facecolors=_shade(kind, chunk), edgecolor="white", linewidth=0.4)
    for rank, row in enumerate(rows):  # a frame around what runs together
        pairs = [(cell.start, after.end - cell.start) for cell, after in zip(row, row[1:], strict=False) if cell.joined]
        axes.broken_barh(pairs, (rank - 0.45, 0.9), facecolors="none", edgecolor="black", linewidth=0.8)
    every = [cell for row in rows for cell in row]
    durations = {kind: [cell.end - cell.start for cell in every if cell.kind is kind] for kind in Kind}
    typical = min(median(of_kind) for of_kind in durations.values() if of_kind)
    digits = len(str(max(cell.microbatch for cell in every)))
    # A digit is 0.64 of the font's size wide; 0.8 leaves room on both sides.
    size = min(8.0, 0.55 * height / len(rows), 0.8 * typical / until * width / (0.64 * digits))
    for rank, row in enumerate(rows):
        for cell in row:
            text = str(cell.microbatch)
            if size < 4 or 0.64 * size * len(text) > 0.8 * (cell.end - cell.start) / until * width:
                continue
            dark = sum(_shade(cell.kind, cell.chunk)) < 1.9
            middle = (cell.start + cell.end) / 2
            ink = "white" if dark else "black"
            axes.text(middle, rank, text, ha="center", va="center_baseline", fontsize=size, color=ink)
    axes.set_xlim(0, until)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))], fontsize=8)
    axes.tick_params(length=0)
    axes.set_facecolor("#eeeeee")
    for side in axes.spines.values():
        side.set_visible(False)


def _draw_memory(axes: Axes, timeline: Timeline, costs: Costs | None) -> None:
    """What each rank keeps over time."""
    from matplotlib import colormaps

    ranks = timeline.schedule.ranks
    first = min(span.start for row in timeline.spans for span in row)
    curves = memory(timeline, costs or Costs.even(timeline.schedule.placement, ShareCosts()))
    for rank, curve in enumerate(curves):
        # What is freed when the next action starts would be a notch of no width: the last amount at a time counts.
        amounts = {0.0: 0.0} | {round(time - first, 9): amount for time, amount in curve}
        times, kept = [*amounts, timeline.makespan], [*amounts.values(), curve[-1][1] if curve else 0.0]
        colour = colormaps["viridis"](rank / max(1, ranks - 1) * 0.9)
        axes.plot(times, kept, drawstyle="steps-post", color=colour, linewidth=1.1, label=f"rank {rank}")
    axes.set_ylim(0, 1.1 * max(amount for curve in curves for _, amount in curve))
    axes.set_ylabel("memory", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    # As many names as there is room for: the colours between them speak for themselves.
    shown = range(ranks) if ranks <= 8 else sorted({round(i * (ranks - 1) / 7) for i in range(8)})
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        [handles[rank] for rank in shown],
        [labels[rank] for rank in shown],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.05),
        fontsize=7,
        frameon=False,
        labelspacing=0.15,
        handlelength=1.2,
    )


def _legend(schedules: Sequence[Schedule]) -> list[Patch]:
    """A patch for each colour that these tables need, with what it means."""
    from matplotlib.patches import Patch

    handles = []
    for kind in Kind:
        having = [schedule for schedule in schedules if kind in kinds_of(schedule)]
        for chunk in range(max((chunks_of(schedule) for schedule in having), default=0)):
            label = f"{kind.value}: {KIND_NAMES[kind]}" if chunk == 0 else f"{kind.value}, {ordinal(chunk)} stage"
            handles.append(Patch(color=_shade(kind, chunk), label=label))
    if any(any(schedule.together) for schedule in schedules):
        handles.append(Patch(facecolor="none", edgecolor="black", label="framed: together"))
    return handles


def _shade(kind: Kind, chunk: int) -> tuple[float, float, float]:
    """A kind's colour, lighter for each further stage of the rank."""
    lighter = (0.0, 0.45, 0.62, 0.75)[min(chunk, 3)]
    red, green, blue = (part + (1 - part) * lighter for part in _RGB[kind])
    return red, green, blue
