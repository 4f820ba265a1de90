"""A run is a directory: its layout, and the three ways into it: anew, --resume, --overwrite (decision 9).

May import parallel.comm (where ranks must agree) and the standard library; free of torch until then.
"""

from __future__ import annotations

import dataclasses
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from training.arguments import Arguments
from training.command_line import from_yaml, to_yaml
from training.failures import ERROR_FILES, ConfigurationError
from training.run_lock import RunLock

if TYPE_CHECKING:
    from parallel.mesh import Axis


@dataclass(frozen=True)
class RunDirectory:
    """RUN/{config.yaml, metrics.jsonl, checkpoints/, tensorboard/, logs/rank_00000.jsonl …, pipeline/}."""

    root: Path
    checkpoints: Path
    """--save, or RUN/checkpoints."""
    tensorboard: Path
    """--tensorboard-dir, or RUN/tensorboard."""

    @classmethod
    def of(cls, arguments: Arguments) -> RunDirectory:
        """The places a run with these flags writes to; touches no file."""
        root = Path(arguments.run.run_dir)
        return cls(
            root,
            Path(arguments.checkpoint.save or root / "checkpoints"),
            Path(arguments.logging.tensorboard_dir or root / "tensorboard"),
        )

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def pipeline(self) -> Path:
        """Of --profile-pipeline; made when something is measured."""
        return self.root / "pipeline"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    def has_run(self) -> bool:
        """Whether an earlier run did a step here. One that never came so far left flags and logs: nothing to lose."""
        return self.metrics.exists() or any(_entries(self.checkpoints))


@dataclass(frozen=True)
class Start:
    """How a run starts: `resumed` goes on from what lies in the directory; `notes` are lines for the log."""

    directory: RunDirectory
    resumed: bool
    notes: tuple[str, ...]
    lock: RunLock | None = None
    """Rank 0 holds the directory with it as long as the run lasts."""


def earlier_run_error(arguments: Arguments) -> str | None:
    """Why the run may not start in its directory, or None. For rank 0, before any rank waits for another."""
    run = arguments.run
    if not run.run_dir:
        return "--run-dir is empty: name the run's directory"
    if run.resume and run.overwrite:
        return "--resume and --overwrite exclude each other: go on with the earlier run, or move it aside"
    if RunDirectory.of(arguments).has_run() and not (run.resume or run.overwrite):
        return (
            f"{run.run_dir} holds an earlier run: --resume goes on with it, --overwrite moves it aside and starts anew"
        )
    return None


def prepare(arguments: Arguments, world: Axis | None = None) -> Start:
    """Make the run directory and write config.yaml. Collective over `world`: rank 0 acts, the others learn the outcome.

    Each rank makes the directory of its logs, since hosts may not share a file system. Raises ConfigurationError, on
    every rank, where rank 0 can't write, finds an earlier run without --resume or --overwrite, or another run at work.
    """
    outcome: Start | ConfigurationError | None = None
    lock: RunLock | None = None
    if world is None or world.rank == 0:
        try:
            outcome, lock = _prepare(arguments)
        except ConfigurationError as error:
            outcome = error
    if world is not None:
        from parallel.comm import gather_objects  # imports torch

        outcome = gather_objects(outcome, world)[0]
    if isinstance(outcome, ConfigurationError):
        raise outcome
    assert outcome is not None
    try:
        outcome.directory.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--run-dir {arguments.run.run_dir} can't be written: {error}") from error
    return dataclasses.replace(outcome, lock=lock)


def changed_flags(before: Arguments, now: Arguments) -> list[str]:
    """One text for each flag that differs, such as "--lr 0.001 → 0.0005"; --resume, --overwrite and --config aside."""
    old, new = before.flat(), now.flat()
    return [
        f"--{name.replace('_', '-')} {old[name]} → {new[name]}"
        for name in new
        if old[name] != new[name] and name not in ("resume", "overwrite", "config")
    ]


def _prepare(arguments: Arguments) -> tuple[Start, RunLock]:
    if refusal := earlier_run_error(arguments):
        raise ConfigurationError(refusal)
    directory = RunDirectory.of(arguments)
    notes = []
    try:
        lock = _take_lock(directory)
        resumed = arguments.run.resume and directory.has_run()
        if directory.has_run() and not resumed:
            # The checkpoints too where --save puts them elsewhere: the next --resume must not find the earlier run's.
            outside = not directory.checkpoints.resolve().is_relative_to(directory.root.resolve())
            kept = _move_aside(directory.root)
            notes.append(f"{directory.root} of the earlier run is now {kept}")
            if outside and directory.checkpoints.exists():
                notes.append(f"{directory.checkpoints} of the earlier run is now {_move_aside(directory.checkpoints)}")
            _keep_launchers_logs(moved=kept / "logs", logs=directory.logs)
            lock, moved = _take_lock(directory), lock  # that of the new directory
            moved.release()
            notes.append(f"starting anew in {directory.root}")
        elif resumed:
            notes += [f"resuming the run in {directory.root}", *_note_changes(directory, arguments)]
            _put_errors_aside(directory.logs)
        else:
            asked = " (--resume: there is no earlier run in it)" if arguments.run.resume else ""
            notes.append(f"starting anew in {directory.root}{asked}")
            _put_errors_aside(directory.logs)
        for path in (directory.root, directory.checkpoints, directory.tensorboard, directory.logs):
            path.mkdir(parents=True, exist_ok=True)
        part = directory.config.with_suffix(".part")
        part.write_text(to_yaml(arguments), encoding="utf-8")
        os.replace(part, directory.config)
    except OSError as error:
        raise ConfigurationError(
            f"--run-dir {arguments.run.run_dir} can't be written: {error}; choose another --run-dir"
        ) from error
    if not lock.works:
        notes.append(f"the file system of {directory.root} has no locks: nothing keeps a second run out of it")
    return Start(directory, resumed, tuple(notes)), lock


def _take_lock(directory: RunDirectory) -> RunLock:
    directory.root.mkdir(parents=True, exist_ok=True)
    try:
        return RunLock.acquire(directory.lock)
    except BlockingIOError as error:
        raise ConfigurationError(
            f"--run-dir {directory.root} is in use by another run ({error}): wait for its end, end it, or choose "
            "another --run-dir"
        ) from error


def _keep_launchers_logs(moved: Path, logs: Path) -> None:
    """What the launcher of this run has opened already stays with this run when the earlier one is moved aside."""
    logs.mkdir(parents=True)
    for pattern in ("torchrun_node_*.log", "output_rank_*.log", "tensorboard.log"):
        for file in moved.glob(pattern):
            file.rename(logs / file.name)


def _note_changes(directory: RunDirectory, arguments: Arguments) -> list[str]:
    """What differs from the config.yaml of before, which is kept under another name if anything does."""
    if not directory.config.exists():
        return []
    try:
        before = from_yaml(directory.config.read_text(encoding="utf-8"), source=str(directory.config))
    except ConfigurationError as error:  # written by another version: no reason not to go on
        kept = _set_aside(directory.config)
        return [f"can't compare with the flags of before, kept as {kept.name}: {error}"]
    if changes := changed_flags(before, arguments):
        kept = _set_aside(directory.config)
        return [f"flags that changed since {kept.name}: " + "; ".join(changes)]
    return []


def _put_errors_aside(logs: Path) -> None:
    """Errors of the attempt before must not be taken for this one's."""
    for file in sorted(logs.glob(ERROR_FILES)):
        _set_aside(file)


def _set_aside(file: Path) -> Path:
    """Rename config.yaml to config.20250131-235959.yaml, after the time it was written at."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(file.stat().st_mtime))
    kept = _unused(file.with_name(f"{file.stem}.{stamp}{file.suffix}"))
    file.rename(kept)
    return kept


def _move_aside(root: Path) -> Path:
    kept = _unused(root.with_name(f"{root.name}.old-{time.strftime('%Y%m%d-%H%M%S')}"))
    root.rename(kept)
    return kept


def _unused(path: Path) -> Path:
    """`path`, or the first of path-2, path-3 … that doesn't exist."""
    candidate, count = path, 1
    while candidate.exists():
        count += 1
        candidate = path.with_name(f"{path.stem}-{count}{path.suffix}")
    return candidate


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []
