"""The pipeline benchmark: its arithmetic, its sleeping stages, a tiny run, and the memory of stages that compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from benchmarks.pipeline import idle_table, main, measure, memory_table, parse, rows, verdicts
from benchmarks.pipeline_rank import (
    SHAPE,
    Sleeper,
    SleepingStage,
    TorchSleepingStage,
    measure_idle,
    measure_memory,
    message_seconds,
)
from parallel.mesh import Layout, Mesh
from parallel.pipeline.make import make_schedule
from parallel.pipeline.schedule import Kind, peak_activations
from parallel.weight_gradient import WeightGradientQueue

RunRanks = Callable[..., list[Any]]


def record(contender: str, schedule: str, makespan: list[float], microbatches: int = 8) -> dict[str, Any]:
    slept = [microbatches * 0.06 * 1.01] * len(makespan)
    what = {"contender": contender, "schedule": schedule, "microbatches": microbatches}
    return what | {"makespan": makespan, "slept": slept}


def test_idle_is_what_the_work_that_was_asked_for_leaves_of_the_makespan() -> None:
    found = {
        "message": 0.001,
        "idle": [
            record("ours", "zb-v", [0.516, 0.512, 0.9]),
            record("torch", "zb-v", [0.6, 0.6, 0.6]),
            record("ours", "v-min", [0.6, 0.6, 0.6]),
        ],
    }
    zb_v, v_min = rows(found, 4, [20.0, 20.0, 20.0])
    assert zb_v.ours == pytest.approx(1 - 480 / 516) and zb_v.best == pytest.approx(1 - 480 / 512)
    assert zb_v.theirs == pytest.approx(0.2) and v_min.theirs is None
    assert zb_v.alone == pytest.approx(1 - 480 / 510)  # 5.9 %, the floor of this size
    assert zb_v.simulated > zb_v.alone and zb_v.late == pytest.approx(0.01)
    lines = idle_table([zb_v, v_min]).splitlines()
    assert lines[2].startswith(f"| zb-v | 8 | {zb_v.simulated:.1%} | 5.9% | 7.0% |")
    assert lines[2].endswith("| 1.0% | 20.0% |")
    assert {line.count("|") for line in lines} == {10}


def test_each_claim_fails_where_it_does_not_hold() -> None:
    def checked(ours: float, theirs: float, microbatches: int = 8) -> list[bool]:
        work = 0.06 * microbatches
        idle = [record("ours", "zb-v", [work / (1 - ours)], microbatches)]
        idle += [record("torch", "zb-v", [work / (1 - theirs)], microbatches)]
        return [holds for _, holds in verdicts(rows({"message": 0.0, "idle": idle}, 4, [20.0] * 3), True)]

    assert checked(0.07, 0.08) == [True, True, True]
    assert checked(0.085, 0.08) == [False, False, False]
    assert checked(0.049, 0.08, 16) == [True, True, True]
    assert checked(0.051, 0.08, 16) == [False, True, False]


@pytest.mark.parametrize("options", ["--milliseconds 1,2", "--milliseconds 0", "--schedules 1f1b,zb", "--ranks 0"])
def test_wrong_options_are_refused(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(options.split())
    assert options.split()[0] in capsys.readouterr().err


def sleeper() -> Sleeper:
    return Sleeper(dict.fromkeys((Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT), 0.001))


def test_each_sleep_comes_in_its_own_action_ours_and_torch_s() -> None:
    """That torch's split leaves the weight's sleep to its weight action, and doesn't sleep twice for the input."""
    ours = sleeper()
    stage = SleepingStage(ours, last=False)
    total = torch.zeros(1)
    stage.weight.main_grad, stage.weight.main_grad_added = total, lambda: None  # type: ignore[attr-defined]
    queue = WeightGradientQueue(stage.parameters())
    x = torch.rand(SHAPE).requires_grad_()
    y = stage(x, x)
    assert ours.counts == {"F": 1}
    with queue.collect() as deferred:
        y.backward(torch.ones(SHAPE))
    assert ours.counts == {"F": 1, "I": 1} and x.grad is not None
    queue.run(deferred)
    assert ours.counts == {"F": 1, "I": 1, "W": 1} and total.item() == SHAPE.numel()

    theirs = sleeper()
    torch_stage = TorchSleepingStage(theirs, first=False)
    x = torch.rand(SHAPE).requires_grad_()
    y = torch_stage(x)
    assert theirs.counts == {"F": 1}
    _, groups = stage_backward_input([y], [torch.ones(SHAPE)], [x], torch_stage.parameters())
    assert theirs.counts == {"F": 1, "I": 1} and x.grad is not None
    stage_backward_weight(torch_stage.parameters(), groups)
    assert theirs.counts == {"F": 1, "I": 1, "W": 1} and torch_stage.weight.grad.item() == SHAPE.numel()  # type: ignore[union-attr]


def tiny(options: dict[str, Any]) -> dict[str, Any]:
    mesh = Mesh.create(Layout(pp=2))
    return {"message": message_seconds(mesh), "idle": measure_idle(mesh, options)}


def test_a_tiny_run_measures_ours_and_torch_s(run_ranks: RunRanks) -> None:
    """Split on both sides; every rank raises where a stage's sleeps aren't one for each micro-batch and kind."""
    options = {"microbatches": [4], "milliseconds": [2.0] * 3, "rounds": 1, "torch": True}
    found = run_ranks(2, tiny, options | {"schedules": ["1f1b", "zb-v"]})[0]
    kinds = [(r["contender"], r["schedule"]) for r in found["idle"]]
    assert kinds == [("ours", "1f1b"), ("torch", "1f1b"), ("ours", "zb-v"), ("torch", "zb-v")]
    assert found["message"] > 0
    for row in rows(found, 2, [2.0] * 3):
        assert 0 < row.simulated <= row.ours < 1 and row.theirs is not None


@pytest.mark.full
def test_ranks_that_are_started_answer_and_a_failing_one_is_named() -> None:
    words = "--ranks 2 --microbatches 4 --milliseconds 1 --rounds 1 --no-torch --schedules".split()
    found = measure(parse([*words, "1f1b,zb-v"]))
    assert [r["schedule"] for r in found["idle"]] == ["1f1b", "zb-v"] and len(found["memory"]["zb-v"]) == 2
    options = parse([*words, "1f1b"])
    options.schedules = ["unknown"]
    with pytest.raises(RuntimeError, match="rank 0 ended with status 1"):
        measure(options)


def test_the_command_exits_by_its_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["pipeline", "--microbatches", "8", "--milliseconds", "20"])
    for seconds, status in ((0.515, 0), (0.6, 1)):
        idle = [record("ours", "zb-v", [seconds])]
        found = {"message": 0.0, "idle": idle, "memory": {"zb-v": [4.25, 4.5, 4.5, 4.25]}}
        monkeypatch.setattr("benchmarks.pipeline.measure", lambda options, found=found: found)
        assert main() == status
        assert ("FAILS" in capsys.readouterr().out) == bool(status)


MEASURED = ("1f1b", "zb-v", "v-half", "v-min")


def memory_on_each_rank() -> dict[str, list[float]]:
    mesh = Mesh.create(Layout(pp=4))
    tables = [make_schedule(name, 4, 8) for name in MEASURED]
    names = [*MEASURED, "of twice as many"]
    return dict(zip(names, measure_memory(mesh, [*tables, make_schedule(MEASURED[0], 4, 16)]), strict=True))


def test_what_computing_stages_keep_is_what_their_tables_promise(run_ranks: RunRanks) -> None:
    """Measured bytes, messages and temporary values with them, in shares of one micro-batch."""
    found = run_ranks(4, memory_on_each_rank)[0]
    # Nothing is kept that grows with the number of micro-batches, sent tensors included.
    assert found.pop("of twice as many") == pytest.approx(found["1f1b"], abs=0.01)
    for name, measured in found.items():
        table = make_schedule(name, 4, 8)
        for rank, (peak, counted) in enumerate(zip(measured, peak_activations(table), strict=True)):
            assert counted - 0.1 < peak < counted + 1, f"{name}, rank {rank}"
        assert table.promised_peak is not None and max(measured) < table.promised_peak + 1, name
    peaks = {name: max(measured) for name, measured in found.items()}
    assert peaks["v-min"] < peaks["v-half"] < min(peaks["zb-v"], peaks["1f1b"])
    assert peaks["zb-v"] == pytest.approx(peaks["1f1b"], abs=0.5)
    assert memory_table(found, 4, 8).splitlines()[2].startswith(f"| 1f1b | {found['1f1b'][0]:.2f} (4.00) |")
