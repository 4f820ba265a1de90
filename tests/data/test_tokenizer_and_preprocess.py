"""From text to token files: nothing is lost in tokens, many processes give one result, a killed run leaves nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.corpus import build_corpus, standard_library_documents
from data.files import atomic_file
from data.indexed import IndexedDataset
from data.preprocess import expand_inputs, preprocess, read_documents
from data.tokenizer import SentencePieceTokenizer, load_tokenizer, train_sentencepiece
from tools import build_corpus as build_corpus_tool
from tools import preprocess_data, train_tokenizer

SOURCE = Path(json.__file__).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_sentencepiece([file.read_text() for file in sorted(SOURCE.glob("*.py"))], 512, path)
    return str(path)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 documents of varied length, some empty, the first too."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    lines = (SOURCE / "decoder.py").read_text().splitlines(keepends=True)
    with open(path, "w") as stream:
        for number in range(60):
            text = "" if number % 20 == 0 else "".join(lines[number : 5 * number])
            stream.write(json.dumps({"text": text, "title": f"document {number}"}) + "\n")
    return path


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=60))
@settings(max_examples=200, deadline=None)
def test_nothing_is_lost_in_tokens(model: str, text: str) -> None:
    tokenizer = load_tokenizer(model)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids) and tokenizer.eod_id not in ids


def test_code_comes_back_with_its_indentation_and_text_cannot_forge_the_end(model: str) -> None:
    tokenizer = load_tokenizer(model)
    for text in (
        "def f(x):\n\tif x:\n        return  0\n\n\n",
        "</s><s><unk>",
        " leading",
        "trailing \r\n",
        "🙂 é\x00",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.eod_id not in tokenizer.encode(text)
    assert tokenizer.vocab_size == 512


def test_training_a_tokenizer_is_reproducible_also_on_a_sample(tmp_path: Path) -> None:
    documents = [file.read_text() for file in sorted(SOURCE.glob("*.py"))]
    assert sum(map(len, documents)) > 30_000
    for name in ("one", "two"):
        train_sentencepiece(documents, 400, tmp_path / f"{name}.model", max_characters=20_000)
    train_sentencepiece(documents, 400, tmp_path / "all.model")
    first, second = SentencePieceTokenizer(tmp_path / "one.model"), SentencePieceTokenizer(tmp_path / "two.model")
    assert all(first.encode(text) == second.encode(text) for text in documents)
    assert first.encode(documents[0]) != SentencePieceTokenizer(tmp_path / "all.model").encode(documents[0])


def test_bad_tokenizers_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none.model does not exist: train one"):
        load_tokenizer(tmp_path / "none.model")
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match="bad.model is not a SentencePiece model"):
        load_tokenizer(tmp_path / "bad.model")
    (tmp_path / "vocab.txt").touch()
    with pytest.raises(ValueError, match="vocab.txt: only SentencePiece files"):
        load_tokenizer(tmp_path / "vocab.txt")
    for vocab_size in (100, 100_000):
        with pytest.raises(ValueError, match=f"vocab-size {vocab_size} does not suit this text of 20 characters"):
            train_sentencepiece(["abcdefghijklmnopqrst"], vocab_size, tmp_path / "new.model")
    with pytest.raises(ValueError, match="no text"):
        train_sentencepiece([""], 300, tmp_path / "new.model")
    assert not list(tmp_path.glob("new*"))


@pytest.mark.parametrize("append_eod", [True, False])
def test_token_files_hold_each_document_and_its_end(tmp_path: Path, model: str, corpus: Path, append_eod: bool) -> None:
    reported: list[tuple[int, int, int]] = []
    written = preprocess(
        [str(corpus)],
        str(tmp_path / "x"),
        model,
        append_eod,
        json_keys=("text", "title"),
        report=lambda *numbers: reported.append(numbers),
        chunk_characters=10_000,
    )
    tokenizer = load_tokenizer(model)
    assert [Path(one.prefix).name for one in written] == ["x_text_document", "x_title_document"]
    for one, key in zip(written, ("text", "title"), strict=True):
        dataset = IndexedDataset(one.prefix)
        assert (dataset.num_documents, dataset.num_tokens) == (one.documents, one.tokens) and one.documents == 60
        assert dataset.dtype == np.uint16
        for number, line in enumerate(corpus.read_text().splitlines()):
            expected = tokenizer.encode(json.loads(line)[key])
            if append_eod and expected:
                expected.append(tokenizer.eod_id)
            assert dataset.document(number).tolist() == expected
            assert dataset.sequence_lengths[number] == len(expected)  # the end counts in the index
    assert len(reported) > 3
    totals = np.sum(reported, axis=0).tolist()
    assert totals == [corpus.stat().st_size, 60, sum(one.tokens for one in written)]


def test_the_number_of_processes_changes_nothing_and_a_killed_worker_is_an_error(
    tmp_path: Path, model: str, corpus: Path
) -> None:
    for workers in (1, 2):
        preprocess([str(corpus)], str(tmp_path / f"w{workers}"), model, workers=workers, chunk_characters=5_000)
    for suffix in ("bin", "idx"):
        one, two = (tmp_path / f"w{workers}_text_document.{suffix}" for workers in (1, 2))
        assert one.read_bytes() == two.read_bytes()

    others = multiprocessing.active_children()  # of other tests: ranks that are kept for the whole run

    def kill_one(*_: int) -> None:
        for child in multiprocessing.active_children():  # none is new where the pool has ended them already
            if child not in others:
                child.kill()
                return

    with pytest.raises(BrokenProcessPool):
        preprocess([str(corpus)], str(tmp_path / "k"), model, workers=2, report=kill_one, chunk_characters=500)
    assert not list(tmp_path.glob("k_*"))


KILLED = """
import multiprocessing, os, signal, sys
from data.preprocess import preprocess

def die(*_):
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    preprocess([sys.argv[1]], sys.argv[2], sys.argv[3], workers=2, report=die, chunk_characters=500)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the state of processes from /proc")
def test_a_killed_run_leaves_neither_files_that_look_complete_nor_processes(
    tmp_path: Path, model: str, corpus: Path
) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    root = str(Path(preprocess_data.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, str(tmp_path / "killed.py"), str(corpus), str(tmp_path / "x"), model],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        timeout=60,
    )
    assert result.returncode == -signal.SIGKILL
    assert not list(tmp_path.glob("x*.bin")) and not list(tmp_path.glob("x*.idx"))
    workers = [int(pid) for pid in result.stdout.split()]
    assert workers

    def running(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    deadline = time.monotonic() + 20
    while any(map(running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(running, workers))


def test_inputs_keep_their_order(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.py", "c.jsonl", "deep/a.txt", "deep/x.bin"):
        (tmp_path / name).write_text("x")

    def names(*inputs: str) -> list[str]:
        return [path.relative_to(tmp_path).as_posix() for path in expand_inputs([str(tmp_path / i) for i in inputs])]

    assert names("") == ["b.txt", "c.jsonl", "deep/a.txt"]
    assert names("deep/x.bin", "b.txt") == ["deep/x.bin", "b.txt"]
    assert names("**/a.*") == ["a.py", "deep/a.txt"]
    with pytest.raises(FileNotFoundError, match="nothing.* is no file, directory or pattern"):
        expand_inputs([str(tmp_path / "nothing*")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty holds no"):
        expand_inputs([str(tmp_path / "empty")])


@pytest.mark.parametrize(
    ("name", "content", "keys", "match"),
    [
        ("x.jsonl", b'{"text": "a"}\n\n{"text": \n', ["text"], "x.jsonl, line 3: not a JSON object"),
        ("x.jsonl", b"[1]\n", ["text"], "x.jsonl, line 1: not a JSON object"),
        ("x.jsonl", b'{"text": "\xff"}\n', ["text"], "x.jsonl, line 1: not a JSON object"),
        ("x.jsonl", b'{"body": "a", "id": 1}\n', ["text"], "x.jsonl, line 1: no key 'text'; it has body, id"),
        ("x.jsonl", b'{"text": 5}\n', ["text"], "line 1: the values of text must be strings"),
        ("x.txt", b"\xff\xfe", ["text"], "x.txt is not UTF-8 text"),
        ("x.txt", b"a", ["body"], "x.txt is plain text"),
    ],
)
def test_bad_documents_are_named(tmp_path: Path, name: str, content: bytes, keys: list[str], match: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=match):
        list(read_documents([tmp_path / name], keys))


def test_half_a_surrogate_pair_does_not_stop_a_run(tmp_path: Path, model: str) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a\\ud800b"}\n')
    preprocess([str(tmp_path / "x.jsonl")], str(tmp_path / "x"), model, append_eod=False)
    ids = IndexedDataset(tmp_path / "x_text_document").document(0)
    assert load_tokenizer(model).decode(ids.tolist()) == "a?b"


def test_the_corpus_is_the_library_without_its_tests(tmp_path: Path) -> None:
    library = tmp_path / "library"
    for name, text in {
        "a.py": "x = 1\n",
        "package/b.py": "y = 2\r\n",
        "package/__init__.py": "",
        "test/test_a.py": "no",
        "package/tests/c.py": "no",
        "site-packages/d.py": "no",
        "latin.py": "# -*- coding: latin-1 -*-\n# \xe9\n",
        "broken.py": "\xe9",
        "pydoc_data/topics.py": "topics = {'assert': 'Assert\\n'}\n",
        "notes.txt": "no",
    }.items():
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_bytes(text.encode("latin-1"))
    found = dict(standard_library_documents(library))
    assert set(found) == {"a.py", "package/b.py", "latin.py", "pydoc_data/topics.py/assert"}
    assert "\xe9" in found["latin.py"] and found["pydoc_data/topics.py/assert"] == "Assert\n"
    with pytest.raises(ValueError, match="holds no Python source"):
        build_corpus(tmp_path / "x.jsonl", library / "pydoc_data" / "none")
    assert not list(tmp_path.glob("x*"))


def test_an_unfinished_file_is_never_seen(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    with pytest.raises(RuntimeError), atomic_file(tmp_path / "x", "w") as stream:
        stream.write("half")
        assert (tmp_path / "x").read_text() == "old"
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["x"] and (tmp_path / "x").read_text() == "old"


def test_the_commands_make_a_corpus_a_tokenizer_and_token_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, tokenizer, prefix = (str(tmp_path / name) for name in ("corpus.jsonl", "tokenizer.model", "x"))
    build_corpus_tool.main(["--output", corpus])
    build_corpus_tool.main(["--output", corpus + ".again"])
    assert Path(corpus).read_bytes() == Path(corpus + ".again").read_bytes()
    assert Path(corpus).stat().st_size > 5_000_000
    small = tmp_path / "small.jsonl"
    small.write_text("".join(Path(corpus).read_text().splitlines(keepends=True)[:15]))
    train_tokenizer.main(["--input", str(small), "--vocab-size", "600", "--output", tokenizer])
    flags = ["--input", str(small), "--output-prefix", prefix, "--tokenizer-model", tokenizer, "--workers", "1"]
    preprocess_data.main(flags)
    assert "15 documents" in capsys.readouterr().out
    dataset = IndexedDataset(prefix + "_text_document")
    assert all(dataset.document(number)[-1] == 2 for number in range(15))
    preprocess_data.main([*flags, "--no-append-eod"])
    assert IndexedDataset(prefix + "_text_document").num_tokens == dataset.num_tokens - 15
    with pytest.raises(SystemExit, match="error: input .*absent is no file"):
        preprocess_data.main(["--input", "absent", "--output-prefix", prefix, "--tokenizer-model", tokenizer])
    with pytest.raises(SystemExit, match="must end in .model"):
        train_tokenizer.main(["--input", corpus, "--vocab-size", "600", "--output", "tokenizer"])
    with pytest.raises(SystemExit):
        preprocess_data.main([*flags, "--apend-eod"])  # an unknown flag
