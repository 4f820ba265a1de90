"""Sources are compiled once, whoever asks how often; the compiler is a script that writes down its calls."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernels import build

COMPILER = """#!/bin/sh
[ "$1" = --version ] && { cat "$0.version"; exit; }
echo "$@" >> "$0.calls"
sleep 0.1
grep -q wrong "$2" && { echo "line 1: that is wrong" >&2; exit 3; }
cp "$2" "$4"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of one source, op.c, which it copies. It takes: one flag, the source, -o, the object."""
    script = tmp_path / "compiler"
    script.write_text(COMPILER)
    script.chmod(0o700)
    (tmp_path / "compiler.version").write_text("1")
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc/op.c").write_text("int op;")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "csrc")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return script


def calls(compiler: Path) -> int:
    return len((compiler.parent / "compiler.calls").read_text().splitlines())


def test_of_many_that_ask_at_once_one_compiles(compiler: Path) -> None:
    with ThreadPoolExecutor(8) as ranks:
        objects = set(ranks.map(lambda _: build.shared_object(["op.c"], [str(compiler)], ["-O2"]), range(8)))
    (only,) = objects
    assert only.read_bytes().startswith(b"int op;") and calls(compiler) == 1
    assert [path for path in only.parent.iterdir() if path.suffix not in (".so", ".lock")] == []


def test_whatever_an_object_is_made_from_makes_another_one(compiler: Path) -> None:
    def made(flag: str = "-O2", machine: str = "") -> Path:
        return build.shared_object(["op.c"], [str(compiler)], [flag], machine)

    objects = [made(), made("-O3"), made(machine="a processor")]
    (build.SOURCES / "op.h").write_text("int included;")
    objects.append(made())
    (build.SOURCES / "op.c").write_text("long op;")
    objects.append(made())
    (build.SOURCES / "other.c").write_text("another source is no part of it")
    assert made() == objects[-1]
    (compiler.parent / "compiler.version").write_text("2")
    objects.append(made())
    assert len(set(objects)) == len(objects) == calls(compiler)


def test_without_a_compiler_what_is_compiled_serves(compiler: Path) -> None:
    with pytest.raises(build.BuildError, match="op.c isn't compiled yet, and there is no compiler"):
        build.shared_object(["op.c"], None, ["-O2"])
    made = build.shared_object(["op.c"], [str(compiler)], ["-O2"])
    assert build.shared_object(["op.c"], None, ["-O2"]) == made


def test_a_source_that_is_wrong_tells_the_command_and_the_compilers_words(compiler: Path) -> None:
    (build.SOURCES / "op.c").write_text("wrong")
    with pytest.raises(build.BuildError, match=r"compiler -O2 .*op\.c\nended with 3: line 1: that is wrong"):
        build.shared_object(["op.c"], [str(compiler)], ["-O2"])
    assert [path.suffix for path in build.cache_directory().iterdir()] == [".lock"]


def test_the_cache_is_this_users_alone(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stat.S_IMODE(build.cache_directory().stat().st_mode) == 0o700
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # nothing can be made in it
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    assert build.cache_directory() == tmp_path / f"pretrain-deepseek-{os.getuid()}"
    somebody_else = os.getuid() + 1
    (tmp_path / f"pretrain-deepseek-{somebody_else}").mkdir()
    monkeypatch.setattr(build.os, "getuid", lambda: somebody_else)
    with pytest.raises(build.BuildError, match="set XDG_CACHE_HOME"):
        build.cache_directory()
