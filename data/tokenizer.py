"""Text to token ids and back: the interface, SentencePiece and Hugging Face's tokenizers behind it, and training one.

May import sentencepiece, tokenizers, numpy and `data.files` only.
Source: SentencePiece (Kudo and Richardson 2018) with Llama's settings: BPE, bytes for what the vocabulary lacks,
digits apart. Of Hugging Face: `tokenizer.json` and the files beside it, as DeepSeek publishes them.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import sentencepiece

from data.files import atomic_file

_JSON, _MODEL = "tokenizer.json", "tokenizer.model"
_BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
)
"""What Hugging Face's directories have beside a tokenizer, and needs to go where it goes."""


class Tokenizer(Protocol):
    """What the rest of the code asks of a tokenizer. `load_tokenizer` picks the class by file name."""

    @property
    def bos_id(self) -> int | None:
        """The token that the model's texts begin with, None where there is none. `encode` doesn't add it."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; all lie in [0, vocab_size)."""

    @property
    def eod_id(self) -> int:
        """The token that ends a document. `encode` never returns it, whatever the text says."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class SentencePieceTokenizer:
    """A SentencePiece model file; its end-of-sentence piece ends documents, as in Megatron's GPTSentencePieceTokenizer.

    With a model of `train_sentencepiece`, decode(encode(text)) is text, but for U+2581, SentencePiece's own mark for
    a blank.

    Raises: FileNotFoundError; ValueError for a file that is no SentencePiece model or has no end-of-sentence piece.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        model = tokenizer_file(path)
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model.read_bytes())
        except RuntimeError as error:
            raise ValueError(f"tokenizer-model {model} is not a SentencePiece model ({error})") from None
        if self._processor.eos_id() < 0:
            raise ValueError(
                f"tokenizer-model {model} has no end-of-sentence piece to end documents with: train it with eos_id ≥ 0"
            )

    @property
    def bos_id(self) -> int | None:
        found = int(self._processor.bos_id())
        return None if found < 0 else found

    @property
    def vocab_size(self) -> int:
        return int(self._processor.vocab_size())

    @property
    def eod_id(self) -> int:
        return int(self._processor.eos_id())

    def encode(self, text: str) -> list[int]:
        return list(self._processor.EncodeAsIds(text))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._processor.DecodeIds([int(i) for i in ids]))


class HuggingFaceTokenizer:
    """A `tokenizer.json`, such as DeepSeek's.

    Which tokens begin and end a document stands beside it: in tokenizer_config.json (bos_token, eos_token), else in
    generation_config.json or config.json (bos_token_id, eos_token_id). As with SentencePiece, `encode` adds neither,
    text that spells them is text, and `decode` leaves them out.

    Raises: FileNotFoundError; ValueError for another kind of file, or where nothing names the end of a document.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        import tokenizers  # not needed for SentencePiece

        file = tokenizer_file(path)
        try:
            self._model = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(f"tokenizer-model {file} is not a tokenizer.json ({error})") from None
        self._model.no_truncation()
        self._model.no_padding()
        self._model.encode_special_tokens = True  # spelt in a text, they are text
        self.vocab_size = max(self._model.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_id = self._named("bos", file)
        eod_id = self._named("eos", file)
        if eod_id is None:
            raise ValueError(
                f"tokenizer-model {file} has no token to end documents with: name its eos_token in "
                f"{file.with_name('tokenizer_config.json')}"
            )
        self.eod_id: int = eod_id
        known = [self._model.id_to_token(i) for i in (self.bos_id, eod_id) if i is not None]
        self._model.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in known])

    def encode(self, text: str) -> list[int]:
        return list(self._model.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.decode([int(i) for i in ids], skip_special_tokens=True))

    def _named(self, kind: str, file: Path) -> int | None:
        """The id of "bos" or "eos" by the files beside `file`; ValueError where the tokenizer doesn't have it."""
        where = file.with_name("tokenizer_config.json")
        token = _read_json(where).get(f"{kind}_token")
        if token is not None:
            token = token["content"] if isinstance(token, dict) else token
            found = self._model.token_to_id(token)
            if found is None:
                raise ValueError(f"{where} names the {kind}_token {token!r}, which {file} doesn't have")
            return int(found)
        for name in ("generation_config.json", "config.json"):
            found = _read_json(file.with_name(name)).get(f"{kind}_token_id")
            found = found[0] if isinstance(found, list) and found else found
            if found is not None:
                if self._model.id_to_token(found) is None:
                    raise ValueError(f"{file.with_name(name)} names the {kind}_token_id {found}, which {file} lacks")
                return int(found)
        return None


def load_tokenizer(path: str | os.PathLike[str], vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of a file or a directory, by its name: *.model is SentencePiece, *.json Hugging Face's.

    Of a directory tokenizer.json is taken, else tokenizer.model. vocab_size: the model's, which may be larger than the
    tokenizer's (DeepSeek's are), never smaller.

    Raises: ValueError for another kind of file or a tokenizer with ids beyond `vocab_size`; the errors of the class.
    """
    file = tokenizer_file(path)
    if file.suffix not in (".model", ".json"):
        raise ValueError(
            f"tokenizer-model {file}: only SentencePiece files, *.model, and Hugging Face's tokenizer.json are known"
        )
    tokenizer: Tokenizer = SentencePieceTokenizer(file) if file.suffix == ".model" else HuggingFaceTokenizer(file)
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"tokenizer-model {file} has {tokenizer.vocab_size} ids, the model's vocab_size is {vocab_size}: use the "
            "tokenizer the model is made for, or raise vocab_size"
        )
    return tokenizer


def tokenizer_file(path: str | os.PathLike[str]) -> Path:
    """`path` itself, or of a directory the file that `load_tokenizer` takes. Raises FileNotFoundError."""
    given = Path(path)
    if given.is_dir():
        for name in (_JSON, _MODEL):
            if (given / name).is_file():
                return given / name
        raise FileNotFoundError(f"tokenizer-model {given} holds neither {_JSON} nor {_MODEL}")
    if not given.is_file():
        raise FileNotFoundError(f"tokenizer-model {given} does not exist: train one with tools/train_tokenizer.py")
    return given


def tokenizer_files(path: str | os.PathLike[str]) -> dict[str, Path]:
    """What makes up a tokenizer, by the names that Hugging Face's directories give them: its file, and those beside it.

    A SentencePiece file of any name is "tokenizer.model". Raises as `tokenizer_file` does.
    """
    file = tokenizer_file(path)
    beside = {name: file.with_name(name) for name in (_JSON, _MODEL, *_BESIDE) if file.name in (_JSON, _MODEL)}
    beside[_MODEL if file.suffix == ".model" else _JSON] = file
    return {name: source for name, source in beside.items() if source.is_file()}


def copy_tokenizer(path: str | os.PathLike[str], directory: Path) -> list[Path]:
    """Copy `tokenizer_files` into an existing directory; returns the copies."""
    return [Path(shutil.copyfile(source, directory / name)) for name, source in tokenizer_files(path).items()]


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    return values if isinstance(values, dict) else {}


def _pieces(text: str, size: int = 2000) -> Iterator[str]:
    """Text in parts of about `size` characters that end at line ends where there are some."""
    start = 0
    while start < len(text):
        line_end = text.find("\n", start + size) + 1
        end = min(line_end or len(text), start + 4 * size)
        yield text[start:end]
        start = end


def train_sentencepiece(
    documents: Iterable[str],
    vocab_size: int,
    output: str | os.PathLike[str],
    max_characters: int = 10_000_000,
    threads: int = 1,
) -> None:
    """Train a BPE model with byte fallback and write it to `output`, whole or not at all.

    Whitespace is kept as it is (no normalisation, no added blank at the start): newlines and indentation are what
    code is made of. The same documents give the same model.

    Args:
        documents: texts; beyond `max_characters` a uniform sample of parts is trained on.
        vocab_size: pieces, of which 256 are bytes and 3 are <unk>, <s> and </s>, the end of a document.
    Raises: ValueError for no text, or a vocabulary too small for the characters or too large for the text.
    """
    sample: list[str] = []
    room = max(1, max_characters // 2000)
    random = np.random.RandomState(0)
    parts = (part for document in documents for part in _pieces(document))
    for number, part in enumerate(parts):  # reservoir sampling: one pass, any number of documents
        if number < room:
            sample.append(part)
        elif (place := random.randint(number + 1)) < room:
            sample[place] = part
    if not sample:
        raise ValueError("there is no text to train a tokenizer on")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=iter(sample),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            character_coverage=0.9999,  # rarer characters are spelt in bytes
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=4 * 4 * 2000,  # bytes: `_pieces` cuts at 4 x 2000 characters of up to 4 bytes
            num_threads=threads,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(
            f"vocab-size {vocab_size} does not suit this text of {sum(map(len, sample))} characters: {error}"
        ) from None
    with atomic_file(output) as stream:
        stream.write(model.getvalue())
