"""Which implementation runs, and how the C files are compiled: forcing, a missing compiler, the cache, many at once."""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels import backend, build, native
from kernels.quantize import quantize, quantize_reference
from kernels.wire import WireFormat

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choices are made anew, and again after the test."""
    monkeypatch.delenv(backend.VARIABLE, raising=False)
    for cached in (backend._pick, native._library):
        cached.cache_clear()
    yield
    for cached in (backend._pick, native._library):
        cached.cache_clear()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache of its own, and one small C file instead of ours; the compiler writes a line for each file it links."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "answer.c").write_text("int answer(void) { return 42; }\n")
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-shared*) echo linked >> {tmp_path}/log ;; esac\nexec cc "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(native, "_SIGNATURES", {})
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def loaded() -> ctypes.CDLL | None:
    """Loaded as by a process that starts now."""
    native._library.cache_clear()
    return native._library()


def answer(library: ctypes.CDLL | None) -> int:
    assert library is not None
    return int(library.answer())


def times_linked(directory: Path) -> int:
    return len((directory / "log").read_text().splitlines())


def cached(directory: Path) -> list[Path]:
    return list((directory / "cache").rglob("*.so"))


def quantized() -> torch.Tensor:
    """A wire, checked against the reference's."""
    f, x_rm = WireFormat("int8", 32), torch.randn(2, 96)
    wire_rw, expected_rw = (torch.zeros(2, f.wire_bytes(96), dtype=torch.uint8) for _ in range(2))
    quantize(x_rm, f, wire_rw)
    quantize_reference(x_rm, f, expected_rw)
    assert torch.equal(wire_rw, expected_rw)
    return wire_rw


def test_a_backend_is_forced_inside_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backend.VARIABLE, "torch")
    assert all(backend.pick(op, device) is None for op in backend.IMPLEMENTATIONS for device in ("cpu", "cuda"))
    with pytest.raises(ZeroDivisionError), backend.forced("cuda"):
        with pytest.raises(ValueError, match="KERNELS=cuda: decode_sum on cpu can't be served"):
            backend.pick("decode_sum", "cpu")
        with pytest.raises(ValueError, match="KERNELS=cuda: quantize on cpu"):
            quantized()
        raise ZeroDivisionError
    assert backend.pick("decode_sum", "cpu") is None
    with backend.forced("native"), pytest.raises(ValueError, match="native: quantize on cuda"):
        backend.pick("quantize", "cuda")


def test_forcing_cuda_leaves_ops_without_a_cuda_kernel_to_the_next_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_usable", lambda chosen, device: device == "cuda" and chosen in ("cuda", "triton"))
    monkeypatch.setattr(backend.importlib, "import_module", lambda name: type("Module", (), {"quantize": name}))
    assert "cuda" not in backend.IMPLEMENTATIONS["quantize"]
    with backend.forced("cuda"):
        assert backend.pick("quantize", "cuda") == "kernels.triton_ops.quantize"  # type: ignore[comparison-overlap]


def test_an_unknown_backend_is_refused_with_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backend.VARIABLE, "fast")
    with pytest.raises(ValueError, match="KERNELS=fast: choose among auto, torch, native, triton, cuda"):
        backend.pick("quantize", "cpu")


@needs_compiler
def test_a_cpu_takes_native_and_says_so_once_for_each_op(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for op in backend.IMPLEMENTATIONS:
            first = backend.pick(op, "cpu")
            assert first is not None and first is backend.pick(op, "cpu") is getattr(native, op)
    said = [record.getMessage() for record in caplog.records if record.name == "kernels.backend"]
    assert said == [f"kernel {op} on cpu: native" for op in backend.IMPLEMENTATIONS]


@pytest.mark.parametrize("compiler", ["/bin/false", "no-such-compiler", "failing", ""])
def test_without_a_compiler_the_reference_runs_and_one_warning_says_why(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = {"/bin/false": "exit status 1", "no-such-compiler": "No such file", "": "no C compiler"}.get(compiler, "")
    if compiler == "failing":
        path = tmp_path / "failing"
        path.write_text("#!/bin/sh\necho first >&2\necho 'error: no room for this' >&2\nexit 4\n")
        path.chmod(0o755)
        compiler, words = str(path), "error: no room for this"
    monkeypatch.setenv("CC", compiler)
    if not compiler:
        monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with caplog.at_level(logging.INFO):
        assert backend.pick("quantize", "cpu") is None
        quantized()
        assert not native.available() and backend.pick("decode_sum", "cpu") is None
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and words in warnings[0] and compiler in warnings[0]
    assert not cached(tmp_path)
    with backend.forced("native"), pytest.raises(ValueError, match="native needs a C compiler"):
        backend.pick("quantize", "cpu")


@needs_compiler
def test_what_was_compiled_is_kept_for_the_same_sources_flags_and_cpu(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer(loaded()) == 42 and answer(loaded()) == 42
    assert times_linked(small) == 1 and len(cached(small)) == 1
    (small / "csrc" / "answer.c").write_text("int answer(void) { return 43; }\n")
    assert answer(loaded()) == 43
    # What another CPU has shows in what the compiler predefines for it.
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-D__ANOTHER_CPU__"))
    assert answer(loaded()) == 43
    assert times_linked(small) == 3 and len(cached(small)) == 3
    assert not list((small / "cache").rglob("*.tmp"))


@needs_compiler
@pytest.mark.parametrize("left", ["nothing", "half", "garbage"])
def test_a_broken_file_in_the_cache_is_made_anew(left: str, small: Path) -> None:
    assert answer(loaded()) == 42
    (library,) = cached(small)
    whole = library.read_bytes()
    library.unlink()  # another file, not this one that is loaded
    library.write_bytes({"nothing": b"", "half": whole[: len(whole) // 2], "garbage": bytes(len(whole))}[left])
    assert answer(loaded()) == 42
    assert times_linked(small) == 2 and len(library.read_bytes()) == len(whole)


@needs_compiler
def test_of_processes_that_start_at_once_one_compiles(small: Path) -> None:
    code = (
        "import os, pathlib, sys\nfrom kernels import build\n"
        "build.SOURCES = pathlib.Path(sys.argv[1])\n"
        "print(build.load(['answer.c'], [os.environ['CC']], ['-shared', '-fPIC']).answer())"
    )
    root = Path(build.__file__).parent.parent
    started = [
        subprocess.Popen([sys.executable, "-c", code, small / "csrc"], stdout=subprocess.PIPE, text=True, cwd=root)
        for _ in range(5)
    ]
    assert [process.communicate(timeout=60)[0] for process in started] == ["42\n"] * 5
    assert times_linked(small) == 1


@needs_compiler
def test_where_the_users_cache_cant_be_written_a_temporary_one_serves(
    small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (small / "file").write_text("not a directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(small / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(small))
    assert answer(loaded()) == 42
    assert [file.parent.parent for file in small.rglob("*.so")] == [small]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@needs_compiler
def test_a_process_waits_for_another_no_longer_than_its_patience(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    monkeypatch.setattr(build, "_PATIENCE", 0.1)
    assert answer(loaded()) == 42
    (library,) = cached(small)
    library.unlink()
    with library.with_name(f"{library.stem.rpartition('-')[0]}.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert answer(loaded()) == 42
