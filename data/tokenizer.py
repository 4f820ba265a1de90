"""Text to token ids and back: the interface, SentencePiece behind it, and training a SentencePiece model.

May import sentencepiece, numpy and `data.files` only.
Source: SentencePiece (Kudo and Richardson 2018) with Llama's settings: BPE, bytes for what the vocabulary lacks,
digits apart.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import sentencepiece

from data.files import atomic_file


class Tokenizer(Protocol):
    """What the rest of the code asks of a tokenizer. `load_tokenizer` picks the class by file name."""

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
        model = Path(path)
        if not model.is_file():
            raise FileNotFoundError(f"tokenizer-model {model} does not exist: train one with tools/train_tokenizer.py")
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
    def vocab_size(self) -> int:
        return int(self._processor.vocab_size())

    @property
    def eod_id(self) -> int:
        return int(self._processor.eos_id())

    def encode(self, text: str) -> list[int]:
        return list(self._processor.EncodeAsIds(text))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._processor.DecodeIds([int(i) for i in ids]))


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a file, by its name: *.model is SentencePiece.

    Raises: ValueError for another kind of file; the errors of the class.
    """
    if Path(path).suffix == ".model":
        return SentencePieceTokenizer(path)
    raise ValueError(f"tokenizer-model {os.fspath(path)}: only SentencePiece files, *.model, are known")


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
