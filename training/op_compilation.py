"""Compiling one of DeepSpeed's ops on this host: once, by one process, with progress, into torch's cache of extensions.

Lives here: whether an op is compiled, what its compilation lacks, the compilation, and locks that killed ones leave.
May import `parallel.accelerator`. Which ops a run needs and how its ranks wait: `training/deepspeed_ops.py`.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from parallel.accelerator import choose_accelerator, keep_extensions_apart

Say = Callable[[str], None]

PROGRESS_SECONDS = 10.0
"""Between two lines on something that isn't done."""
_STATE = "compiled_for.txt"
"""In an op's directory: what its library was compiled for, or that a compilation has begun. Locked by who compiles."""
_BEGUN = "compiling"
_LOAD = """
import importlib, sys
module, _, name = sys.argv[1].partition(":")
getattr(importlib.import_module(module), name)().load(verbose=True)
"""


@dataclass(frozen=True)
class Op:
    """An extension of DeepSpeed, and what a person must know where it can't be compiled.

    builder: "module:name" of what makes its OpBuilder; needed_by, works_without: flags; library: what it needs beside a
    compiler, and how to install that; after: names of ops that it loads itself.
    """

    name: str
    builder: str
    needed_by: str
    works_without: str
    library: str = ""
    after: tuple[str, ...] = ()

    def make(self) -> Any:
        """The builder. Imports deepspeed."""
        module, _, name = self.builder.partition(":")
        return getattr(importlib.import_module(module), name)()


class OpError(RuntimeError):
    """An op that can't be had; the message says why, and what works without it."""


def ensure_compiled(op: Op, device: torch.device, say: Say) -> None:
    """Compile an op unless it is in this user's cache of torch extensions. say: told what is done.

    Of many processes that ask at once, of any run, one compiles. Raises OpError.
    """
    _find_ninja()
    directory = build_directory(op.name)
    state, lock = directory / _STATE, directory / "lock"
    compiled = _is_compiled(op, directory)
    if compiled and not lock.exists():
        return
    if not compiled:
        choose_accelerator(device)
        if importlib.import_module("deepspeed.git_version_info").installed_ops.get(op.name):
            return  # DeepSpeed was installed with it
        _check_tools(op, directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with state.open("a+", encoding="utf-8") as file, _alone(file, op, say):
            file.seek(0)
            said = file.read()
            _clear_lock(op, lock, interrupted=said.startswith(_BEGUN), say=say)
            if _is_compiled(op, directory):  # by another process, meanwhile
                return
            if said and not said.startswith(_BEGUN) and said != _made_for():
                # ninja knows of changed files and flags, not of another version or processor.
                for old in (*directory.glob("*.o"), *directory.glob("*.so")):
                    old.unlink()
            _write(file, f"{_BEGUN} since {time.ctime()}: process {os.getpid()} of {socket.gethostname()}")
            try:
                _compile(op, file, say)
            except OpError:
                _write(file, "")
                raise
            _write(file, _made_for())
    except OSError as error:
        raise OpError(
            f"DeepSpeed's {op.name} can't be compiled in {directory} ({error.strerror}): set TORCH_EXTENSIONS_DIR to a "
            "directory that can be written"
        ) from error


def build_directory(name: str) -> Path:
    """Where torch builds an extension of this name."""
    keep_extensions_apart()
    return Path(os.environ["TORCH_EXTENSIONS_DIR"]) / name


def _write(file: IO[str], text: str) -> None:
    file.seek(0)
    file.truncate()
    file.write(text)
    file.flush()


def _made_for() -> str:
    """What a compiled op depends on beside its sources and headers, whose times ninja compares."""
    try:
        words = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        words = []
    processor = hashlib.sha256("".join(line for line in words if line.startswith(("flags", "model name"))).encode())
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("deepspeed", "torch"))
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    return ", ".join([*versions, python, *_compiler(), f"processor {processor.hexdigest()[:8]}"])


def _is_compiled(op: Op, directory: Path) -> bool:
    """Whether DeepSpeed would load the op as it lies there. Takes some milliseconds and doesn't import deepspeed."""
    state = directory / _STATE
    if not (directory / f"{op.name}.so").exists() or not state.exists() or shutil.which("ninja") is None:
        return False
    if state.read_text(encoding="utf-8") != _made_for():
        return False
    asked = subprocess.run(["ninja", "-n"], cwd=directory, capture_output=True, text=True)
    return "no work to do" in asked.stdout


def _compiler() -> list[str]:
    """Torch's choice, words split."""
    return shlex.split(os.environ.get("CXX", "c++"))


def _find_ninja() -> None:
    """Put ninja on PATH where its package is installed but the environment isn't activated: torch calls it by name."""
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is not None:
        directory = importlib.import_module("ninja").BIN_DIR
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), directory])


def _check_tools(op: Op, directory: Path) -> None:
    """Raises OpError naming all that is missing, and how to get it."""
    missing = []
    if shutil.which("ninja") is None:
        missing.append("ninja (pip install ninja)")
    if shutil.which(_compiler()[0]) is None:
        missing.append(f"a C++ compiler ({_compiler()[0]} isn't there: apt-get install g++, or set CXX)")
    elif not op.make().is_compatible():
        missing.append(op.library or "something that DeepSpeed's builder asks for")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        missing.append(f"Python's headers ({header} isn't there: apt-get install python3-dev)")
    if missing:
        raise OpError(
            f"{op.needed_by} needs DeepSpeed's op {op.name}, which isn't compiled yet, and to compile it this host "
            f"lacks {' and '.join(missing)}. What works without it: {op.works_without}"
        )


@contextmanager
def _alone(file: IO[str], op: Op, say: Say) -> Iterator[None]:
    """One process inside. The system frees the lock of one that is killed, once the one that it started is gone too."""
    began = told = time.monotonic()
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() - told > PROGRESS_SECONDS:
                told = time.monotonic()
                file.seek(0)
                say(f"waiting for DeepSpeed's {op.name}, {told - began:.0f} s ({file.read() or 'another process'})")
            time.sleep(0.1)
        except OSError:  # no locks on this file system: torch's own file is left
            break
    yield


def _clear_lock(op: Op, lock: Path, interrupted: bool, say: Say) -> None:
    """Wait for, or remove, torch's lock file: who is killed leaves it behind, and all others would wait for ever.

    None of our own compilations runs now. Another program's shows on this host by its working directory; on another
    host with the same file system only the file's age tells, so that must be long. interrupted: a compilation of ours
    didn't end, so the file is its. Where there is nothing to compile torch holds it for less than a second.
    """
    told = time.monotonic()
    patience = 5 if interrupted else 30 if _is_compiled(op, lock.parent) else 600
    while lock.exists():
        with suppress(FileNotFoundError):
            age = time.time() - lock.stat().st_mtime
            if age > patience and not _works_in(lock.parent):
                say(f"removing {lock}: what made it {age:.0f} s ago was killed")
                lock.unlink()
            elif time.monotonic() - told > PROGRESS_SECONDS:
                told = time.monotonic()
                say(f"waiting for another program to compile DeepSpeed's {op.name}; if none does, remove {lock}")
        time.sleep(0.1)


def _works_in(directory: Path) -> bool:
    """Whether a process of this host has it as its working directory, as ninja and its compilers do."""
    where = str(directory.resolve())
    for process in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if os.readlink(process) == where:
                return True
    return False


def _compile(op: Op, file: IO[str], say: Say) -> None:
    """Let DeepSpeed load the op in a process of its own, whose output tells how far ninja is. Raises OpError."""
    say(f"compiling DeepSpeed's {op.name}, once for this environment; a minute or more")
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", _LOAD, op.builder],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        pass_fds=(file.fileno(),),  # so that the lock lasts as long as it does
    )
    assert process.stdout is not None
    lines: list[str] = []
    reader = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        while (status := _status(process)) is None:
            done = [found[1] for line in list(lines) if (found := re.match(r"\[(\d+/\d+)\]", line))]
            steps = f", {done[-1].replace('/', ' of ')} steps done" if done else ""
            say(f"compiling DeepSpeed's {op.name}: {time.monotonic() - began:.0f} s{steps}")
    except BaseException:
        process.send_signal(signal.SIGINT)  # torch then removes its lock
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        process.wait()
        raise
    reader.join()
    if status:
        raise OpError(
            f"{op.needed_by} needs DeepSpeed's op {op.name}, which could not be compiled:\n{_last_words(lines)}\n"
            f"What works without it: {op.works_without}"
        )
    say(f"compiled DeepSpeed's {op.name} in {time.monotonic() - began:.0f} s")


def _status(process: subprocess.Popen[str]) -> int | None:
    """The process's exit status, waiting for one line's time; None: it still runs."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(PROGRESS_SECONDS)
    return None


def _last_words(lines: Sequence[str]) -> str:
    """What the compiler said at its end, without commands and without the traceback of the call that ran it."""
    traceback = next((i for i, line in enumerate(lines) if line.startswith("Traceback ")), len(lines))
    said = [line.rstrip()[:300] for line in lines[:traceback] if not re.match(r"\[\d+/\d+\]|\[\d{4}-", line)]
    return "\n".join([*said[-15:], *(line.rstrip()[:300] for line in lines[-1:])])
