"""Hugging Face's tokenizers behind the interface that SentencePiece has: exact, unforgeable, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.indexed import IndexedDataset
from data.preprocess import preprocess
from data.tokenizer import copy_tokenizer, load_tokenizer, tokenizer_files, train_sentencepiece
from tests.hf_directories import BOS, EOS, USER, write_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hf")
    write_tokenizer(directory)
    return directory


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@settings(max_examples=100, deadline=None)
def test_nothing_is_lost_in_tokens(model: Path, text: str) -> None:
    tokenizer = load_tokenizer(model)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)


def test_text_can_forge_neither_begin_nor_end(model: Path) -> None:
    tokenizer = load_tokenizer(model / "tokenizer.json")
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eod_id) == (300, 0, 1)
    text = f"a{EOS}{BOS} b{USER}"
    ids = tokenizer.encode(text)
    assert not {0, 1} & set(ids) and 299 in ids  # a token of texts, such as the user's turn, stays one
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([0, *ids, 1]) == text  # as with SentencePiece, what isn't text isn't shown


def test_an_end_that_is_no_special_token_cannot_be_forged_either(model: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, eos_token=USER)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eod_id == 299 and 299 not in tokenizer.encode(f"a {USER} b")
    assert tokenizer.bos_id is None and tokenizer.decode(tokenizer.encode(USER)) == USER


def test_the_file_s_own_truncation_and_padding_do_not_reach_documents(model: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    import tokenizers

    cutting = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    cutting.enable_truncation(4)
    cutting.enable_padding(length=16)
    cutting.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("def f(x): return x") == load_tokenizer(model).encode("def f(x): return x")


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_begin_and_end_are_found_beside_the_file(tmp_path: Path, name: str) -> None:
    write_tokenizer(tmp_path, model_max_length=4096)
    with pytest.raises(ValueError, match="no token to end documents with: name its eos_token in"):
        load_tokenizer(tmp_path)
    (tmp_path / name).write_text(json.dumps({"bos_token_id": None, "eos_token_id": [1, 299]}))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eod_id) == (None, 1)
    (tmp_path / name).write_text(json.dumps({"eos_token_id": 300}))
    with pytest.raises(ValueError, match=f"{name} names the eos_token_id 300, which .*tokenizer.json lacks"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    with pytest.raises(ValueError, match="names the eos_token '</s>', which .*tokenizer.json doesn't have"):
        load_tokenizer(tmp_path)


def test_bad_tokenizers_are_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds neither tokenizer.json nor tokenizer.model"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match="tokenizer.json does not exist"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="has 300 ids, the model's vocab_size is 299"):
        load_tokenizer(model, vocab_size=299)
    assert load_tokenizer(model, vocab_size=300).vocab_size == 300


def test_token_files_are_made_with_it(model: Path, tmp_path: Path) -> None:
    texts = ["def f(x):\n\treturn x\n", "", f"{EOS} é🙂"]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    preprocess([str(tmp_path / "x.jsonl")], str(tmp_path / "x"), str(model))
    tokenizer, dataset = load_tokenizer(model), IndexedDataset(tmp_path / "x_text_document")
    for number, text in enumerate(texts):
        ids = dataset.document(number).tolist()
        assert ids == ([*tokenizer.encode(text), 1] if text else [])


def test_its_files_are_carried_under_the_published_names(model: Path, tmp_path: Path) -> None:
    copies = copy_tokenizer(model, tmp_path)
    assert {copy.name for copy in copies} == {"tokenizer.json", "tokenizer_config.json"}
    assert load_tokenizer(tmp_path).encode("abc") == load_tokenizer(model).encode("abc")
    pieces = tmp_path / "mine.model"
    train_sentencepiece([Path(__file__).read_text()], 400, pieces)
    (tmp_path / "tokenizer_config.json").write_text("{}")  # somebody else's
    assert tokenizer_files(pieces) == {"tokenizer.model": pieces}
