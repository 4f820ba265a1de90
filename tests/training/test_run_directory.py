"""A run is a directory: starting anew, resuming, overwriting. Ranks are real gloo processes where they matter."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallel.mesh import Layout, Mesh
from training.arguments import Arguments
from training.command_line import from_yaml
from training.failures import ConfigurationError
from training.run_directory import RunDirectory, prepare


@pytest.fixture
def arguments(tmp_path: Path) -> Arguments:
    return Arguments().replace(run_dir=str(tmp_path / "run"))


def run_a_step(arguments: Arguments) -> RunDirectory:
    """The directory of a run that did its first step."""
    directory = prepare(arguments).directory
    directory.metrics.write_text('{"step": 1}\n')
    return directory


def test_a_new_run_has_its_places_and_its_flags(arguments: Arguments) -> None:
    start = prepare(arguments)
    assert not start.resumed
    root = start.directory.root
    assert sorted(path.name for path in root.iterdir()) == ["checkpoints", "config.yaml", "lock", "logs", "tensorboard"]
    assert from_yaml((root / "config.yaml").read_text()) == arguments


def test_save_and_tensorboard_can_lie_elsewhere(arguments: Arguments, tmp_path: Path) -> None:
    moved = arguments.replace(save=str(tmp_path / "c"), tensorboard_dir=str(tmp_path / "t"))
    directory = prepare(moved).directory
    assert (directory.checkpoints, directory.tensorboard) == (tmp_path / "c", tmp_path / "t")
    assert directory.checkpoints.is_dir() and directory.tensorboard.is_dir()


def test_an_attempt_that_never_did_a_step_is_no_run(arguments: Arguments) -> None:
    directory = prepare(arguments).directory
    (directory.logs / "error_rank_00003.json").write_text("{}")
    assert not prepare(arguments).resumed
    assert not (directory.logs / "error_rank_00003.json").exists() and len(list(directory.logs.iterdir())) == 1


def test_an_earlier_run_needs_a_word(arguments: Arguments) -> None:
    run_a_step(arguments)
    with pytest.raises(ConfigurationError, match="--resume goes on with it, --overwrite moves it aside"):
        prepare(arguments)


def test_a_directory_with_only_a_launchers_logs_is_no_run(arguments: Arguments) -> None:
    logs = RunDirectory.of(arguments).logs
    logs.mkdir(parents=True)
    (logs / "launcher.log").touch()
    assert not prepare(arguments).resumed


def test_resume_without_an_earlier_run_starts_anew_and_says_so(arguments: Arguments) -> None:
    start = prepare(arguments.replace(resume=True))
    assert not start.resumed
    assert "there is no earlier run" in start.notes[0]


def test_resume_keeps_everything_and_tells_what_changed(arguments: Arguments) -> None:
    directory = run_a_step(arguments)
    (directory.checkpoints / "step_5").mkdir()
    (directory.logs / "error_rank_00003.json").write_text("{}")
    start = prepare(arguments.replace(resume=True, lr=1e-3, pipeline_model_parallel_size=4))
    assert start.resumed
    assert (directory.checkpoints / "step_5").is_dir()
    changes = next(note for note in start.notes if "--lr" in note)
    assert "--lr 0.00022 → 0.001" in changes and "--pipeline-model-parallel-size 1 → 4" in changes
    assert "--resume" not in changes
    kept = [path for path in directory.root.glob("config.*.yaml")]
    assert len(kept) == 1 and from_yaml(kept[0].read_text()) == arguments
    assert from_yaml(directory.config.read_text()).optimizer.lr == 1e-3
    assert not list(directory.logs.glob("error_rank_00003.json"))
    assert len(list(directory.logs.glob("error_rank_00003.*.json"))) == 1


def test_resume_with_the_same_flags_leaves_one_config(arguments: Arguments) -> None:
    directory = run_a_step(arguments)
    start = prepare(arguments.replace(resume=True))
    assert start.notes == (f"resuming the run in {directory.root}",)
    assert [path.name for path in directory.root.glob("config*")] == ["config.yaml"]


def test_overwrite_moves_the_earlier_run_aside_whole(arguments: Arguments) -> None:
    directory = run_a_step(arguments)
    (directory.checkpoints / "weights").write_text("precious")
    start = prepare(arguments.replace(overwrite=True))
    assert not start.resumed and not list(directory.checkpoints.iterdir())
    directory.metrics.write_text('{"step": 1}\n')
    assert start.lock is not None
    start.lock.release()
    prepare(arguments.replace(overwrite=True))  # within the same second too
    kept = sorted(directory.root.parent.glob("run*.old-*"))
    assert len(kept) == 2
    assert [path.read_text() for old in kept for path in old.glob("checkpoints/weights")] == ["precious"]
    assert any(str(old) in start.notes[0] for old in kept)


def test_checkpoints_elsewhere_count_as_a_run_and_move_aside_with_it(arguments: Arguments, tmp_path: Path) -> None:
    elsewhere = arguments.replace(save=str(tmp_path / "shared"))
    (tmp_path / "shared" / "step_00000005").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="holds an earlier run"):
        prepare(elsewhere)
    start = prepare(elsewhere.replace(overwrite=True))
    assert not start.resumed and not list((tmp_path / "shared").iterdir())
    (kept,) = tmp_path.glob("shared.old-*")
    assert (kept / "step_00000005").is_dir() and any(str(kept) in note for note in start.notes)


def test_a_place_that_cant_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="can't be written.*choose another --run-dir"):
        prepare(Arguments().replace(run_dir=str(tmp_path / "file" / "run")))


def start_on_a_rank(arguments: Arguments) -> tuple[bool, tuple[str, ...], bool] | str:
    world = Mesh.create(Layout()).world
    if os.environ["RANK"] == "1":  # a host of its own, which doesn't see rank 0's files
        arguments = arguments.replace(run_dir=arguments.run.run_dir + "_of_rank_1")
    try:
        start = prepare(arguments, world)
    except ConfigurationError as error:
        return str(error)
    return start.resumed, start.notes, start.directory.logs.is_dir()


def test_rank_0_decides_for_all(arguments: Arguments, run_ranks: Callable[..., list[Any]]) -> None:
    first, second = run_ranks(2, start_on_a_rank, arguments)
    assert first == second == (False, (f"starting anew in {arguments.run.run_dir}",), True)
    assert not Path(arguments.run.run_dir + "_of_rank_1").exists()
    RunDirectory.of(arguments).metrics.write_text('{"step": 1}\n')
    first, second = run_ranks(2, start_on_a_rank, arguments)
    assert first == second and "holds an earlier run" in first


def test_a_second_run_in_the_directory_is_refused_naming_the_first(arguments: Arguments) -> None:
    start = prepare(arguments)
    assert start.lock is not None and start.lock.works
    holder = f"process {os.getpid()} on host {socket.gethostname()}"
    for again in (arguments, arguments.replace(resume=True), arguments.replace(overwrite=True)):
        with pytest.raises(ConfigurationError, match=f"is in use by another run .{holder}, since 20"):
            prepare(again)
    start.lock.release()
    prepare(arguments)


def test_a_killed_run_leaves_no_lock(arguments: Arguments) -> None:
    take = "import sys, pathlib, time\nfrom training.run_lock import RunLock\n"
    take += "lock = RunLock.acquire(pathlib.Path(sys.argv[1]))\nprint('held', flush=True)\ntime.sleep(60)"
    file = RunDirectory.of(arguments).lock
    file.parent.mkdir(parents=True)
    holder = subprocess.Popen([sys.executable, "-c", take, str(file)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(ConfigurationError, match=f"process {holder.pid} "):
        prepare(arguments)
    holder.kill()
    holder.communicate()
    assert prepare(arguments).lock is not None


def test_overwriting_keeps_the_lock_and_the_launchers_open_logs(arguments: Arguments) -> None:
    directory = run_a_step(arguments)
    (directory.logs / "torchrun_node_0.log").write_text("this run's")
    start = prepare(arguments.replace(overwrite=True))
    assert (directory.logs / "torchrun_node_0.log").read_text() == "this run's"
    with pytest.raises(ConfigurationError, match="in use by another run"):
        prepare(arguments)
    assert start.lock is not None


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--run-dir is empty"):
        prepare(Arguments().replace(run_dir=""))
