"""Measured time lines: the clock, joining ranks, files that come back, costs, the trace. Real runs: tests/training."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.mesh import Layout, Mesh
from parallel.pipeline.make import make_schedule
from parallel.pipeline.measured import (
    Measured,
    beside_simulation,
    chrome_trace,
    costs_of,
    read_measured,
    write_measured,
)
from parallel.pipeline.profile import ActionClock, join, measured_timeline
from parallel.pipeline.schedule import Action, Kind, Schedule
from parallel.pipeline.simulate import Costs, ShareCosts, Span, Timeline, simulate

RunRanks = Callable[..., list[Any]]
SPLIT, WHOLE = ("zb-h1", "zb-v", "v-half"), ("1f1b", "gpipe", "interleaved")


def random_costs(schedule: Schedule, seed: int) -> Costs:
    draw = random.Random(seed)
    forward, inputs, weights = (tuple(draw.uniform(0.5, 2.0) for _ in schedule.placement) for _ in range(3))
    even = Costs.even(schedule.placement, ShareCosts())
    return Costs(forward, inputs, weights, draw.uniform(0.05, 0.3), even.activations)


def random_timeline(name: str = "zb-h1", seed: int = 0) -> Timeline:
    schedule = make_schedule(name, 3, 6)
    return simulate(schedule, random_costs(schedule, seed))


LATE = 1.0


def sleep_on_two_ranks(seconds: float) -> tuple[Measured, float]:
    """Rank 1 comes late, and starts when rank 0 has ended; returns the time line and this rank's error of alignment."""
    mesh = Mesh.create(Layout(pp=2))
    forward = [Action(Kind.FORWARD, stage, 0) for stage in range(2)]
    schedule = Schedule("two forwards", 1, (0, 1), tuple((action,) for action in forward))
    clock = ActionClock(torch.device("cpu"))
    time.sleep(LATE * mesh.pp.rank)
    clock.begin(schedule, mesh.pp)
    time.sleep(2 * seconds * mesh.pp.rank)
    clock.start()
    time.sleep(seconds)
    clock.stop()
    return measured_timeline(clock, mesh.pp, step=7), clock.barrier_seconds


def test_ranks_are_aligned_however_late_one_comes(run_ranks: RunRanks) -> None:
    (measured, error_0), (same, error_1) = run_ranks(2, sleep_on_two_ranks, 0.1)
    assert measured == same and measured.step == 7
    assert measured.alignment_seconds == max(error_0, error_1)
    (first,), (second,) = measured.timeline.spans
    error = measured.alignment_seconds
    assert first.start == 0.0 and first.end >= 0.1
    # 0.2 s after rank 0, by the test's own sleeps.
    assert second.start >= 0.2 - error and second.end - second.start >= 0.1
    # In the second barrier nobody waits for the late one; were the first one timed, this would be a second.
    assert error < LATE / 2


def test_a_clock_forgets_the_run_before() -> None:
    clock, axis = ActionClock(torch.device("cpu")), Mesh.create(Layout()).pp
    schedule = make_schedule("1f1b", 1, 1)
    for _ in range(2):
        clock.begin(schedule, axis)
        for _ in schedule.actions[0]:
            clock.start()
            clock.stop()
    spans = clock.spans()
    assert len(spans) == 2 and 0 <= spans[0].start <= spans[0].end <= spans[1].start


def test_on_a_gpu_events_are_recorded_and_the_host_waits_only_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch.cuda replaced: a device whose time goes on by 2 ms with each event."""
    calls: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self, stream: str) -> None:
            assert stream == "computing"
            calls.append("record")
            self.milliseconds = 2.0 * calls.count("record")

        def elapsed_time(self, later: Any) -> float:
            return later.milliseconds - self.milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "computing")
    clock = ActionClock(torch.device("cuda", 0))
    clock.begin(make_schedule("1f1b", 1, 1), Mesh.create(Layout()).pp)
    for _ in range(2):
        clock.start()
        clock.stop()
    assert calls == ["wait", *5 * ["record"]]
    assert clock.spans() == [pytest.approx((0.002, 0.004)), pytest.approx((0.006, 0.008))]


def test_joined_ranks_count_from_the_first_start() -> None:
    schedule = make_schedule("1f1b", 2, 1)
    spans = [[Span(3.0, 4.0), Span(7.0, 9.0)], [Span(4.5, 5.0), Span(5.0, 6.0)]]
    joined = join(schedule, spans, 0.25, 3).timeline
    assert joined.spans == (((0.0, 1.0), (4.0, 6.0)), ((1.5, 2.0), (2.0, 3.0)))
    with pytest.raises(ValueError, match="rank 1 timed 1 actions, its row has 2"):
        join(schedule, [spans[0], spans[1][:1]], 0.0, 3)


@pytest.mark.parametrize("name", SPLIT)
def test_costs_are_read_back_from_a_simulated_time_line(name: str) -> None:
    schedule = make_schedule(name, 3, 7)
    costs = random_costs(schedule, seed=len(name))
    found = costs_of(simulate(schedule, costs))
    for field in ("forward", "input_gradient", "weight_gradient", "send", "activations"):
        assert getattr(found, field) == pytest.approx(getattr(costs, field)), field


@pytest.mark.parametrize("name", WHOLE)
def test_a_backward_pass_that_is_never_split_counts_half_and_half(name: str) -> None:
    schedule = make_schedule(name, 3, 6)
    costs = random_costs(schedule, seed=len(name))
    found = costs_of(simulate(schedule, costs))
    whole = [a + b for a, b in zip(costs.input_gradient, costs.weight_gradient, strict=True)]
    assert found.forward == pytest.approx(costs.forward)
    assert found.input_gradient == found.weight_gradient == pytest.approx([time / 2 for time in whole])
    assert found.send == pytest.approx(costs.send)


def test_costs_are_means_and_a_lone_rank_sends_nothing() -> None:
    schedule = make_schedule("1f1b", 1, 2)
    spans = tuple(Span(*span) for span in ((0.0, 1.0), (1.0, 3.0), (4.0, 7.0), (7.0, 13.0)))
    costs = costs_of(Timeline(schedule, (spans,)))
    assert (costs.forward, costs.input_gradient, costs.send) == ((2.0,), (2.0,), 0.0)


def test_the_simulation_of_what_a_simulation_took_is_that_simulation() -> None:
    timeline = random_timeline("zb-v", seed=4)
    ((_, measured), (_, simulated)), _ = beside_simulation(Measured(timeline, 1, 0.0))
    assert measured.makespan == pytest.approx(1e3 * timeline.makespan)
    assert simulated.makespan == pytest.approx(measured.makespan)
    assert simulated.idle_share == pytest.approx(timeline.idle_share)


@pytest.mark.parametrize(("of_send", "kept"), [(0.9, True), (1.1, False)])
def test_a_message_shorter_than_clocks_are_off_is_not_measured(of_send: float, kept: bool) -> None:
    schedule = make_schedule("zb-h1", 3, 6)
    costs = random_costs(schedule, seed=2)
    measured = Measured(simulate(schedule, costs), 4, of_send * costs.send)
    ((title, _), (_, simulated)), found = beside_simulation(measured)
    assert title == f"zb-h1, step 4 measured, clocks within {1e3 * of_send * costs.send:.3g} ms"
    assert found.send == (pytest.approx(1e3 * costs.send) if kept else 0.0)
    # The other times are those measured.
    assert found.forward == pytest.approx([1e3 * time for time in costs.forward])
    assert simulated.makespan == pytest.approx(1e3 * simulate(schedule, costs).makespan) or not kept


def test_files_come_back_as_they_were_written(tmp_path: Path) -> None:
    measured = Measured(random_timeline("zb-v", seed=1), 5, 1.5e-4)
    file, trace = write_measured(tmp_path / "pipeline", measured)
    assert (file.name, trace.name) == ("step_00005.json", "step_00005.trace.json")
    for path in (file, tmp_path):
        back = read_measured(path)
        assert back.timeline.schedule == measured.timeline.schedule
        assert (back.step, back.alignment_seconds) == (5, 1.5e-4)
        for row, written in zip(back.timeline.spans, measured.timeline.spans, strict=True):
            for span, before in zip(row, written, strict=True):
                assert span == pytest.approx(before, abs=1e-9)
    write_measured(tmp_path / "pipeline", Measured(random_timeline(), 12, 0.0))
    assert read_measured(tmp_path).step == 12  # the last one of a run
    assert json.loads(trace.read_text()) == chrome_trace(measured.timeline)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "isn't a measured time line"),
        ("[]", "isn't a measured time line"),
        ('{"schedule": {"actions": [["X0.1"]]}}', "'X0.1' is no action such as F0.3"),
    ],
)
def test_a_file_of_something_else_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_measured(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.update(alignment_seconds=None), "TypeError"),
        (lambda file: file["schedule"].update(placement=[0, 0, 0, 0]), "never runs|which is not its own"),
        (lambda file: file["schedule"].update(placement=[0, 1]), "which is not its own|IndexError"),
        (lambda file: (file["schedule"]["actions"][0].pop(), file["spans"][0].pop()), "never runs"),
        (lambda file: file["spans"][0].pop(), "another number of times"),
        (lambda file: file["spans"][0].__setitem__(0, ["a", "b"]), "ValueError"),
        (lambda file: file["spans"][0].__setitem__(0, [2.0, 1.0]), "ends before it starts"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: Any, message: str) -> None:
    path, _ = write_measured(tmp_path, Measured(random_timeline("zb-v", seed=1), 5, 1.5e-4))
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"isn't a measured time line .*({message})"):
        read_measured(path)


def test_a_run_that_measured_nothing_and_no_run_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--profile-pipeline"):
        read_measured(tmp_path)
    with pytest.raises(FileNotFoundError, match="doesn't exist"):
        read_measured(tmp_path / "absent")


def test_the_trace_has_every_action_and_fills_the_rest_with_idle_time() -> None:
    timeline = random_timeline("zb-v", seed=9)
    schedule = timeline.schedule
    events = chrome_trace(timeline)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {rank: f"pipeline rank {rank}" for rank in range(3)}
    for rank, (row, spans) in enumerate(zip(schedule.actions, timeline.spans, strict=True)):
        mine = [event for event in events if event["ph"] == "X" and event["pid"] == rank]
        computed = [event for event in mine if event["cat"] != "idle"]
        assert [event["name"] for event in computed] == [str(action) for action in row]
        assert [event["args"] for event in computed] == [{"stage": a.stage, "microbatch": a.microbatch} for a in row]
        for event, span in zip(computed, spans, strict=True):
            assert (event["ts"], event["dur"]) == pytest.approx(
                (1e6 * span.start, 1e6 * (span.end - span.start)), abs=0.01
            )
        now = 0.0
        for event in mine:  # one after the other, without a gap, to the end of the step
            assert event["ts"] == pytest.approx(now, abs=0.01)
            now = event["ts"] + event["dur"]
        assert now == pytest.approx(1e6 * timeline.makespan, abs=0.01)
        idle = sum(event["dur"] for event in mine if event["cat"] == "idle")
        assert idle == pytest.approx(1e6 * timeline.wall_idle(rank), abs=0.1)
