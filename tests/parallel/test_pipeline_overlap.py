"""A forward and a backward that run together: tables, simulation, failures, and the same gradients."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallel import comm
from parallel.comm import Exchange, Work, finish_exchange, start_exchange
from parallel.gradients import GradientReducer
from parallel.mesh import Axis, Layout, Mesh
from parallel.pipeline.check import check
from parallel.pipeline.make import make_schedule
from parallel.pipeline.measured import Measured, costs_of, read_measured, write_measured
from parallel.pipeline.messages import plan_messages
from parallel.pipeline.plot import cells
from parallel.pipeline.profile import ActionClock
from parallel.pipeline.runtime import PipelineRuntime
from parallel.pipeline.schedule import Action, Kind, Schedule
from parallel.pipeline.simulate import Costs, ShareCosts, critical_path, simulate
from parallel.sharding import Sharding
from parallel.weight_gradient import linear, will_add_its_gradient
from tests.parallel.test_schedules import table

RunRanks = Callable[..., list[Any]]
WIDTH = 5
SHAPE = torch.Size((4, 1, WIDTH))


def paired(text: str, placement: tuple[int, ...], microbatches: int, *together: tuple[int, ...]) -> Schedule:
    return dataclasses.replace(table(text, placement, microbatches), together=together)


def words(schedule: Schedule, rank: int) -> list[str]:
    row = schedule.actions[rank]
    return ["+".join(str(row[place]) for place in places) for places in schedule.cells(rank)]


@pytest.mark.parametrize("ranks", range(1, 9))
def test_dualpipe_v_with_pairs_is_the_same_table_legal_at_any_size(ranks: int) -> None:
    for microbatches in (*range(1, 2 * ranks + 3), 5 * ranks):
        plain = make_schedule("dualpipe-v", ranks, microbatches)
        schedule = make_schedule("dualpipe-v", ranks, microbatches, together=True)
        check(schedule)
        assert schedule.actions == plain.actions and schedule.promised_peak == plain.promised_peak
        assert not plain.together and not schedule.forward_only().together
        steady = max(0, microbatches - 2 * ranks)
        for rank, pairs in enumerate(schedule.together):
            # DeepSeek's phases 4 and 5; the last rank's first backward isn't held up.
            count = 2 * (steady + rank + 1) + ranks - rank - 1 - (rank == ranks - 1)
            if microbatches >= 2 * ranks:
                assert len(pairs) == count, (rank, microbatches)
            for place in pairs:
                forward, backward = schedule.actions[rank][place : place + 2]
                assert (forward.kind, backward.kind) == (Kind.FORWARD, Kind.BACKWARD)
                assert forward.stage + backward.stage == 2 * ranks - 1, "one goes down the V and the other up"


def test_the_pairs_are_those_of_deepseeks_figure() -> None:
    schedule = make_schedule("dualpipe-v", 2, 4, together=True)
    assert words(schedule, 0)[7:12] == ["F0.3+B3.1", "F3.2+B0.0", "B3.2", "F3.3+B0.1", "B3.3"]
    assert words(schedule, 1)[4:9] == ["F1.2", "B2.0", "F2.2+B1.0", "F1.3+B2.1", "F2.3+B1.1"]


LEGAL = "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2\nF1.0 B1.0 F1.1 B1.1 F1.2 B1.2"


@pytest.mark.parametrize(
    "together, error",
    [
        (((0,), ()), "rank 0 runs F0.0 and F0.1 together, which must be a forward and the B or I after it"),
        (((2,), ()), "rank 0 runs B0.0 and F0.2 together"),
        (((5,), ()), "rank 0 runs B0.2 together"),
        (((-1,), ()), "rank 0 runs place -1 together"),
        (((), (0,)), "rank 1 runs B1.0 together with F1.0, which it needs"),
        (((1,),), "tells for 1 ranks what runs together, it has 2"),
    ],
)
def test_what_cannot_run_together_is_refused(together: tuple[tuple[int, ...], ...], error: str) -> None:
    check(paired(LEGAL, (0, 1), 3, (1, 3), ()))
    with pytest.raises(ValueError) as caught:
        check(paired(LEGAL, (0, 1), 3, *together))
    assert error in str(caught.value)


def test_a_pair_that_waits_for_itself_over_another_rank_is_refused() -> None:
    """Rank 1 runs B1.0 after F1.1, so the gradient that B0.0 waits for needs the F0.1 that B0.0 is joined with."""
    text = "F0.0 F0.1 B0.0 B0.1\nF1.0 F1.1 B1.0 B1.1"
    check(paired(text, (0, 1), 2))
    with pytest.raises(ValueError, match=r"deadlocks: rank 0 at F0\.1 with B0\.0; rank 1 at F1\.1"):
        check(paired(text, (0, 1), 2, (1,), ()))


def test_receives_of_both_are_posted_before_a_pair_and_nothing_inside_it() -> None:
    for ranks, microbatches in ((2, 6), (3, 7), (4, 12)):
        schedule = make_schedule("dualpipe-v", ranks, microbatches, together=True)
        for rank, plan in enumerate(plan_messages(schedule)):
            posted = {later: place for place, laters in enumerate(plan.posts) for later in laters}
            assert set(posted) == set(plan.received)
            for place in schedule.together[rank]:
                assert not plan.posts[place + 1] and not plan.over[place + 1]
                assert max(posted.get(place, -1), posted.get(place + 1, -1)) <= place


def test_a_pair_starts_with_both_inputs_and_hands_both_results_on_at_its_end() -> None:
    schedule = paired(LEGAL, (0, 1), 3, (1, 3), ())
    costs = Costs.even((0, 1), ShareCosts(2, 3, 4, 0.5))
    line = simulate(schedule, costs)
    spans = {
        a: s for row, times in zip(schedule.actions, line.spans, strict=True) for a, s in zip(row, times, strict=True)
    }

    def of(text: str) -> Any:
        return spans[Action(Kind(text[0]), int(text[1]), int(text[3]))]

    # B0.0 gets its gradient at 2 + 0.5 + 2 + 7 + 0.5: the F0.1 that is joined with it waits for that too.
    assert of("F0.1") == (12, 14) and of("B0.0") == (14, 21)
    assert of("F1.1").start == 21.5, "F0.1 is handed on when B0.0 has ended"
    path = critical_path(line, costs)
    assert [str(a) for a in path[:6]] == ["F0.0", "F1.0", "B1.0", "F0.1", "B0.0", "F1.1"]
    assert path[-1] == max(spans, key=lambda a: spans[a].end)
    ahead = simulate(dataclasses.replace(schedule, together=()), costs)
    assert ahead.makespan < line.makespan
    assert [cell.joined for cell in cells(line)[0]] == [False, True, False, True, False, False]


def test_pairs_idle_as_documented_where_they_hide_nothing() -> None:
    for p, m in ((2, 4), (4, 8), (4, 16), (8, 16)):
        idle = []
        for together in (False, True):
            schedule = make_schedule("dualpipe-v", p, m, together=together)
            idle.append(simulate(schedule, Costs.even(schedule.placement, ShareCosts(1, 1, 1))).wall_idle(0))
        assert idle[1] - idle[0] == pytest.approx((p - 1) / 2)


def test_other_schedules_have_no_pairs() -> None:
    for name in ("1f1b", "zb-v", "auto", "interleaved"):
        with pytest.raises(ValueError, match=f"{name} runs no forward together with a backward: choose dualpipe-v"):
            make_schedule(name, 2, 4, together=True)


def test_each_action_of_a_pair_is_timed_by_what_it_ran_itself() -> None:
    clock, moments = ActionClock(torch.device("cpu")), iter([0.0, 1.0, 3.0, 3.0, 3.0, 4.0, 8.0, 9.0])
    clock._now = lambda: next(moments)  # type: ignore[method-assign]
    clock.begin(make_schedule("dualpipe-v", 1, 1), Axis("pp", (0,), 0))
    for turns in (0, 3):  # the backward begins: a turn at once
        clock.start()
        for _ in range(turns):
            clock.turn()
        clock.stop()
    # 1 to 3 alone; then from 3: the backward 3 to 4, the forward 4 to 8, the backward 8 to 9.
    assert clock.spans() == [(1.0, 3.0), (3.0, 7.0), (7.0, 9.0)]


def test_a_measured_file_keeps_what_ran_together_and_its_messages(tmp_path: Path) -> None:
    schedule = make_schedule("dualpipe-v", 3, 8, together=True)
    costs = Costs.even(schedule.placement, ShareCosts(1, 1.2, 0.9, 0.25))
    measured = Measured(simulate(schedule, costs), 3, 0.0)
    file, _ = write_measured(tmp_path, measured)
    assert read_measured(file).timeline.schedule == schedule
    assert costs_of(measured.timeline).send == pytest.approx(0.25)


class Exchanging(nn.Module):
    """tanh(x Wᵀ) whose rows are handed to the other ranks and back; notes in order what it does.

    fails: raised instead of the second wait of that kind, "F" or "B", once.
    """

    def __init__(self, seed: int, stage: int, last: bool, axis: Axis, happened: list[str]):
        super().__init__()
        generator = torch.Generator().manual_seed(seed + stage)
        self.weight = will_add_its_gradient(nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5))
        self.weight.sharding = Sharding()  # type: ignore[attr-defined]
        self.stage, self.last, self.axis, self.happened = stage, last, axis, happened
        self.fails = ""

    def forward(self, x: torch.Tensor | None, microbatch: torch.Tensor) -> torch.Tensor:
        y = linear(microbatch if x is None else x, self.weight).tanh()
        rows = [y.shape[0] // self.axis.size] * self.axis.size
        exchange = Exchange(self.axis, rows, rows)
        y = Noted.apply(y, self, "launch", "wait")
        (under_way,) = start_exchange(exchange, y)
        (y,) = finish_exchange(exchange, under_way)
        y = Noted.apply(y, self, "wait", "launch").sin()
        return (y * microbatch.cos()).square().sum() if self.last else y


class Noted(torch.autograd.Function):
    """x, and a note of what comes next or has come in each direction."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stage: Exchanging, here: str, back: str) -> torch.Tensor:
        ctx.stage, ctx.back = stage, back
        note(stage, "F", here)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        note(ctx.stage, "B", ctx.back)
        return grads[0], None, None, None


def note(stage: Exchanging, kind: str, what: str) -> None:
    stage.happened.append(f"{kind}{stage.stage} {what}")
    if what == "wait" and stage.fails == kind:
        raise RuntimeError(f"{kind} of stage {stage.stage} fails")


class Ranks:
    """Toy stages with exchanges over ep, and dualpipe-v over pp, with pairs or without."""

    def __init__(self, seed: int, layout: Layout, microbatches: int):
        self.mesh = Mesh.create(layout)
        plain = make_schedule("dualpipe-v", layout.pp, microbatches)
        self.tables = {False: plain, True: make_schedule("dualpipe-v", layout.pp, microbatches, together=True)}
        self.happened: list[str] = []
        self.stages = {
            s: Exchanging(seed, s, s == plain.stages - 1, self.mesh.ep, self.happened)
            for s in plain.stages_of(self.mesh.pp.rank)
        }
        named = [(f"{s}.weight", stage.weight) for s, stage in self.stages.items()]
        self.reducer = GradientReducer(named, self.mesh)
        self.runtime = PipelineRuntime(self.mesh, self.stages, torch.float32)
        generator = torch.Generator().manual_seed(seed + self.mesh.ep.rank)
        self.microbatches = [torch.randn(SHAPE, generator=generator) for _ in range(microbatches)]

    def gradients(self, together: bool) -> list[torch.Tensor]:
        self.happened.clear()
        self.reducer.zero()
        self.runtime.run(self.tables[together], self.microbatches, SHAPE, self.reducer)
        self.reducer.finish()
        return [p.main_grad.clone() for p in self.reducer.parameters]  # type: ignore[attr-defined]


class Waited:
    """A message under way that notes when the host really waits for it."""

    def __init__(self, work: Work, number: int, events: list[str]):
        self.work, self.number, self.events = work, number, events

    def wait(self) -> None:
        self.events.append(f"wait {self.number}")
        self.work.wait()


def with_and_without(seed: int, pp: int) -> dict[str, Any]:
    ranks = Ranks(seed, Layout(pp=pp, ep=2), 6)
    ranks.runtime.clock = clock = ActionClock(ranks.mesh.device)
    events: list[str] = []
    launch = comm.dist.all_to_all_single

    def watched(*args: Any, **options: Any) -> Waited:
        number = len(events)
        events.append(f"launch {number}")
        return Waited(launch(*args, **options), number, events)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm.dist, "all_to_all_single", watched)
        found: dict[str, Any] = {"off": ranks.gradients(False), "happened off": list(ranks.happened)}
        found["events off"] = list(events)
        events.clear()
        found |= {"on": ranks.gradients(True), "happened": list(ranks.happened), "spans": clock.spans()}
        found["events"] = events
    found["row"] = [str(a) for a in ranks.tables[True].actions[ranks.mesh.pp.rank]]
    found["together"] = ranks.tables[True].together[ranks.mesh.pp.rank]
    found["again"] = ranks.gradients(True)
    return found


def hidden(events: list[str]) -> int:
    """How many messages were under way when another one was launched: launched, and not yet waited for."""
    place = {event: i for i, event in enumerate(events)}
    launches = [event for event in events if event.startswith("launch")]
    return sum(place[event.replace("launch", "wait")] > place[event] + 1 for event in launches)


@pytest.mark.parametrize("pp", [1, 2])
def test_pairs_change_when_things_happen_and_no_bit_of_the_gradients(run_ranks: RunRanks, seed: int, pp: int) -> None:
    results = run_ranks(2 * pp, with_and_without, seed, pp)
    for found in results:
        for off, on, again in zip(found["off"], found["on"], found["again"], strict=True):
            assert off.any() and torch.equal(off, on) and torch.equal(on, again)
        assert sorted(found["happened"]) == sorted(found["happened off"])
        # It isn't enough that they change: the host must not have waited before.
        assert hidden(found["events off"]) == 0
        assert hidden(found["events"]) >= 2 * sum(a[0] == "F" and b[0] == "B" for a, b in pairs_of(found))
        # Off, whoever launches waits next. On, the other one's wait and launch come between.
        pair = ["B1 launch", "F0 launch", "B1 wait", "F0 wait"]
        assert contains(found["happened"], pair) == (pp == 1)
        assert not any(
            contains(found["happened off"], [f"F{s} launch", f"B{t} wait"]) for s in range(4) for t in range(4)
        )
        assert any(contains(found["happened"], [f"F{s} launch", f"B{t} wait"]) for s in range(4) for t in range(4))
        spans = found["spans"]
        assert len(spans) == len(found["row"])
        assert all(a.end <= b.start + 1e-9 for a, b in zip(spans, spans[1:], strict=False))
    # The two ranks that exchange do all in one order: else their messages would be taken for each other's.
    for first in range(0, 2 * pp, 2):
        assert results[first]["happened"] == results[first + 1]["happened"]


def pairs_of(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [(found["row"][place], found["row"][place + 1]) for place in found["together"]]


def contains(happened: list[str], run: list[str]) -> bool:
    return any(happened[i : i + len(run)] == run for i in range(len(happened)))


def failing(seed: int, kind: str) -> tuple[str, str]:
    """What is raised where one rank's forward or backward fails inside a pair, and what the runtime says it was in."""
    ranks = Ranks(seed, Layout(ep=2), 6)
    ranks.gradients(True)
    baton, stage = ranks.mesh.baton, ranks.stages[0]
    together = baton.together

    def armed(*works: Any) -> Any:
        stage.fails = kind
        return together(*works)

    baton.together = armed  # type: ignore[method-assign]
    try:
        ranks.gradients(True)
    except RuntimeError as error:
        return str(error), ranks.runtime.doing() or ""
    return "nothing was raised", ""


@pytest.mark.parametrize("kind", ["F", "B"])
def test_an_error_in_a_pair_is_raised_and_both_are_named(run_ranks: RunRanks, seed: int, kind: str) -> None:
    for error, doing in run_ranks(2, failing, seed, kind):
        assert error == f"{kind} of stage 0 fails"
        assert "was in F" in doing and " with B" in doing


DYING = """
import os, sys
import torch
import torch.distributed as dist
from parallel.mesh import Layout
from tests.parallel.test_pipeline_overlap import Ranks

torch.set_num_threads(1)
dist.init_process_group("gloo")
ranks = Ranks(0, Layout(ep=2), 6)
ranks.gradients(True)
if dist.get_rank() == 1:
    ranks.mesh.baton.together = lambda *works: os._exit(9)
ranks.gradients(True)
"""


def test_a_peers_death_in_a_pair_ends_the_others_with_an_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    root = str(Path(__file__).parents[2])
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": root}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", DYING],
            env=os.environ | address | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [1, 9], errors
    last = errors[0].strip().splitlines()[-1]
    assert "RuntimeError: " in last and "onnection" in last, errors[0]
    assert "in wait\n" in errors[0], "the traceback shows where it waited"
