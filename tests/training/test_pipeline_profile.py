"""--profile-pipeline on real ranks: the measured time line has each action once, in order, with dependencies kept."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel.mesh import Layout, Mesh
from parallel.pipeline.make import make_schedule
from parallel.pipeline.measured import read_measured
from parallel.pipeline.profile import ActionClock
from parallel.pipeline.schedule import dependencies
from tests.layouts import Job, flags_of, microbatches_of_step
from training.arguments import Arguments
from training.engine import Engine
from training.pipeline import stages_in_words
from training.pipeline_profile import PipelineProfile

STAGES = "stages: as told"
RunRanks = Callable[..., list[Any]]
JOBS = {
    "pp 4": Job(Layout(pp=4), overrides={"num_hidden_layers": 4}, flags={"pipeline_schedule": "zb-h1"}),
    "pp 2, dp 2": Job(Layout(pp=2), overrides={"num_hidden_layers": 4}, flags={"pipeline_schedule": "zb-v"}),
}


def train_profiled(job: Job, directory: str) -> tuple[bool, list[bool]]:
    """Three steps, of which the second is measured; returns whether this rank told of it, and when it had a clock."""
    mesh, config = Mesh.create(job.layout), job.model()
    engine = Engine(config, flags_of(job), mesh)
    profile = PipelineProfile(engine.runtime, Path(directory), 0, Arguments().replace(train_iters=2), STAGES)
    told: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = told.append  # type: ignore[method-assign]
    logging.getLogger("training.pipeline_profile").addHandler(handler)
    logging.getLogger("training.pipeline_profile").setLevel(logging.INFO)
    clocks = []
    for step in (1, 2, 3):
        batches = microbatches_of_step(job, step, config.vocab_size, mesh.dp.rank, mesh.dp.size)
        profile.before(step)
        clocks.append(engine.runtime.clock is not None)
        engine.train_step(batches, 1e-3)
        profile.after(step)
        engine.evaluate(batches)  # of which nothing may be measured
    logging.getLogger("training.pipeline_profile").removeHandler(handler)
    return bool(told), clocks


@pytest.mark.parametrize("layout", JOBS)
def test_a_measured_step_has_each_action_once_and_keeps_dependencies(
    run_ranks: RunRanks, tmp_path: Path, layout: str
) -> None:
    job = JOBS[layout]
    outcomes = run_ranks(4, train_profiled, job, str(tmp_path / "pipeline"))
    assert [told for told, _ in outcomes] == [True, False, False, False]
    assert all(clocks == [False, True, False] for _, clocks in outcomes)

    assert (tmp_path / "pipeline" / "step_00002.txt").read_text().endswith(f"idle\n\n{STAGES}\n")
    measured = read_measured(tmp_path)
    schedule, spans = measured.timeline.schedule, measured.timeline.spans
    microbatches = job.global_batch // (4 // job.layout.pp)
    assert measured.step == 2
    assert schedule == make_schedule(job.flags["pipeline_schedule"], job.layout.pp, microbatches)
    assert [len(row) for row in spans] == [len(row) for row in schedule.actions]
    when = {}
    for row, times in zip(schedule.actions, spans, strict=True):
        assert all(start < end for start, end in times)
        assert all(before.end <= after.start for before, after in zip(times, times[1:], strict=False))
        when |= dict(zip(row, times, strict=True))
    # A result can't be used before it is there, but for what the ranks' clocks may be off.
    tolerance = measured.alignment_seconds
    assert 0 < tolerance < 10
    for action, needed in dependencies(schedule).items():
        for sender in needed:
            assert when[action].start >= when[sender].end - tolerance, (str(sender), str(action))
    assert min(start for row in spans for start, _ in row) == 0.0


@pytest.mark.parametrize(("done", "last", "step"), [(0, 100, 5), (0, 3, 3), (40, 100, 45), (98, 100, 100)])
def test_the_fifth_step_of_a_start_is_measured_or_its_last(done: int, last: int, step: int, tmp_path: Path) -> None:
    runtime: Any = None  # not touched before a step
    assert PipelineProfile(runtime, tmp_path, done, Arguments().replace(train_iters=last), STAGES).step == step


def test_stages_are_told_with_their_ranks_and_layers() -> None:
    assert stages_in_words((0, 1, 1, 0), (0, 1, 2, 1), 1) == (
        "stages: 0 on pipeline rank 0: embedding, no layers | 1 on pipeline rank 1: layer 0 | "
        "2 on pipeline rank 1: layers 1 to 2 | 3 on pipeline rank 0: layer 3, head, 1 MTP layer"
    )
    assert stages_in_words((0,), (4,), 0) == "stages: 0 on pipeline rank 0: embedding, layers 0 to 3, head"


def test_a_full_disk_costs_the_drawing_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = ActionClock(torch.device("cpu"))
    mesh = Mesh.create(Layout())
    runtime: Any = SimpleNamespace(mesh=mesh, clock=clock)
    schedule = make_schedule("1f1b", 1, 1)
    clock.begin(schedule, mesh.pp)
    for _ in schedule.actions[0]:
        clock.start()
        clock.stop()
    (tmp_path / "pipeline").write_text("a file where the directory should be")
    profile = PipelineProfile(runtime, tmp_path / "pipeline", 0, Arguments().replace(train_iters=1), STAGES)
    profile.after(1)
    (warning,) = caplog.records
    assert warning.levelname == "WARNING" and f"{tmp_path / 'pipeline'}" in warning.getMessage()
    assert "pipeline of step 1 can't be written" in warning.getMessage()
