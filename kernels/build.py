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
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "csrc"
_DIGEST_BYTES = hashlib.sha256().digest_size
_PATIENCE = 120.0
"""Seconds to wait for another process that compiles, before compiling too."""


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


def shared_object(
    sources: Sequence[str], compiler: Sequence[str] | None, flags: Sequence[str], machine: str = ""
) -> Path:
    """The shared object of these files of `csrc/`, compiled unless it is in the cache.

    compiler: a program and its first words; None: there is none, and an object that any version of it has made will do.
    flags: all of its options but sources and output. machine: what else the object depends on, as the processor's
    features under -march=native. Of many processes that ask at once one compiles. Raises BuildError.
    """
    text = hashlib.sha256("\0".join([*sources, machine, *flags]).encode())
    for file in sorted(SOURCES.iterdir()):
        if file.name in sources or file.suffix in (".h", ".cuh"):
            text.update(file.name.encode() + file.read_bytes())
    directory, stem = cache_directory(), f"{Path(sources[0]).stem}-{text.hexdigest()[:16]}"
    if compiler is None:
        kept = sorted(file for file in directory.glob(f"{stem}-*.so") if _whole(file))
        if not kept:
            raise BuildError(f"{', '.join(sources)} isn't compiled yet, and there is no compiler for it")
        return kept[-1]
    target = directory / f"{stem}-{hashlib.sha256(_said([*compiler, '--version'])).hexdigest()[:8]}.so"
    if not _whole(target):
        with _alone(directory / f"{stem}.lock", until=target):
            if not _whole(target):  # another rank may have made it meanwhile
                _compile([*compiler, *flags, *(str(SOURCES / source) for source in sources)], target)
    return target


def load(
    sources: Sequence[str], compiler: Sequence[str] | None, flags: Sequence[str], machine: str = ""
) -> ctypes.CDLL:
    """`shared_object`, loaded. Raises BuildError and OSError."""
    return ctypes.CDLL(str(shared_object(sources, compiler, flags, machine)))


def processor(compiler: Sequence[str], flags: Sequence[str]) -> str:
    """What a C compiler predefines: under -march=native it tells what this processor has. Raises BuildError."""
    return _said([*compiler, *flags, "-dM", "-E", "-x", "c", os.devnull]).decode()


def _said(command: list[str]) -> bytes:
    try:
        return subprocess.run(command, capture_output=True, check=True).stdout
    except OSError as error:
        raise BuildError(f"{command[0]}: {error.strerror}") from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode().strip().splitlines()
        raise BuildError(f"{command[0]}: {lines[-1] if lines else f'exit status {error.returncode}'}") from error


def _whole(library: Path) -> bool:
    """Whether the file is there and ends with the digest of the rest: a file cut short can kill who loads it."""
    if not library.exists():
        return False
    content = library.read_bytes()
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _compile(command: list[str], target: Path) -> None:
    """Write the object beside its place and rename it, so that nobody ever sees half of one."""
    descriptor, name = tempfile.mkstemp(prefix=target.stem, suffix=".unfinished", dir=target.parent)
    os.close(descriptor)
    unfinished = Path(name)
    try:
        done = subprocess.run([*command, "-o", name], capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr or done.stdout)[-4000:]
            raise BuildError(f"{' '.join(command)}\nended with {done.returncode}: {said}")
        with unfinished.open("ab") as file:  # what follows an ELF file's sections is ignored
            file.write(hashlib.sha256(unfinished.read_bytes()).digest())
        unfinished.chmod(0o700)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def _alone(lock: Path, until: Path) -> Iterator[None]:
    """One process of a host inside; others wait, but neither beyond their patience nor when `until` is whole.

    The system frees the lock of a process that is killed. Where the file system has no locks, two may both compile: no
    harm, since objects appear by a rename.
    """
    with lock.open("a") as file:
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline and not _whole(until):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:
                break
        yield
