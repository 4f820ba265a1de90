"""The rules of the house: imports go down only, torch.distributed in few files, small files, a docstring in each.

Reads the syntax trees of all source files and imports none of them. The rooms are those of docs/architecture.md.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A room, and the rooms it may import. What is not named here (scripts, tests, benchmarks, setup.py) may import all.
MAY_IMPORT: dict[str, set[str]] = {
    "kernels": set(),
    "parallel": {"kernels"},
    "model": {"kernels", "parallel"},
    "data": {"kernels", "parallel"},
    "planning": {"kernels", "parallel"},
    "training": {"kernels", "parallel", "model", "data", "planning"},
    "tools": {"kernels", "parallel", "model", "data", "planning", "training"},
    "pretrain_deepseek": {"kernels", "parallel", "model", "data", "planning", "training"},
}

# Communication in the first two; creating the groups, initialising, and checkpoints' files in the others.
MAY_USE_DISTRIBUTED = {
    "parallel/comm.py",
    "parallel/mesh.py",
    "parallel/launch.py",
    "parallel/zero.py",
    "training/checkpoint.py",
    "training/stored.py",
}
MAX_LINES = 400
TREES = (*(room for room in MAY_IMPORT if room != "pretrain_deepseek"), "scripts", "tests", "benchmarks")


def source_files() -> list[Path]:
    """Every Python file of the project, as paths relative to its root."""
    files = [file for tree in TREES for file in (ROOT / tree).rglob("*.py")] + list(ROOT.glob("*.py"))
    return sorted(file.relative_to(ROOT) for file in files)


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported, anywhere in the file; `from a import b` yields a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module or ''}.{alias.name}".lstrip(".")) for alias in node.names)


def at_module_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements that run when the module is imported: those in functions and TYPE_CHECKING blocks don't."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        statement = pending.pop()
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING"):
            pending += statement.orelse
            continue
        yield statement
        pending += [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]
        pending += [child for handler in getattr(statement, "handlers", []) for child in handler.body]


def dotted(node: ast.AST) -> str:
    """`torch.distributed.barrier` of such an expression, "" of another."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def violations(path: str, source: str) -> list[str]:
    """What breaks a rule in the file `path` (relative, with slashes) with this content; one text each."""
    tree = ast.parse(source)
    room = path.split("/")[0].removesuffix(".py")
    found = []

    if room in MAY_IMPORT:
        for line, name in imports(tree):
            target = name.split(".")[0]
            if target in ("tests", "benchmarks") or (target in MAY_IMPORT and target not in MAY_IMPORT[room] | {room}):
                found.append(f"{path}:{line}: {room} may not import {target}")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                found.append(f"{path}:{node.lineno}: relative import; write the room's name")

        if path not in MAY_USE_DISTRIBUTED:
            uses = [(line, name) for line, name in imports(tree)]
            uses += [(node.lineno, dotted(node)) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
            lines = {line for line, name in uses if f"{name}.".startswith("torch.distributed.")}
            found += [f"{path}:{line}: torch.distributed; use parallel.comm" for line in sorted(lines)]

    for statement in at_module_level(tree):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for line, name in imports(statement):
                if name.split(".")[0] == "deepspeed":
                    found.append(f"{path}:{line}: import deepspeed inside the function that uses it")

    if source and not ast.get_docstring(tree):  # an empty __init__.py needs none
        found.append(f"{path}: no module docstring")
    if (count := len(source.splitlines())) > MAX_LINES:
        found.append(f"{path}: {count} lines; more than {MAX_LINES} ask to be two files")
    return found


def test_every_file_keeps_the_rules() -> None:
    files = source_files()
    assert {"parallel", "model", "data", "training"} <= {file.parts[0] for file in files}
    found = [text for file in files for text in violations(file.as_posix(), (ROOT / file).read_text(encoding="utf-8"))]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("path", "line", "rule"),
    [
        ("kernels/norm.py", "from parallel.mesh import Mesh", "kernels may not import parallel"),
        ("parallel/tensor.py", "import model.config", "parallel may not import model"),
        ("parallel/tensor.py", "def f():\n    from model import moe", "parallel may not import model"),
        ("model/moe.py", "import data.samples", "model may not import data"),
        ("data/samples.py", "from model.config import DeepSeekConfig", "data may not import model"),
        ("training/trainer.py", "from tools import train_tokenizer", "training may not import tools"),
        ("pretrain_deepseek.py", "import tools.build_corpus", "pretrain_deepseek may not import tools"),
        ("model/moe.py", "from tests.layouts import Job", "model may not import tests"),
        ("model/moe.py", "from . import mlp", "relative import"),
        ("model/moe.py", "import torch.distributed as dist", "torch.distributed"),
        ("model/moe.py", "from torch import distributed", "torch.distributed"),
        ("model/moe.py", "from torch.distributed import all_reduce", "torch.distributed"),
        ("training/trainer.py", "import torch\ntorch.distributed.barrier()", "torch.distributed"),
        ("parallel/zero.py", "import deepspeed", "import deepspeed inside"),
        ("parallel/zero.py", "try:\n    from deepspeed import zero\nexcept ImportError:\n    pass", "deepspeed inside"),
        ("parallel/zero.py", "class Zero:\n    import deepspeed", "import deepspeed inside"),
        ("tests/test_zero.py", "import deepspeed", "import deepspeed inside"),
        ("model/moe.py", "x = 1\n" * MAX_LINES, f"{MAX_LINES + 2} lines"),
    ],
)
def test_a_violation_is_found(path: str, line: str, rule: str) -> None:
    found = violations(path, f'"""A docstring."""\n{line}\n')
    assert len(found) == 1 and rule in found[0], found


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("model/moe.py", "from parallel import comm\nfrom model.mlp import MLP\nimport torch"),
        ("parallel/comm.py", "import torch.distributed as dist"),
        ("parallel/zero.py", "def f():\n    import deepspeed"),
        ("parallel/zero.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import deepspeed"),
        (
            "tests/model/test_moe.py",
            "import torch.distributed as dist\nfrom model import moe\nfrom tests import layouts",
        ),
    ],
)
def test_what_is_allowed_passes(path: str, line: str) -> None:
    assert violations(path, f'"""A docstring."""\n{line}\n') == []


def test_a_missing_docstring_is_found() -> None:
    assert violations("model/moe.py", "x = 1\n") == ["model/moe.py: no module docstring"]
