"""Shared objects from the C and CUDA sources in `csrc/`, compiled on first use into a cache of this user's.

Lives here: where compilers are, the build, and its cache, which many ranks may fill at once. Imports the standard
library only. An object's name holds hashes of all it is made from, so nothing in the cache is ever out of date.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "csrc"


class BuildError(RuntimeError):
    """A source could not be compiled; the message has the command and what the compiler said."""


def find_compiler(*names: str) -> str | None:
    """The first of these programs that is there: on PATH, or CUDA's where its installer puts it. None: none is."""
    cuda = [Path(os.environ.get(name, "")) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    where = os.pathsep.join(map(str, [os.environ.get("PATH", os.defpath), *cuda, "/usr/local/cuda/bin"]))
    return next((found for name in names if (found := shutil.which(name, path=where))), None)


def cache_directory() -> Path:
    """Where objects are kept: below XDG_CACHE_HOME or ~/.cache, or, where that can't be written, below /tmp.

    It is made for this user only; one that belongs to somebody else is never taken, since what lies in it is run.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    for directory in (home / "pretrain-deepseek", Path(tempfile.gettempdir()) / f"pretrain-deepseek-{os.getuid()}"):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if directory.stat().st_uid == os.getuid() and os.access(directory, os.W_OK | os.X_OK):
            return directory
    raise BuildError(f"no directory for compiled kernels: {home} can't be written; set XDG_CACHE_HOME to one that can")


def shared_object(source: str, compiler: str | None, flags: Sequence[str], machine: str = "") -> Path:
    """The shared object of `csrc/<source>`, compiled unless it is in the cache.

    compiler: a path of a program; None: there is none, and an object that any version of it has made will do. flags:
    all of its options but sources and output. machine: what else the object depends on, as the processor's features
    under -march=native. Of many processes that ask at once one compiles. Raises BuildError.
    """
    text = hashlib.sha256("\0".join([source, machine, *flags]).encode())
    for file in sorted(SOURCES.iterdir()):
        if file.name == source or file.suffix in (".h", ".cuh"):
            text.update(file.name.encode() + file.read_bytes())
    directory, stem = cache_directory(), f"{Path(source).stem}-{text.hexdigest()[:16]}"
    if compiler is None:
        kept = sorted(directory.glob(f"{stem}-*.so"))
        if not kept:
            raise BuildError(f"{source} isn't compiled yet, and there is no compiler for it")
        return kept[-1]
    target = directory / f"{stem}-{hashlib.sha256(_version(compiler)).hexdigest()[:8]}.so"
    if not target.exists():
        with _alone(directory / f"{stem}.lock"):
            if not target.exists():  # another rank may have made it meanwhile
                _compile([compiler, *flags, str(SOURCES / source)], target)
    return target


def load(source: str, compiler: str | None, flags: Sequence[str], machine: str = "") -> ctypes.CDLL:
    """`shared_object`, loaded. Raises BuildError and OSError."""
    return ctypes.CDLL(str(shared_object(source, compiler, flags, machine)))


def _version(compiler: str) -> bytes:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{compiler} --version: {error}") from error


def _compile(command: list[str], target: Path) -> None:
    """Write the object beside its place and rename it, so that nobody ever sees half of one."""
    descriptor, unfinished = tempfile.mkstemp(prefix=target.stem, suffix=".unfinished", dir=target.parent)
    os.close(descriptor)
    try:
        done = subprocess.run([*command, "-o", unfinished], capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr or done.stdout)[-4000:]
            raise BuildError(f"{' '.join(command)}\nended with {done.returncode}: {said}")
        os.replace(unfinished, target)
    finally:
        Path(unfinished).unlink(missing_ok=True)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Inside, no other process of this host; where the file system has no locks, two may both compile: no harm."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield
