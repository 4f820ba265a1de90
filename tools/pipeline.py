"""Draw pipeline schedules, simulated for given costs or measured in a run, and compare them.

A command line over `parallel.pipeline`; may import tyro, and no torch, so that it answers at once.
Source: see `parallel/pipeline/`; docs/pipeline.md explains the pictures.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

if not __package__:  # run as a file: then its own directory is on the path, and not the project's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import tyro  # noqa: E402

from parallel.pipeline.catalogue import AUTO, MINIMUM_MICROBATCHES, SCHEDULES  # noqa: E402
from parallel.pipeline.make import make_schedule  # noqa: E402
from parallel.pipeline.measured import beside_simulation, read_measured  # noqa: E402
from parallel.pipeline.plot import draw_texts  # noqa: E402
from parallel.pipeline.plot_png import draw_png  # noqa: E402
from parallel.pipeline.simulate import (  # noqa: E402
    Costs,
    ShareCosts,
    Timeline,
    critical_path,
    peak_memory,
    simulate,
)
from training.command_line import one_line  # noqa: E402

_NAMES = (*SCHEDULES, AUTO)


@dataclass(frozen=True)
class Arguments:
    """Draw the time line of a pipeline schedule in the terminal and as a picture.

    For example: --schedule zb-v --stages 4 --microbatches 8 --costs 1,1,1 --png zb-v.png, or --measured runs/default
    for what --profile-pipeline measured.
    """

    schedule: str = ""
    """Name of a schedule, which --list shows, or auto: search for the fastest table within --memory-limit (seconds)."""

    stages: int = 4
    """Pipeline ranks, as in --pipeline-model-parallel-size; some schedules place several stages of the model on each.
    """

    microbatches: int = 8
    """Micro-batches of one step."""

    costs: str = "1,1,1"
    """Times F,I,W of one rank's share of the layers for one micro-batch: forward, gradient of the inputs, gradient of
    the weights. Any unit."""

    send: float = 0.0
    """Time of a message between two ranks, in the same unit."""

    chunks: int | None = None
    """Stages that each rank holds, where that is open: interleaved has 2 when not given, auto tries 1 to 4."""

    overlap: bool = False
    """For dualpipe-v: forwards run together with backwards, as with --overlap-moe-expert-parallel-comm. The picture
    shows what that costs; what it hides is in the times that are given."""

    memory_limit: float | None = None
    """Micro-batches' activations that a rank may keep, in its share of the layers: tells which schedules fit. For auto
    as many as there are ranks when not given."""

    compare: str = ""
    """Further schedules to draw on the same time axis, such as 1f1b,zb-h1."""

    list: bool = False
    """A table of all named schedules for these sizes and costs, the least idle first; with --schedule auto of that too.
    """

    measured: str = ""
    """A run's directory, or one of its files RUN/pipeline/step_00005.json: draw what was measured, and below it the
    same table simulated with the measured times."""

    png: str = ""
    """Picture to write as well; needs matplotlib."""

    width: int = 0
    """Columns of the drawing; those of the terminal when not given."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    width = options.width or shutil.get_terminal_size((110, 24)).columns
    try:
        if options.png and not options.png.endswith(".png"):
            raise ValueError(f"--png {options.png} must end in .png")
        if options.png and not (directory := Path(options.png).parent).is_dir():
            raise ValueError(f"--png {options.png}: there is no directory {directory}: make it first")
        _answer(options, width)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough: what is left goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ModuleNotFoundError as error:
        _fail(f"--png needs {error.name}: python -m pip install {error.name}")
    except (OSError, ValueError) as error:
        _fail(str(error))


def _answer(options: Arguments, width: int) -> None:
    if options.measured:
        if options.schedule or options.compare or options.list:
            raise ValueError("--measured draws what was measured: leave --schedule, --compare and --list out")
        _draw_measured(options, width)
        return
    share = _share_costs(options)
    if not (options.schedule or options.list):
        raise ValueError(f"--schedule is missing: choose one of {', '.join(_NAMES)}, or --list, or --measured")
    if options.png and not options.schedule:
        raise ValueError(f"--png {options.png} needs --schedule: --list alone draws nothing")
    if options.overlap and not options.schedule:
        raise ValueError("--overlap is for --schedule dualpipe-v: name it, or leave --overlap out")
    if options.schedule:
        _draw_simulated(options, share, width)
    if options.list:
        print("\n".join(_table(options, share)))


def _parse(arguments: Sequence[str] | None) -> Arguments:
    """As tyro reads them; a wrong flag is one line rather than a box."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(Arguments, args=arguments, prog="python tools/pipeline.py")
    except SystemExit as ended:
        if not ended.code:
            raise
    _fail(one_line(said.getvalue()) + " (see --help)")


def _fail(message: str) -> NoReturn:
    sys.exit(f"error: {message}")


def _share_costs(options: Arguments) -> ShareCosts:
    try:
        forward, inputs, weights = map(float, options.costs.split(","))
    except ValueError:
        raise ValueError(
            f"--costs {options.costs} must be three numbers F,I,W such as 1,1,1 (a message's time is --send)"
        ) from None
    costs = ShareCosts(forward, inputs, weights, options.send)
    if not min(costs[:3]) > 0 or not sum(costs[:3]) < float("inf"):
        raise ValueError(f"--costs {options.costs} must be three numbers above 0, such as 1,1,1")
    if not 0 <= options.send < float("inf"):
        raise ValueError(f"--send {options.send:g} must be a number from 0 on")
    if options.memory_limit is not None and not options.memory_limit > 0:
        raise ValueError(f"--memory-limit {options.memory_limit:g} must be above 0")
    return costs


def _simulated(name: str, options: Arguments, share: ShareCosts, together: bool = False) -> tuple[Timeline, Costs]:
    """The named schedule on paper. Chunks count where the schedule leaves them open, or was asked for by itself."""
    ranks, microbatches, chunks = options.stages, options.microbatches, options.chunks
    if name not in (options.schedule, AUTO) and name in SCHEDULES and SCHEDULES[name].chunks is not None:
        chunks = None
    schedule = make_schedule(
        name,
        ranks,
        microbatches,
        chunks,
        together=together,
        costs=share,
        memory_limit=options.memory_limit,
    )
    costs = Costs.even(schedule.placement, share)
    return simulate(schedule, costs), costs


def _draw_simulated(options: Arguments, share: ShareCosts, width: int) -> None:
    timeline, costs = _simulated(options.schedule, options, share, options.overlap)
    panels = [(timeline.schedule.name, timeline)]
    for name in filter(None, options.compare.split(",")):
        panels.append((name, _simulated(name, options, share)[0]))
    print(draw_texts(panels, None, width, _colour()), end="\n\n")
    print("\n".join(_path(options.schedule, timeline, costs, width)))
    peak = max(peak_memory(timeline, costs))
    if not _fits(peak, options.memory_limit):
        print(f"peak memory {peak:.3g} is above --memory-limit {options.memory_limit:g}: --list shows which fit")
    _picture(options, panels)


def _draw_measured(options: Arguments, width: int) -> None:
    measured = read_measured(Path(options.measured))
    panels, costs = beside_simulation(measured)
    print(draw_texts(panels, costs, width, _colour(), "ms"), end="\n\n")
    schedule = measured.timeline.schedule
    forward, inputs, weights = (
        sum(times) / schedule.ranks for times in (costs.forward, costs.input_gradient, costs.weight_gradient)
    )
    message = f"{costs.send:.3g} ms (estimated)" if costs.send else "0 (not measurable)"
    print(
        f"mean of a rank: forward {forward:.3g}, gradients of inputs {inputs:.3g}, weights {weights:.3g} ms; message "
        f"{message}; others with these:"
    )
    print(
        f"python tools/pipeline.py --list --stages {schedule.ranks} --microbatches {schedule.microbatches} "
        f"--costs {forward:.3g},{inputs:.3g},{weights:.3g} --send {costs.send:.3g}"
    )
    _picture(options, panels, costs, "ms")


def _picture(
    options: Arguments, panels: Sequence[tuple[str, Timeline]], costs: Costs | None = None, unit: str = ""
) -> None:
    if options.png:
        draw_png(options.png, panels, costs, unit)
        print(f"wrote {options.png}")


def _path(name: str, timeline: Timeline, costs: Costs, width: int) -> list[str]:
    """The critical path in short: where its time goes, and its first and last actions with → between ranks."""
    path, placement = critical_path(timeline, costs), timeline.schedule.placement
    time = Counter[int]()
    for action in path:
        time[placement[action.stage]] += costs.of(action)  # type: ignore[assignment]
    ranks = [placement[action.stage] for action in path]
    messages = sum(a != b for a, b in zip(ranks, ranks[1:], strict=False))
    parts = {rank: time[rank] / timeline.makespan for rank in sorted(time)}
    shares = ", ".join(f"{rank} {part:.0%}" for rank, part in parts.items() if part >= 0.005)
    what = f"{name}, critical path: {len(path)} actions, {messages} messages; of its time on rank {shares}"
    if messages and costs.send:
        what += f", in messages {messages * costs.send / timeline.makespan:.0%}"
    words = [str(path[0])]
    for action, before, rank in zip(path[1:], ranks, ranks[1:], strict=False):
        words.append(str(action) if rank == before else f"→ {action}")
    kept = max(2, (width - 8) // 16)
    shown = words if len(words) <= 2 * kept else [*words[:kept], "…", *words[-kept:]]
    return [*textwrap.wrap(what, width), *textwrap.wrap(" ".join(shown), width, initial_indent="  ")]


def _table(options: Arguments, share: ShareCosts) -> list[str]:
    """A line for each schedule, those within the memory limit first, then by idle share and by memory.

    Idle time within spans and peak memory are those of the worst rank, which is what papers tell.
    """
    rows = []
    for name in _NAMES if options.schedule == AUTO else SCHEDULES:
        timeline, costs = _simulated(name, options, share)
        peak = max(peak_memory(timeline, costs))
        fits = _fits(peak, options.memory_limit)
        spans = max(timeline.span_idle(rank) for rank in range(options.stages))
        stages = timeline.schedule.stages // options.stages
        figures = f"{timeline.idle_share:>11.1%}{abs(spans):>16.4g}{timeline.makespan:>10.4g}{peak:>13.3g}{stages:>14}"
        rows.append((not fits, round(timeline.idle_share, 9), peak, f"{name:<13}{figures}" + "  over" * (not fits)))
    titles = f"{'idle share':>11}{'span idle time':>16}{'makespan':>10}{'peak memory':>13}{'stages a rank':>14}"
    head = f"{'schedule':<13}{titles}"
    least = (
        f"Each runs from {MINIMUM_MICROBATCHES} micro-batch on, at its published speed from {2 * options.stages} "
        f"(twice the ranks) on; here are {options.microbatches}."
    )
    over = [f"over: above --memory-limit {options.memory_limit:g}"] if any(row[0] for row in rows) else []
    return [head, *(row[-1] for row in sorted(rows)), *over, least]


def _fits(peak: float, limit: float | None) -> bool:
    """Whether a rank that keeps `peak` at most is within the limit, but for the rounding of sums."""
    return limit is None or peak <= limit + 1e-9 * max(1.0, limit)


def _colour() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


if __name__ == "__main__":
    main()
