"""The C files of `csrc/`, compiled on first use and kept for the next process.

Lives here: finding the compiler, compiling, the cache. Imports the standard library only. Many ranks start at once, on
nodes that may share a home and differ in their CPUs: a library's name says what it was made of and for.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
# No fast-math and no contraction of a · b + c: results are the reference's bits. omp-simd: sums and maxima in lanes,
# where a pragma allows it; no OpenMP runtime is linked.
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp-simd",
)
_DIGEST_BYTES = hashlib.sha256().digest_size
_PATIENCE = 120.0
"""Seconds to wait for another process that compiles, before compiling too."""


def load() -> ctypes.CDLL | None:
    """The library, compiled now if it has to be; None, with one warning, where that can't be done."""
    compiler = _compiler()
    if not compiler:
        logger.warning("no C compiler (cc, gcc or clang, or the one that CC names): gradient codecs run as torch ops")
        return None
    try:
        name = f"codecs-{_fingerprint(compiler)}.so"
        try:
            return _load_cached(_cache_directory(), name, compiler)
        except OSError as error:  # read-only, full, without locks, or mounted noexec
            logger.info("no cache for compiled kernels: %s", error)
        with tempfile.TemporaryDirectory(prefix="kernels-") as directory:
            return _load_cached(Path(directory), name, compiler)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip().splitlines()
        reason = said[-1] if said else f"exit status {error.returncode}"
    except OSError as error:
        reason = str(error)
    logger.warning("%s can't compile kernels/csrc, so gradient codecs run as torch ops: %s", compiler[0], reason)
    return None


def _compiler() -> list[str]:
    """As $CC says, words split; else the first that is there; empty where none is."""
    if asked := os.environ.get("CC"):
        return shlex.split(asked)
    return next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), [])


def _c_files() -> list[Path]:
    return sorted(SOURCES.glob("*.c"))


def _fingerprint(compiler: list[str]) -> str:
    """Hash of sources, flags and all that the compiler predefines: its version, and what this CPU has."""
    command = [*compiler, *FLAGS, "-dM", "-E", "-x", "c", os.devnull]
    predefined = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    parts = [" ".join([*compiler, *FLAGS]).encode(), predefined.encode()]
    parts += [file.read_bytes() for file in sorted(SOURCES.glob("*.h")) + _c_files()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _cache_directory() -> Path:
    """Made if it isn't there, for this user alone; raises OSError where it can't be."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError(f"no home directory: {error}") from error
    directory = Path(base) / "pretrain-deepseek" / "kernels"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def _load_cached(directory: Path, name: str, compiler: list[str]) -> ctypes.CDLL:
    library = directory / name
    if not _whole(library):
        with _alone(directory / f"{name}.lock", until=library):
            if not _whole(library):
                _compile(library, compiler)
    return ctypes.CDLL(str(library))


def _whole(library: Path) -> bool:
    """Whether the file is there and ends with the digest of the rest: a file cut short can kill who loads it."""
    if not library.exists():
        return False
    content = library.read_bytes()
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _compile(library: Path, compiler: list[str]) -> None:
    """Into a file of its own beside it, then renamed: nobody sees a library that is half written."""
    descriptor, path = tempfile.mkstemp(prefix=f"{library.stem}-", suffix=".tmp", dir=library.parent)
    os.close(descriptor)
    written = Path(path)
    try:
        command = [*compiler, *FLAGS, "-shared", "-fPIC", "-o", path, *map(str, _c_files())]
        subprocess.run(command, check=True, capture_output=True, text=True)
        with written.open("ab") as file:  # what follows an ELF file's sections is ignored
            file.write(hashlib.sha256(written.read_bytes()).digest())
        written.chmod(0o700)
        written.replace(library)
    finally:
        written.unlink(missing_ok=True)


@contextmanager
def _alone(lock: Path, until: Path) -> Iterator[None]:
    """One process of a machine inside; others wait for it, but neither beyond their patience nor when `until` is whole.

    The system frees the lock of a process that is killed. A file system without locks raises OSError.
    """
    with lock.open("a") as file:
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline and not _whole(until):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
        yield
