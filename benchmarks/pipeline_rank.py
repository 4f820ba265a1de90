"""One rank of the pipeline benchmark: stages that sleep, under our schedules and torch's; stages whose memory is read.

Lives here: what `benchmarks/pipeline.py` starts on each rank, with its options as JSON. May import every room. All
contenders live in the same processes and take turns, so that whatever else the machine does hits all alike.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from parallel.comm import gather_objects, irecv, isend
from parallel.gradients import GradientReducer
from parallel.launch import destroy, init_distributed
from parallel.mesh import Layout, Mesh
from parallel.pipeline.make import make_schedule
from parallel.pipeline.runtime import PipelineRuntime
from parallel.pipeline.schedule import Kind, Schedule
from parallel.sharding import Sharding
from parallel.tensor import ReplicatedLinear
from parallel.weight_gradient import add_gradient, will_add_its_gradient

SHAPE = torch.Size((1, 64))
"""Of what sleeping stages hand on: a message takes as little time as it can."""

TORCH = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
"""Which class of torch.distributed.pipelining runs a schedule that has a name here."""

SPIN = 0.0003
"""Seconds at a sleep's end that are spun away: sleep alone wakes up 0.1 to 0.2 ms late."""


class Sleeper:
    """Stands in for a stage's computation: sleeps, and counts how often and how long. seconds: that F, I and W take."""

    def __init__(self, seconds: dict[Kind, float]):
        self.seconds = seconds
        self.counts: Counter[str] = Counter()
        self.slept = 0.0

    def rest(self, kind: Kind, started: float) -> None:
        """Sleep until F, I or W, begun at `started` of time.perf_counter, has taken as long as it does here.

        Ends some microseconds late, as long as the processor is free.
        """
        end = started + self.seconds[kind]
        time.sleep(max(0.0, end - SPIN - time.perf_counter()))
        self.counts[kind.value] += 1
        while (now := time.perf_counter()) < end:
            pass
        self.slept += now - started


class _Sleep(torch.autograd.Function):
    """x + w; backward takes I, and the weight's gradient W, now or when the table says so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, sleeper: Sleeper) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.sleeper = sleeper
        return x + weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        started = time.perf_counter()
        (weight,), sleeper, grad = ctx.saved_tensors, ctx.sleeper, grads[0]

        def gradient(total: torch.Tensor | None) -> torch.Tensor:
            started = time.perf_counter()
            added = grad.sum().view(1) if total is None else total.add_(grad.sum())
            sleeper.rest(Kind.WEIGHT_GRADIENT, started)
            return added

        sleeper.rest(Kind.INPUT_GRADIENT, started)
        return grad, add_gradient(weight, gradient), None


class SleepingStage(nn.Module):
    """One of our stages: y = x + w for activations [1, 64], taking F; on the last stage their mean."""

    def __init__(self, sleeper: Sleeper, last: bool):
        super().__init__()
        self.weight = will_add_its_gradient(nn.Parameter(torch.zeros(1)))
        self.weight.sharding = Sharding()  # type: ignore[attr-defined]
        self.sleeper, self.last = sleeper, last

    def forward(self, x: torch.Tensor | None, microbatch: torch.Tensor) -> torch.Tensor:
        started = time.perf_counter()
        y = _Sleep.apply(microbatch if x is None else x, self.weight, self.sleeper)
        y = y.mean() if self.last else y
        self.sleeper.rest(Kind.FORWARD, started)
        return y


class _BackwardSleeps(torch.autograd.Function):
    """A copy of x, whose backward takes I or W."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sleeper: Sleeper, kind: Kind) -> torch.Tensor:
        ctx.sleeper, ctx.kind = sleeper, kind
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        started = time.perf_counter()
        ctx.sleeper.rest(ctx.kind, started)
        return grads[0], None, None


class TorchSleepingStage(nn.Module):
    """The same for torch: it splits a backward pass where the paths from the input and from a weight meet, at the sum.

    torch takes the first stage's whole backward pass, also what isn't a weight's gradient, for its weight action; so
    that it sleeps there as long as on other stages, its input wants a gradient.
    """

    def __init__(self, sleeper: Sleeper, first: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.sleeper, self.first = sleeper, first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        started = time.perf_counter()
        if self.first:
            x = x.detach().requires_grad_()
        y = _BackwardSleeps.apply(x, self.sleeper, Kind.INPUT_GRADIENT)
        y = y + _BackwardSleeps.apply(self.weight, self.sleeper, Kind.WEIGHT_GRADIENT)
        self.sleeper.rest(Kind.FORWARD, started)
        return y


class OurPipeline:
    """A named schedule on this rank, over sleeping stages."""

    def __init__(self, mesh: Mesh, name: str, microbatches: int, sleeper: Callable[[int], Sleeper]):
        self.schedule = make_schedule(name, mesh.pp.size, microbatches)
        mine = self.schedule.stages_of(mesh.pp.rank)
        self.sleepers = [sleeper(len(mine)) for _ in mine]
        stages = {
            stage: SleepingStage(own, stage == self.schedule.stages - 1)
            for stage, own in zip(mine, self.sleepers, strict=True)
        }
        self.runtime = PipelineRuntime(mesh, stages, torch.float32)
        self.reducer = GradientReducer([(f"{s}.weight", stage.weight) for s, stage in stages.items()], mesh)
        self.microbatches = [torch.zeros(SHAPE) for _ in range(microbatches)]

    def step(self) -> None:
        self.runtime.run(self.schedule, self.microbatches, SHAPE, self.reducer)

    def after(self) -> None:
        """What a step owes that isn't the pipeline's."""
        self.reducer.finish()
        self.reducer.zero()


class TorchPipeline:
    """torch's schedule for a name on this rank, placed as ours is, over stages that sleep as long."""

    def __init__(self, mesh: Mesh, name: str, microbatches: int, sleeper: Callable[[int], Sleeper]):
        ours = make_schedule(name, mesh.pp.size, microbatches)
        mine, count = ours.stages_of(mesh.pp.rank), ours.stages
        self.sleepers = [sleeper(len(mine)) for _ in mine]
        stages = [
            pipelining.PipelineStage(TorchSleepingStage(own, stage == 0), stage, count, mesh.device)
            for stage, own in zip(mine, self.sleepers, strict=True)
        ]
        kind = getattr(pipelining, TORCH[name])
        self.schedule = kind(stages if len(mine) > 1 else stages[0], microbatches, loss_fn=lambda y, target: y.mean())
        whole = torch.zeros(microbatches * SHAPE[0], *SHAPE[1:])
        self.inputs = (whole,) if 0 in mine else ()
        self.target = {"target": whole} if count - 1 in mine else {}

    def step(self) -> None:
        self.schedule.step(*self.inputs, **self.target)

    def after(self) -> None:
        """Nothing: gradients add up, which no one reads."""


def timed_step(pipeline: OurPipeline | TorchPipeline, mesh: Mesh, microbatches: int) -> dict[str, float]:
    """Seconds from a moment that all ranks agreed on until the last one is through, and what a rank slept at most.

    Raises RuntimeError unless every stage slept once for each of a micro-batch's F, I and W.
    """
    for sleeper in pipeline.sleepers:
        sleeper.counts.clear()
        sleeper.slept = 0.0
    # One machine, so all ranks read one clock.
    start = max(gather_objects(time.perf_counter(), mesh.world)) + 0.005
    time.sleep(max(0.0, start - time.perf_counter()))
    pipeline.step()
    end = time.perf_counter()
    for stage, sleeper in enumerate(pipeline.sleepers):
        if sleeper.counts != dict.fromkeys("FIW", microbatches):
            raise RuntimeError(
                f"stage {stage} of rank {mesh.rank} slept {dict(sleeper.counts)} times in {microbatches} micro-batches"
            )
    slept = sum(sleeper.slept for sleeper in pipeline.sleepers)
    found = gather_objects((end, slept), mesh.world)
    pipeline.after()
    return {"makespan": max(end for end, _ in found) - start, "slept": max(slept for _, slept in found)}


def message_seconds(mesh: Mesh, count: int = 30) -> float:
    """Median time from before a small message is sent until the next rank, which waits for it, has it."""
    axis, taken = mesh.pp, []
    x = torch.zeros(1, dtype=torch.float64)
    for _ in range(count):
        if axis.rank > 0:
            irecv(x, axis, axis.rank - 1).wait()
            taken.append(time.perf_counter() - x.item())
        if axis.rank + 1 < axis.size:
            time.sleep(0.005)  # the next rank is asleep by then
            x.fill_(time.perf_counter())
            isend(x, axis, axis.rank + 1).wait()
    everyone = [seconds for rank in gather_objects(taken, axis) for seconds in rank[1:]]  # the first connects
    return statistics.median(everyone) if everyone else 0.0


def measure_idle(mesh: Mesh, options: dict[str, Any]) -> list[dict[str, Any]]:
    """For each number of micro-batches and each schedule, ours and torch's: makespans and sleeps of all rounds."""
    kinds = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)

    def sleeper(stages: int) -> Sleeper:
        """Of one of a rank's stages."""
        share = [milliseconds / 1e3 / stages for milliseconds in options["milliseconds"]]
        return Sleeper(dict(zip(kinds, share, strict=True)))

    order = random.Random(0)  # the same on all ranks
    records = []
    for microbatches in options["microbatches"]:
        pipelines: dict[tuple[str, str], OurPipeline | TorchPipeline] = {}
        for name in options["schedules"]:
            pipelines["ours", name] = OurPipeline(mesh, name, microbatches, sleeper)
            if name in TORCH and options["torch"]:
                pipelines["torch", name] = TorchPipeline(mesh, name, microbatches, sleeper)
        for pipeline in pipelines.values():  # connections are made, and torch finds out shapes
            pipeline.step()
            pipeline.after()
        steps: dict[tuple[str, str], list[dict[str, float]]] = {key: [] for key in pipelines}
        for _ in range(options["rounds"]):
            for key in order.sample(list(pipelines), len(pipelines)):
                steps[key].append(timed_step(pipelines[key], mesh, microbatches))
        for (contender, name), found in steps.items():
            what = {"contender": contender, "schedule": name, "microbatches": microbatches}
            records.append(what | {key: [step[key] for step in found] for key in ("makespan", "slept")})
    return records


# ---- Memory of stages that compute


class Blocks(nn.Module):
    """MLP blocks with a residual, [s, 1, h] -> the same; on the last stage a scalar. Keeps nine h a token and block."""

    def __init__(self, blocks: int, hidden: int, last: bool):
        super().__init__()
        self.up = nn.ModuleList(ReplicatedLinear(hidden, 4 * hidden) for _ in range(blocks))
        self.down = nn.ModuleList(ReplicatedLinear(4 * hidden, hidden) for _ in range(blocks))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)
        self.last = last

    def forward(self, x: torch.Tensor | None, microbatch: torch.Tensor) -> torch.Tensor:
        y = microbatch if x is None else x
        for up, down in zip(self.up, self.down, strict=True):
            y = y + down(F.gelu(up(y)))
        return y.square().mean() if self.last else y


def peak_bytes(trace: Path) -> int:
    """The most that was allocated at once of what was allocated while the profiler ran."""
    events = json.loads(trace.read_text())["traceEvents"]
    return max((event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]"), default=0)


def measure_memory(mesh: Mesh, tables: Iterable[Schedule], blocks: int = 8, tokens: int = 64) -> list[list[float]]:
    """For each table, for each rank: the peak of all memory that a step allocates, in shares of one micro-batch.

    blocks: of one rank, divided among its stages. Parameters and main gradients are there before; messages, gradients
    of activations and temporary values count. A share is what another micro-batch adds to the peak of GPipe.
    """
    hidden = 64
    shape = torch.Size((tokens, 1, hidden))

    def peak(table: Schedule) -> int:
        mine = table.stages_of(mesh.pp.rank)
        stages = {s: Blocks(blocks // len(mine), hidden, s == table.stages - 1) for s in mine}
        named = [(f"{s}.{name}", p) for s, stage in stages.items() for name, p in stage.named_parameters()]
        reducer, runtime = GradientReducer(named, mesh), PipelineRuntime(mesh, stages, torch.float32)
        microbatches = [torch.randn(shape) for _ in range(table.microbatches)]

        def step() -> None:
            runtime.run(table, microbatches, shape, reducer)
            reducer.finish()

        step()  # what is allocated once
        return profiled(step)

    ranks = mesh.pp.size
    share = (peak(make_schedule("gpipe", ranks, 8)) - peak(make_schedule("gpipe", ranks, 4))) / 4
    own = [peak(table) / share for table in tables]
    return [list(row) for row in zip(*gather_objects(own, mesh.pp), strict=True)]


def profiled(step: Callable[[], None]) -> int:
    """Bytes of CPU memory that `step` had allocated at most."""
    with tempfile.TemporaryDirectory() as directory:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
        trace = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        return peak_bytes(trace)


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    init_distributed("gloo")
    mesh = Mesh.create(Layout(pp=options["ranks"]))
    answer: dict[str, Any] = {"message": message_seconds(mesh), "idle": measure_idle(mesh, options)}
    if options["memory"]:
        tables = [make_schedule(name, mesh.pp.size, max(options["microbatches"])) for name in options["schedules"]]
        answer["memory"] = dict(zip(options["schedules"], measure_memory(mesh, tables), strict=True))
    if mesh.rank == 0:
        print(json.dumps(answer))
    destroy()


if __name__ == "__main__":
    main()
