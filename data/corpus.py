"""A real corpus that needs no download: the source and the manual of the Python standard library on this machine.

May import the standard library and `data.files` only.
Source: CPython's Lib directory (PSF licence); it is read where it is installed and never copied into the repository.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from data.files import atomic_file

# Tests and generated tables are half of the bytes and teach little; what is installed besides Python isn't Python's.
SKIPPED = frozenset(
    "test tests idle_test idlelib lib2to3 turtledemo encodings ensurepip lib-dynload pydoc_data "
    "site-packages dist-packages __pycache__".split()
)
TOPICS = "pydoc_data/topics.py"


def standard_library_documents(root: str | os.PathLike[str] | None = None) -> Iterator[tuple[str, str]]:
    """(relative path, text) of every module, and of every topic of `help()`, which is prose.

    The order is that of a hash of the path: the same everywhere, and a split by documents takes an even share of each
    package where alphabetical order would put one package's last modules into validation.

    Args: `root`, the directory of the library; None takes the running interpreter's.
    Raises: ValueError when there is no module, as in an interpreter that ships its library compiled or zipped.
    """
    library = Path(sysconfig.get_path("stdlib") if root is None else root)
    sources = {}
    for directory, subdirectories, names in os.walk(library):
        subdirectories[:] = [name for name in subdirectories if name not in SKIPPED]
        for name in names:
            if name.endswith(".py"):
                path = Path(directory, name)
                sources[path.relative_to(library).as_posix()] = path
    if not sources:
        raise ValueError(f"{library} holds no Python source: give the directory of a standard library that has it")
    topics = _topics(library / TOPICS)
    for name in sorted([*sources, *topics], key=lambda name: hashlib.sha256(name.encode()).digest()):
        text = topics[name] if name in topics else _read(sources[name])
        if text.strip():
            yield name, text


def _read(path: Path) -> str:
    """Decoded as its coding line says; empty where it can't be."""
    try:
        with tokenize.open(path) as stream:
            return stream.read()
    except (SyntaxError, UnicodeDecodeError):
        return ""


def _topics(path: Path) -> dict[str, str]:
    """The texts of `help("topic")`: a module with one dictionary literal."""
    if not path.is_file():
        return {}
    value = next(node.value for node in ast.parse(path.read_bytes()).body if isinstance(node, ast.Assign))
    return {f"{TOPICS}/{name}": text for name, text in ast.literal_eval(value).items()}


def build_corpus(output: str | os.PathLike[str], root: str | os.PathLike[str] | None = None) -> tuple[int, int]:
    """Write the corpus as JSON lines, {"text": ..., "path": ...}; the file appears when it is complete.

    Returns: (documents, characters)
    """
    documents = characters = 0
    with atomic_file(output, "w") as stream:
        for path, text in standard_library_documents(root):
            stream.write(json.dumps({"text": text, "path": path}, ensure_ascii=False) + "\n")
            documents += 1
            characters += len(text)
    return documents, characters
