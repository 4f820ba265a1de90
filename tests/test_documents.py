"""What the documents name must exist: flags, files, tests, commands, functions, links, variables of the scripts.

Reads the documents and the syntax trees of the sources; imports the flags only, which need no torch. A table whose
first column is headed "Megatron-LM" or "Planned" speaks there of what doesn't exist here, so that column isn't read.
Documents in Chinese say what their English ones do: the same commands, names and numbers of rows, in the same order.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from training.arguments import GROUP_OF, Arguments
from training.command_line import MEGATRON_ALIASES, from_yaml
from training.megatron import instead_of

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (
    "README.md",
    "README.zh-CN.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "configs/README.md",
    *(file.relative_to(ROOT).as_posix() for file in sorted((ROOT / "docs").rglob("*.md"))),
)
ROOMS = ("kernels", "parallel", "model", "data", "planning", "training", "tools", "tests", "benchmarks")
# A path in a document begins with one of these; those of configs/README.md also with a directory beside it.
TREES = (*ROOMS, "configs", "scripts", "docs", ".ci")
FOREIGN_COLUMNS = ("Megatron-LM", "Planned")
FOREIGN_PROGRAMS = ("pip", "ruff", "mypy", "tensorboard")
# Read by torch, gloo and NCCL, not by us.
FOREIGN_VARIABLES = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "TORCH_DISTRIBUTED_DEBUG")
TRANSLATIONS = (("README.md", "README.zh-CN.md"), ("docs/quickstart.md", "docs/quickstart.zh-CN.md"))

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FLAG = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")
PATH = re.compile(r"(?<![\w./$-])\.?[\w-]+(?:/[\w.-]*\w)+|(?<![\w./$-])[\w-]+\.(?:py|md|sh|toml|txt)\b")


@cache
def definitions() -> tuple[frozenset[str], frozenset[str]]:
    """All functions by name, and all classes by name, with their members as Class.member."""
    functions, classes = set(), set()
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef):
                    functions.add(node.name)
                elif isinstance(node, ast.ClassDef):
                    methods = {x.name for x in node.body if isinstance(x, ast.FunctionDef)}
                    fields = {ast.unparse(x.target) for x in node.body if isinstance(x, ast.AnnAssign)}
                    classes |= {node.name, *(f"{node.name}.{member}" for member in methods | fields)}
    return frozenset(functions), frozenset(classes)


@cache
def flags_of_run() -> frozenset[str]:
    """Flags of pretrain_deepseek.py: those of --help, switches' --no- forms, and Megatron's other names."""
    values = Arguments().flat()
    switches = {f"no_{name}" for name, value in values.items() if isinstance(value, bool)}
    return frozenset("--" + name.replace("_", "-") for name in {*GROUP_OF, *MEGATRON_ALIASES, *switches, "help"})


@cache
def flags_of_tool(name: str) -> frozenset[str]:
    """Flags of tools/NAME.py: the fields of its Arguments, and of the class of shared flags that these may extend."""
    tree = ast.parse((ROOT / "tools" / f"{name}.py").read_text(encoding="utf-8"))
    (arguments,) = (x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == "Arguments")
    fields = list(arguments.body)
    if any(ast.unparse(base) == "InferenceArguments" for base in arguments.bases):
        shared = ast.parse((ROOT / "training" / "inference_arguments.py").read_text(encoding="utf-8"))
        fields += next(x for x in shared.body if isinstance(x, ast.ClassDef)).body
    found = {"--help"}
    for field in fields:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            flag = field.target.id.replace("_", "-")
            found |= {f"--{flag}", *([f"--no-{flag}"] if ast.unparse(field.annotation) == "bool" else [])}
    return frozenset(found)


@cache
def flags_of_benchmark(name: str) -> frozenset[str]:
    """Flags of benchmarks/NAME.py: what it hands to add_argument."""
    tree = ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8"))
    calls = (x for x in ast.walk(tree) if isinstance(x, ast.Call) and ast.unparse(x.func).endswith("add_argument"))
    return frozenset({"--help", *(ast.literal_eval(word) for call in calls for word in call.args)})


@cache
def constants() -> frozenset[str]:
    """Words in capitals of scripts and sources: variables of the environment, constants."""
    files = [*(ROOT / "scripts").rglob("*.sh"), *(file for room in ROOMS for file in (ROOT / room).rglob("*.py"))]
    files.remove(Path(__file__).resolve())
    words = (re.findall(r"\b[A-Z][A-Z_]+\b", file.read_text(encoding="utf-8")) for file in files)
    return frozenset(FOREIGN_VARIABLES).union(*words)


def readable(text: str) -> str:
    """The document without the first column of tables about something else."""
    lines, foreign = [], False
    for line in text.splitlines():
        cells = line.split("|")
        if line.startswith("|") and len(cells) > 2:
            foreign = foreign or cells[1].strip() in FOREIGN_COLUMNS
            line = "|".join(["", "", *cells[2:]]) if foreign else line
        else:
            foreign = False
        lines.append(line)
    return "\n".join(lines)


def wrong_flags(code: str) -> Iterator[str]:
    """Flags that the program they are given to doesn't have; of a flag that stands alone, that nothing has."""
    tools = [file.stem for file in (ROOT / "tools").glob("*.py") if file.stem != "__init__"]
    if any(re.search(rf"(-m |^){program}\b", code) for program in FOREIGN_PROGRAMS):
        return
    if match := re.search(r"(?:-m tools\.|(?:python|torchrun.*) tools/)(\w+)", code):
        known, code = flags_of_tool(match[1]) if match[1] in tools else frozenset(), code[match.end() :]
    elif match := re.search(r"(?:-m benchmarks\.|python benchmarks/)(\w+)", code):
        known, code = flags_of_benchmark(match[1]), code[match.end() :]
    elif match := re.search(r"pretrain_multinode\.sh|pretrain_deepseek\.py", code):
        known, code = flags_of_run(), code[match.end() :]  # what stands before is torchrun's
    elif "test.sh" in code or "-m pytest" in code:
        known = frozenset({"--full"})
    else:
        known = flags_of_run().union({"--full"}, *(flags_of_tool(name) for name in tools))
    for flag in FLAG.findall(code):
        if flag.replace("_", "-") not in known:
            yield f"no flag {flag} in {code.strip() or flag!r}"


def wrong_paths(code: str, folder: Path) -> Iterator[str]:
    beside = [path.name for path in folder.iterdir() if path.is_dir()] if folder != ROOT else []
    for path in PATH.findall(code):
        if "/" not in path:
            if path != "setup.py" and not any((ROOT / path).exists() or any((ROOT / t).rglob(path)) for t in TREES):
                yield f"no file {path}"
        elif path.split("/")[0] in (*TREES, *beside) and not ((ROOT / path).exists() or (folder / path).exists()):
            yield f"no path {path}"


def wrong_commands(code: str) -> Iterator[str]:
    for kind, target in re.findall(r"(?:^|\s)(bash|python|-m) ([\w./]+)", code):
        module = kind == "-m" and target.split(".")[0] in ROOMS
        if module and not (ROOT / (target.replace(".", "/") + ".py")).is_file():
            yield f"no module {target}"
        if kind != "-m" and re.search(r"\.(sh|py)$", target) and not (ROOT / target).is_file():
            yield f"no program {target}"
    for variable in re.findall(r"(?:^|\s)([A-Z][A-Z_]+)=", code):
        if variable not in constants():
            yield f"nothing reads {variable}"


def wrong_names(span: str) -> Iterator[str]:
    """Of one inline code span: `function()`, `Class`, `Class.member`, `test_of_something`, `CONSTANT`."""
    functions, classes = definitions()
    name = span.removesuffix("()")
    if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
        return
    owner, _, last = name.rpartition(".")
    if re.fullmatch(r"[A-Z]\w*[a-z]\w*", owner):
        if f"{owner}.{last}" not in classes:
            yield f"no {name}"
    elif re.fullmatch(r"[A-Z]\w*[a-z]\w*", name):
        if name not in classes:
            yield f"no class {name}"
    elif span.endswith("()") or (last.startswith("test_") and not owner):
        if last not in functions:
            yield f"no function {last}"
    elif re.fullmatch(r"[A-Z][A-Z_]+", name) and name not in constants():
        yield f"nothing reads {name}"


def problems(text: str, folder: Path = ROOT) -> list[str]:
    """Everything that a document in `folder` names and that doesn't exist."""
    found: list[str] = []
    for language, body in FENCE.findall(text):
        if language == "yaml":
            from_yaml(body, source="the document's YAML")
        for line in body.splitlines() if language in ("", "bash") else []:
            found += [*wrong_flags(line), *wrong_paths(line, folder), *wrong_commands(line)]
    prose = readable(FENCE.sub("", text))
    for span in re.findall(r"`([^`\n]+)`", prose):
        found += [*wrong_flags(span), *wrong_paths(span, folder), *wrong_commands(span), *wrong_names(span)]
    for target in re.findall(r"\]\(([^)]+)\)", prose):
        if not target.startswith("https://") and not (folder / target).exists():
            found.append(f"no target {target}")
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_everything_a_document_names_exists(document: str) -> None:
    file = ROOT / document
    assert problems(file.read_text(encoding="utf-8"), file.parent) == []


def test_every_feature_that_works_names_its_test_or_says_there_is_none() -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## What works today")[1].split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| ")][1:]
    assert rows and all(len(row) == 3 for row in rows)
    assert [row[0] for row in rows if not re.search(r"`tests/[\w/]+\.py`|no test", row[2])] == []


def tables(document: str) -> Iterator[list[str]]:
    """Rows of all tables of a document but their heads, each as its cells."""
    head = True
    for line in (ROOT / document).read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            head = True
        elif line.startswith("|---"):
            head = False
        elif not head:
            yield [cell.strip() for cell in line.split("|")[1:-1]]


def test_each_practice_names_what_to_do_its_test_and_its_effect() -> None:
    rows = list(tables("docs/practices.md"))
    asked = "zero offload|adaptive batch|seeds|nccl|mixed precision|no_sync|log analysis|backend rdma|data parallel"
    asked += "|compression fusion|model and pipeline deepspeed|network storage"
    practices = [row[0].lower() for row in rows]
    for words in asked.split("|"):
        assert any(all(word in practice for word in words.split()) for practice in practices), words
    for practice, what, test, effect in rows:
        assert re.search(r"`(--|[A-Z]{2}|RUN/|Gradient)", what), practice
        assert re.search(r"`(tests/[\w/]+\.py|test_\w+)`", test), practice
        assert effect, practice


def test_the_megatron_table_agrees_with_what_the_command_line_answers() -> None:
    rows = list(tables("docs/from-megatron.md"))
    assert len(rows) > 40
    for megatron, here in rows:
        for flag in FLAG.findall(megatron):
            line = instead_of(flag)
            if flag in flags_of_run() or "preprocessing" in megatron:
                continue  # of its own name, which here means something else
            assert line is not None, f"{flag} is neither ours nor answered"
            first, _, rest = line.partition(" ")
            if first == "use":
                assert set(FLAG.findall(rest)[:1]) <= set(FLAG.findall(here)), (flag, line, here)
            elif line.startswith("the model's shape"):
                key = re.search(r"--model: (\w+)", line)
                assert key is not None and "`--model`" in here and key[1] in here, (flag, line, here)
            elif line.startswith("leave it out"):
                assert here.startswith("leave it out"), (flag, line, here)
            elif line.startswith("not there yet"):
                assert here.startswith("not yet"), (flag, line, here)


def test_flags_of_the_same_name_are_megatrons() -> None:
    text = (ROOT / "docs/from-megatron.md").read_text(encoding="utf-8")
    section = text.split("## The same name")[1].split("`--moe-aux-loss-coeff`")[0]
    lines = (ROOT / "tests/training/megatron_flags.txt").read_text(encoding="utf-8").splitlines()
    megatrons = {f"--{name}" for line in lines if not line.startswith("#") for name in line.split()}
    ours = {f"--{name.replace('_', '-')}" for name in GROUP_OF}
    assert set(FLAG.findall(section)) == megatrons & ours


def skeleton(document: str) -> list[str]:
    """What a translation keeps: the level of headings, commands, YAML, code spans, links and pictures, in order.

    Comments of commands and the words of the tree of files are translated; code spans of one line may change places.
    """
    text = (ROOT / document).read_text(encoding="utf-8")
    kept = []
    for language, body in FENCE.findall(text):
        code = [re.sub(r"\s*#.*", "", line).rstrip() for line in body.splitlines()]
        kept += [f"{language}: {line}" for line in code if language and line]
    prose = FENCE.sub("", text)
    kept += [f"heading {len(mark)}" for mark in re.findall(r"^(#+) ", prose, re.MULTILINE)]
    kept += [f"row of {len(cells)}" for cells in tables(document)]
    kept += sorted({f"span {span}" for span in re.findall(r"`([^`\n]+)`", prose)})
    return kept + sorted(f"link {target.replace('.zh-CN', '')}" for target in re.findall(r"\]\(([^)]+)\)", prose))


@pytest.mark.parametrize(("english", "chinese"), TRANSLATIONS)
def test_chinese_documents_keep_step_with_the_english_ones(english: str, chinese: str) -> None:
    assert skeleton(chinese) == skeleton(english)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("`--tensor-parallel-size`", "no flag --tensor-parallel-size"),
        ("`--no-seq-length`", "no flag --no-seq-length"),
        ("```bash\nbash scripts/pretrain_multinode.sh --workers 2\n```", "no flag --workers"),
        ("```bash\npython -m tools.preprocess_data --lr 1\n```", "no flag --lr"),
        ("```bash\ntorchrun --nproc-per-node 2 tools/generate.py --load runs/mine --lr 1\n```", "no flag --lr"),
        ("```bash\npython -m tools.no_such_tool\n```", "no module tools.no_such_tool"),
        ("```bash\nbash no_such.sh\n```", "no file no_such.sh"),
        ("```bash\nNNODE=2 bash scripts/test.sh\n```", "nothing reads NNODE"),
        ("`tests/no_such.py`", "no path tests/no_such.py"),
        ("`mtp.py`", "no file mtp.py"),
        ("`test_no_such_thing`", "no function test_no_such_thing"),
        ("`no_such()`", "no function no_such"),
        ("`NoSuch`", "no class NoSuch"),
        ("`Mesh.no_such()`", "no Mesh.no_such"),
        ("[a](docs/no_such.md)", "no target docs/no_such.md"),
        ("| Here | Planned |\n|---|---|\n| `model/mtp.py` | |", "no path model/mtp.py"),
    ],
)
def test_what_does_not_exist_is_found(text: str, problem: str) -> None:
    assert any(found.startswith(problem) for found in problems(text + "\n")), problems(text + "\n")


@pytest.mark.parametrize(
    "text",
    [
        "`--seq_length 8`, `--no-overlap-grad-reduce`, `--moe-aux-loss-coeff`, `--full`, `--no-append-eod`",
        "| Planned | Built |\n|---|---|\n| `model/mtp.py` | `MTPBlock` in `model/deepseek.py` |",
        "| Megatron-LM | Here |\n|---|---|\n| `--bf16` | `--precision bf16` |",
        "```bash\ntorchrun --nproc-per-node 8 pretrain_deepseek.py --lr 1e-3 --run-dir runs/mine\n```",
        "```bash\ntorchrun --nproc-per-node 2 tools/generate.py --load runs/mine --top-k 5\n```",
        "```bash\npython -m pip install --no-build-isolation -e .\n```",
        "`config.json`, `metrics.jsonl`, `[s/tp, b, h]`, `main_grad`, `torch.distributed`, `Engine.train_step()`",
    ],
)
def test_what_exists_passes(text: str) -> None:
    assert problems(text + "\n") == []
