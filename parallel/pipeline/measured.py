"""A measured time line as files, and the costs that can be read from it.

Lives here: what is done with a measured `Timeline` after the run; how it is measured is in `profile`. Imports
`schedule`, `check` and `simulate` only; no torch, so that the tools read a run's files at once. Times are in seconds.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from parallel.pipeline.check import check
from parallel.pipeline.schedule import Action, Kind, Schedule, dependencies
from parallel.pipeline.simulate import Costs, ShareCosts, Span, Timeline, simulate


@dataclass(frozen=True)
class Measured:
    """The pipeline of one step. alignment_seconds: by how much the clocks of two ranks may be off, at most."""

    timeline: Timeline
    step: int
    alignment_seconds: float


def costs_of(timeline: Timeline, alignment: float = 0.0) -> Costs:
    """What the actions of a time line took: the mean of each stage and kind, with which `simulate` can be asked.

    A whole backward pass that a stage never splits counts half for its inputs and half for its weights. send is
    estimated: the median time from the end of an action to the start of one that waited for it on another rank; 0
    where none waited, or where that isn't above `alignment`, by which ranks' clocks may be off: it is then no measure
    of messages. Activations weigh 1 for a rank's share of the layers: they aren't measured.
    """
    schedule = timeline.schedule
    taken: dict[tuple[Kind, int], list[float]] = {}
    for row, spans in zip(schedule.actions, timeline.spans, strict=True):
        for action, span in zip(row, spans, strict=True):
            taken.setdefault((action.kind, action.stage), []).append(span.end - span.start)
    mean = {key: fmean(times) for key, times in taken.items()}

    def by_stage(kind: Kind, of_whole: float) -> tuple[float, ...]:
        return tuple(
            mean.get((kind, stage), mean.get((Kind.BACKWARD, stage), 0.0) * of_whole) for stage in range(len(placed))
        )

    placed = schedule.placement
    return Costs(
        by_stage(Kind.FORWARD, 0.0),
        by_stage(Kind.INPUT_GRADIENT, 0.5),
        by_stage(Kind.WEIGHT_GRADIENT, 0.5),
        send if (send := _send(timeline)) > alignment else 0.0,
        Costs.even(placed, ShareCosts()).activations,
    )


def _send(timeline: Timeline) -> float:
    """See `costs_of`: of the messages for which the receiver had nothing else to do when they left."""
    schedule, before = timeline.schedule, dependencies(timeline.schedule)
    ranks = list(enumerate(zip(schedule.actions, timeline.spans, strict=True)))
    left: dict[Action, float] = {}
    for rank, (row, spans) in ranks:
        for places in schedule.cells(rank):
            left |= {row[place]: spans[places[-1]].end for place in places}
    gaps = []
    for rank, (row, spans) in ranks:
        free = float("-inf")
        for places in schedule.cells(rank):
            needs = [needed for place in places for needed in before[row[place]]]
            last = max((left[needed] for needed in needs if schedule.placement[needed.stage] != rank), default=free)
            if last > free:
                gaps.append(spans[places[0]].start - last)
            free = spans[places[-1]].end
    return max(0.0, median(gaps)) if gaps else 0.0


def beside_simulation(measured: Measured) -> tuple[list[tuple[str, Timeline]], Costs]:
    """The measured time line and its table simulated with what it took, each with its title, and those costs; in ms.

    The title of the measured one says how far ranks' clocks may be off.
    """
    timeline = in_milliseconds(measured.timeline)
    alignment = 1e3 * measured.alignment_seconds
    costs = costs_of(timeline, alignment)
    name = timeline.schedule.name
    simulated = simulate(timeline.schedule, costs)
    title = f"{name}, step {measured.step} measured, clocks within {alignment:.3g} ms"
    return [(title, timeline), (f"{name}, simulated", simulated)], costs


def in_milliseconds(timeline: Timeline) -> Timeline:
    """The same time line with times in milliseconds, for drawings."""
    spans = tuple(tuple(Span(1e3 * start, 1e3 * end) for start, end in row) for row in timeline.spans)
    return Timeline(timeline.schedule, spans)


def write_measured(directory: Path, measured: Measured) -> tuple[Path, Path]:
    """Write step_00005.json (schedule and spans) and step_00005.trace.json (`chrome_trace`) into `directory`."""
    schedule = measured.timeline.schedule
    content = {
        "step": measured.step,
        "unit": "seconds",
        "alignment_seconds": measured.alignment_seconds,
        "schedule": {
            "name": schedule.name,
            "microbatches": schedule.microbatches,
            "placement": schedule.placement,
            "promised_peak": schedule.promised_peak,
            "actions": [[str(action) for action in row] for row in schedule.actions],
            "together": schedule.together,
        },
        "spans": [[[round(time, 9) for time in span] for span in row] for row in measured.timeline.spans],
    }
    directory.mkdir(parents=True, exist_ok=True)
    files = directory / f"step_{measured.step:05d}.json", directory / f"step_{measured.step:05d}.trace.json"
    for path, written in zip(files, (content, chrome_trace(measured.timeline)), strict=True):
        part = path.with_suffix(".part")
        part.write_text(json.dumps(written), encoding="utf-8")
        os.replace(part, path)
    return files


def read_measured(path: Path) -> Measured:
    """What `write_measured` wrote. path: the file, or a run's directory, whose last measured step is read.

    Raises FileNotFoundError where a run has measured nothing and ValueError for a file of something else.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} doesn't exist: give a run's directory, or its pipeline/step_00005.json")
    if path.is_dir():
        files = [file for file in (path / "pipeline").glob("step_*.json") if re.fullmatch(r"step_\d+\.json", file.name)]
        if not files:
            raise FileNotFoundError(f"{path} has no pipeline/step_*.json: train with --profile-pipeline to measure one")
        path = max(files, key=lambda file: int(file.stem.removeprefix("step_")))
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        told = content["schedule"]
        rows = tuple(tuple(map(_action, row)) for row in told["actions"])
        together = tuple(map(tuple, told.get("together", ())))  # files of older runs don't have it
        placement = tuple(told["placement"])
        schedule = Schedule(told["name"], told["microbatches"], placement, rows, told["promised_peak"], together)
        check(schedule)
        spans = tuple(tuple(Span(float(start), float(end)) for start, end in row) for row in content["spans"])
        if list(map(len, spans)) != list(map(len, rows)):
            raise ValueError("it has another number of times than of actions")
        if not rows or any(span.end < span.start for row in spans for span in row):
            raise ValueError("it has no actions, or one that ends before it starts")
        return Measured(Timeline(schedule, spans), int(content["step"]), float(content["alignment_seconds"]))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} isn't a measured time line ({type(error).__name__}: {error}): give RUN/pipeline/step_00005.json"
        ) from error


def _action(text: str) -> Action:
    if not (match := re.fullmatch(r"([FBIW])(\d+)\.(\d+)", text)):
        raise ValueError(f"{text!r} is no action such as F0.3")
    return Action(Kind(match[1]), int(match[2]), int(match[3]))


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The time line in the Trace Event Format, which chrome://tracing and Perfetto open; times there are microseconds.

    A process for each pipeline rank with one thread; actions are events with stage and micro-batch as arguments, the
    time between them events named idle.
    """
    schedule = timeline.schedule
    begin = min(span.start for row in timeline.spans for span in row)
    end = max(span.end for row in timeline.spans for span in row)
    events: list[dict[str, Any]] = []

    def event(name: str, category: str, rank: int, span: Span, arguments: dict[str, int]) -> dict[str, Any]:
        start, duration = 1e6 * (span.start - begin), 1e6 * (span.end - span.start)
        place = {"ph": "X", "pid": rank, "tid": 0, "ts": round(start, 3), "dur": round(duration, 3)}
        return {"name": name, "cat": category, **place, "args": arguments}

    for rank, (row, spans) in enumerate(zip(schedule.actions, timeline.spans, strict=True)):
        for kind, name in (("process_name", f"pipeline rank {rank}"), ("thread_name", "compute")):
            events.append({"name": kind, "ph": "M", "pid": rank, "tid": 0, "args": {"name": name}})
        events.append({"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
        now = begin
        for action, span in zip(row, spans, strict=True):
            if span.start > now:
                events.append(event("idle", "idle", rank, Span(now, span.start), {}))
            arguments = {"stage": action.stage, "microbatch": action.microbatch}
            events.append(event(str(action), action.kind.value, rank, span, arguments))
            now = span.end
        if end > now:
            events.append(event("idle", "idle", rank, Span(now, end), {}))
    return {"traceEvents": events, "displayTimeUnit": "ms"}
