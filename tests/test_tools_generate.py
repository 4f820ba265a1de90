"""tools/generate.py and tools/evaluate.py: what they print, on one rank and under torchrun, and what they refuse."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.indexed import IndexedWriter
from data.tokenizer import load_tokenizer, train_sentencepiece
from parallel.mesh import Layout, Mesh
from tests.layouts import Job, flags_of
from tests.training.test_checkpoint import SMALL
from tools import evaluate, generate
from training import checkpoint
from training.command_line import to_yaml
from training.engine import Engine
from training.failures import ConfigurationError

ROOT = Path(__file__).parent.parent
TEXT = "".join(f"def f{i}(a, b):\n    return a + {i} * b  # ça va\n\n" for i in range(60))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint of a model of random weights, whose flags name a tokenizer; a text; token files."""
    place = tmp_path_factory.mktemp("generate")
    tokenizer = place / "pieces.model"
    train_sentencepiece([TEXT], 300, tokenizer)
    job = Job(overrides=SMALL | {"vocab_size": 307}, flags={"tokenizer_model": str(tokenizer)})
    engine = Engine(job.model(), flags_of(job), Mesh.create(Layout()))
    checkpoint.save(engine, place / "run" / "checkpoints", checkpoint.Position(3, 12), to_yaml(flags_of(job)))
    (place / "text.txt").write_text(TEXT)
    pieces = load_tokenizer(tokenizer)
    with IndexedWriter(place / "data", vocab_size=307) as writer:
        for begin in range(0, len(TEXT), 500):
            writer.add_document([*pieces.encode(TEXT[begin : begin + 500]), pieces.eod_id])
    return place


def generated(workplace: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[str, str]:
    generate.run(generate.Arguments(str(workplace / "run"), **({"max_new_tokens": 8} | options)))
    return capsys.readouterr()


def test_prompts_come_from_flags_files_and_standard_input_and_are_continued_in_order(
    workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (workplace / "prompt.txt").write_text("def g(x):\n    ")
    files = (str(workplace / "prompt.txt"),)
    out, err = generated(workplace, capsys, prompt=("def f3(a", "ça"), prompt_file=files)
    parts = re.split(r"=== prompt (\d) of 3\n", out)
    assert parts[1::2] == ["1", "2", "3"]
    assert all(text.startswith(begin) for text, begin in zip(parts[2::2], ("def f3(a", "ça", "def g("), strict=True))
    assert "loaded" in err and re.search(r"prefill: \d+ tokens, [\d,.]+ tokens/s; decode: \d+ tokens, ", err)

    alone, _ = generated(workplace, capsys, prompt=("ça",))
    assert alone == parts[4]
    monkeypatch.setattr(sys, "stdin", io.StringIO("ça"))
    assert generated(workplace, capsys)[0] == alone
    drawn = [generated(workplace, capsys, prompt=("ça",), temperature=1.5, seed=seed)[0] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_text_is_shown_as_it_grows_without_halves_of_characters(capsys: pytest.CaptureFixture[str]) -> None:
    class Bytes:
        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode(errors="replace")

    display = generate.Display(Bytes(), [list(b"a"), list(b"b")], ended=-1, eod_id=0)  # type: ignore[arg-type]
    shown = []
    for step in ([0xC3, ord("x")], [0xA7, 0], [ord("!"), -1], [0, -1]):
        display.add(step)
        shown.append(capsys.readouterr().out)
    assert shown == ["=== prompt 1 of 2\na", "ç", "!", "\n=== prompt 2 of 2\nbx\n"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompt": ("a" * 50,), "max_new_tokens": 5000}, r"with 5000 new ones \d+: the model has 2048 positions"),
        ({"prompt": ("def", "")}, "prompt 2 of 2 is empty"),
        ({"prompt": ("def",), "temperature": -1.0}, "temperature -1.0"),
        ({"prompt": ("def",), "bos_id": 400}, "token id 400"),
        ({"prompt": ("def",), "context_parallel_size": 2}, "--context-parallel-size 2 splits a sequence"),
        ({"prompt_file": ("/no/such",)}, "--prompt-file /no/such can't be read"),
    ],
)
def test_what_cannot_be_generated_is_refused_before_the_model_is_loaded(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr("training.inference.load_model", None)
    with pytest.raises(ConfigurationError, match=said):
        generate.run(generate.Arguments(str(workplace / "run"), **options))


def test_a_tokenizer_larger_than_the_model_is_refused_with_both_sizes(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_sentencepiece([TEXT], 310, workplace / "large.model")
    monkeypatch.setattr("training.inference.load_model", None)
    options = generate.Arguments(str(workplace / "run"), prompt=("a",), tokenizer_model=str(workplace / "large.model"))
    with pytest.raises(ConfigurationError, match="large.model has 310 ids, the model's vocab_size is 307"):
        generate.run(options)


def evaluated(workplace: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, float]:
    evaluate.run(evaluate.Arguments(str(workplace / "run"), seq_length=32, **options))
    out = capsys.readouterr().out
    names = ("tokens in", "nats a token", "perplexity", "bits per byte", "bytes")
    patterns = (r"(\S+) tokens in", r"loss (\S+) nats", r"perplexity (\S+)", r"bits per byte (\S+)", r"\((\d+) bytes")
    found = (re.search(pattern, out) for pattern in patterns)
    return {name: float(match[1]) for name, match in zip(names, found, strict=True) if match}


def test_perplexity_and_bits_per_byte_of_a_file_and_of_token_files(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces = load_tokenizer(workplace / "pieces.model")
    told = evaluated(workplace, capsys, text_file=str(workplace / "text.txt"))
    assert told["tokens in"] == len(pieces.encode(TEXT)) and told["bytes"] == len(TEXT.encode())
    assert told["perplexity"] == pytest.approx(math.exp(told["nats a token"]), rel=1e-3)
    bits = told["nats a token"] * told["tokens in"] / math.log(2) / told["bytes"]
    assert told["bits per byte"] == pytest.approx(bits, rel=1e-3)
    overlapping = evaluated(workplace, capsys, text_file=str(workplace / "text.txt"), stride=8)
    assert overlapping["tokens in"] == told["tokens in"]

    data = str(workplace / "data")
    whole = evaluated(workplace, capsys, data_path=data, part="all")
    documents = -(-len(TEXT) // 500)
    assert whole["bytes"] == len(TEXT.encode())
    assert whole["tokens in"] == sum(
        len(pieces.encode(TEXT[begin : begin + 500])) + 1 for begin in range(0, 500 * documents, 500)
    )
    parts = [evaluated(workplace, capsys, data_path=data, split="50,30,20", part=x) for x in ("train", "valid", "test")]
    assert sum(part["tokens in"] for part in parts) == whole["tokens in"]
    for options, said in (
        ({}, "give a --text-file or a --data-path"),
        ({"text_file": data}, "--text-file .* can't be read"),
        ({"data_path": data + "x"}, "--data-path no token files"),
        ({"data_path": data, "split": "1,0,0"}, "part valid of --split 1,0,0 has no token"),
        ({"text_file": str(workplace / "text.txt"), "stride": 600}, "stride 600 must be"),
        ({"text_file": str(workplace / "text.txt"), "seq_length": 4096}, "beyond the model's max_position_embeddings"),
        ({"text_file": str(workplace / "text.txt"), "micro_batch_size": 0}, "--micro-batch-size 0 must be"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            evaluate.run(evaluate.Arguments(str(workplace / "run"), **options))


def test_the_prompts_token_before_is_the_one_asked_for(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("training.inference.Request.load", lambda self: seen.append(self))
    monkeypatch.setattr("model.generation.check_prompts", lambda prompts, *_: seen.append(prompts))
    pieces = load_tokenizer(workplace / "pieces.model")
    with pytest.raises(AttributeError):  # there is no model
        generate.run(generate.Arguments(str(workplace / "run"), prompt=("def",), bos_id=5))
    assert seen[0] == [[5, *pieces.encode("def")]]


@pytest.mark.full
@pytest.mark.parametrize("tool", ["generate", "evaluate"])
def test_the_commands_of_the_documents_run_under_torchrun_and_alone(workplace: Path, tool: str) -> None:
    file = str(ROOT / "tools" / f"{tool}.py")
    flags = ["--load", str(workplace / "run")]
    asked = {"generate": ["--prompt", "def f(", "--max-new-tokens", "5"], "evaluate": ["--text-file", "text.txt"]}[tool]
    outputs = []
    for command, more in (
        ([sys.executable, file], []),
        ([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", file], PARALLEL),
    ):
        done = subprocess.run(
            [*command, *flags, *asked, *more],
            cwd=workplace,
            capture_output=True,
            text=True,
            timeout=300,
            env=ENVIRONMENT,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(re.sub(r", \S+ tokens/s", "", done.stdout))
    assert outputs[0] == outputs[1] and "def f(" in outputs[0] or "perplexity" in outputs[0]

    wrong = subprocess.run(
        [sys.executable, file, "--load", "nowhere", *asked], cwd=workplace, capture_output=True, text=True, timeout=100
    )
    assert (
        wrong.returncode == 2
        and wrong.stderr == "error: --load nowhere is no directory: give a run's, a checkpoint's or a model's\n"
    )
    helped = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import runpy,sys;sys.argv=['x','--help'];runpy.run_path({file!r},run_name='__main__')",
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert helped.returncode == 0 and "--tensor-model-parallel-size" in helped.stdout


PARALLEL = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def test_token_files_without_their_tokenizer_have_no_bits_per_byte(
    workplace: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = Job(overrides=SMALL)
    engine = Engine(job.model(), flags_of(job), Mesh.create(Layout()))
    checkpoint.save(engine, tmp_path / "checkpoints", checkpoint.Position(1, 4), to_yaml(flags_of(job)))
    with IndexedWriter(tmp_path / "data", vocab_size=203) as writer:
        writer.add_document(np.random.randint(0, 203, 40))
    evaluate.run(evaluate.Arguments(str(tmp_path), data_path=str(tmp_path / "data"), part="all", seq_length=16))
    out = capsys.readouterr().out
    assert "39 tokens in 3 windows" in out and "bits per byte: unknown without --tokenizer-model" in out
