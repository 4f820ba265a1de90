"""DeepSpeed's ops are compiled once, by one rank, with a message; what is missing or fails is said on all ranks.

A tiny op goes the way of DeepSpeed's own: its OpBuilder, torch's cache and lock, ninja, a compiler that is counted.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.mesh import Layout, Mesh
from training import op_compilation
from training.deepspeed_ops import OPS, compile_on_hosts, prepare_ops, with_required
from training.failures import ConfigurationError
from training.op_compilation import Op, OpError, ensure_compiled

RunRanks = Callable[..., list[Any]]
CPU = torch.device("cpu")
SOURCE = """
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "tiny_op"};
PyMODINIT_FUNC PyInit_tiny_op() { return PyModule_Create(&module); }
"""
TINY = Op("tiny_op", f"{__name__}:tiny_builder", "--tiny", "all but --tiny", library="libtiny")
# Counts calls that compile, waits so that there is progress to tell, and fails where it is told to.
COMPILER = """#!/bin/sh
case "$*" in *" -c "*) echo compiled >> "$COUNT"; sleep 0.4; [ -z "$BROKEN" ] || { echo "$BROKEN" >&2; exit 1; };; esac
exec {real} "$@"
"""


def tiny_builder() -> Any:
    from deepspeed.ops.op_builder.builder import OpBuilder

    class TinyBuilder(OpBuilder):
        def absolute_name(self) -> str:
            return "tiny_op"

        def sources(self) -> list[str]:
            return [str(Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "tiny_op.cpp")]

        def cxx_args(self) -> list[str]:
            return ["-O0"]

    return TinyBuilder(name="tiny_op")


@pytest.fixture
def workshop(tmp_path: Path) -> dict[str, str]:
    """An empty cache of extensions with the source, and a compiler that counts: the environment to use them."""
    (tmp_path / "tiny_op.cpp").write_text(SOURCE)
    compiler = tmp_path / "bin" / "c++"
    compiler.parent.mkdir()
    compiler.write_text(COMPILER.replace("{real}", shutil.which("c++") or "no compiler for this test"))
    compiler.chmod(stat.S_IRWXU)
    return {
        "TORCH_EXTENSIONS_DIR": str(tmp_path),
        "COUNT": str(tmp_path / "count"),
        "PATH": f"{compiler.parent}{os.pathsep}{os.environ['PATH']}",
        "BROKEN": "",
    }


class Heard(logging.Handler):
    """The lines of INFO while entered."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        self.logger, self.level_before = logging.getLogger("training"), logging.getLogger("training").level
        self.logger.addHandler(self)
        self.logger.setLevel(logging.INFO)
        return self.lines

    def __exit__(self, *_: object) -> None:
        self.logger.removeHandler(self)
        self.logger.setLevel(self.level_before)


def ask(environment: dict[str, str], times: int) -> tuple[list[list[str]], str]:
    """On each rank: what is heard each time, and the error, if there is one."""
    os.environ.update(environment)
    op_compilation.PROGRESS_SECONDS = 0.2
    mesh = Mesh.create(Layout())
    said = []
    for _ in range(times):
        with Heard() as lines:
            try:
                compile_on_hosts([TINY], mesh)
            except ConfigurationError as error:
                return [lines], str(error)
        said.append(lines)
    return said, ""


def test_one_rank_compiles_once_and_tells_how_far_it_is(run_ranks: RunRanks, workshop: dict[str, str]) -> None:
    (leader, error), (other, other_error) = run_ranks(2, ask, workshop, 2, timeout=300.0)
    assert error == other_error == ""
    assert Path(workshop["COUNT"]).read_text().split() == ["compiled"]
    first, second = leader
    assert first[0].startswith("compiling DeepSpeed's tiny_op, once for this environment")
    assert any(line.startswith("compiling DeepSpeed's tiny_op: ") for line in first[1:-1])
    assert first[-1].startswith("compiled DeepSpeed's tiny_op in ")
    assert second == [] == other[1]  # it is there: nothing to say
    assert not any("compil" in line for line in other[0])


def test_what_the_compiler_said_last_reaches_all_ranks(run_ranks: RunRanks, workshop: dict[str, str]) -> None:
    errors = [
        error
        for _, error in run_ranks(
            2, ask, workshop | {"BROKEN": "tiny_op.cpp:3: error: no such thing"}, 1, timeout=300.0
        )
    ]
    assert errors[0] == errors[1]
    assert "tiny_op.cpp:3: error: no such thing" in errors[0] and "--tiny needs DeepSpeed's op tiny_op" in errors[0]
    assert "What works without it: all but --tiny" in errors[0] and "Traceback" not in errors[0]


@pytest.mark.parametrize(
    ("tool", "words"),
    [("c++", "a C++ compiler (c++ isn't there: apt-get install g++"), ("ninja", "ninja (pip install ninja)")],
)
def test_a_missing_tool_is_named_with_what_needs_it_and_what_works_without(
    workshop: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tool: str, words: str
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in {"c++", "ninja"} - {tool}:
        (tools / name).symlink_to(shutil.which(name) or "")
    for name, value in (workshop | {"PATH": str(tools)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(op_compilation, "_find_ninja", lambda: None)
    with pytest.raises(OpError) as raised:
        ensure_compiled(TINY, CPU, print)
    said = str(raised.value)
    assert words in said and said.startswith("--tiny needs DeepSpeed's op tiny_op") and "all but --tiny" in said
    assert ("compiler" in said) == (tool == "c++") and "libtiny" not in said


def test_ninja_is_found_where_the_environment_is_not_activated(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ninja")
    monkeypatch.setenv("PATH", "/nowhere")
    op_compilation._find_ninja()
    assert shutil.which("ninja") is not None


def prepared(workshop: dict[str, str], monkeypatch: pytest.MonkeyPatch, state: str) -> Path:
    """A directory as a compiled op leaves it, whose library needs no work, and torch's lock of an hour ago."""
    for name, value in workshop.items():
        monkeypatch.setenv(name, value)
    directory = op_compilation.build_directory("tiny_op")
    directory.mkdir()
    (directory / "build.ninja").write_text("ninja_required_version = 1.3\n")
    (directory / "tiny_op.so").touch()
    (directory / "compiled_for.txt").write_text(state)
    lock = directory / "lock"
    lock.touch()
    os.utime(lock, (time.time() - 3600,) * 2)
    return lock


def test_a_lock_that_a_killed_program_left_is_removed_and_said(
    workshop: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = prepared(workshop, monkeypatch, op_compilation._made_for())
    (lock.parent / "build.ninja").write_text("rule none\n  command = true\nbuild tiny_op.so: phony\n")
    said: list[str] = []
    ensure_compiled(TINY, CPU, said.append)
    assert not lock.exists() and len(said) == 1 and str(lock) in said[0] and "3600 s ago was killed" in said[0]


def test_a_lock_is_waited_for_as_long_as_somebody_works_in_its_directory(
    workshop: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = prepared(workshop, monkeypatch, op_compilation._made_for())
    (lock.parent / "build.ninja").write_text("rule none\n  command = true\nbuild tiny_op.so: phony\n")
    monkeypatch.setattr(op_compilation, "PROGRESS_SECONDS", 0.05)
    said: list[str] = []
    worker = subprocess.Popen([sys.executable, "-c", "input()"], cwd=lock.parent, stdin=subprocess.PIPE)
    waiting = threading.Thread(target=ensure_compiled, args=(TINY, CPU, said.append))
    try:
        waiting.start()
        while not said:
            time.sleep(0.01)
        assert lock.exists() and f"if none does, remove {lock}" in said[0]
        lock.unlink()
        waiting.join(30)
        assert not waiting.is_alive() and not any("removing" in line for line in said)
    finally:
        worker.communicate()


def test_environments_compile_into_directories_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for prefix in (sys.prefix, sys.prefix, "/another"):
        monkeypatch.setattr(sys, "prefix", prefix)
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        found.append(op_compilation.build_directory("cpu_adam"))
    assert found[0] == found[1] != found[2] and found[0].parent.parent == found[2].parent.parent
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/given")
    assert op_compilation.build_directory("cpu_adam") == Path("/given/cpu_adam")


def test_ops_come_behind_those_that_they_load_and_an_unknown_one_is_refused() -> None:
    assert [op.name for op in with_required(["async_io", "cpu_adam", "pin_memory"])] == [
        *("pin_memory", "async_io", "cpu_adam")
    ]
    with pytest.raises(ValueError, match="fused_lion: cpu_adam, pin_memory, async_io are"):
        prepare_ops(["fused_lion"], Mesh.create(Layout()))


@pytest.mark.full
def test_cpu_adam_is_compiled_ahead_by_the_command_and_then_silently_there(tmp_path: Path) -> None:
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path), "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "training.deepspeed_ops", "cpu_adam"]
    first = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert first.returncode == 0 and "compiled DeepSpeed's cpu_adam in" in first.stderr, first.stderr
    load = f"from {OPS['cpu_adam'].builder.replace(':', ' import ')} as B; B().load(); print('loaded')"
    loaded = subprocess.run([sys.executable, "-c", load], env=environment, capture_output=True, text=True)
    assert "loaded" in loaded.stdout, loaded.stderr
    again = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (again.returncode, again.stderr) == (0, "")
