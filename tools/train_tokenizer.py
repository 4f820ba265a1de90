"""Train a SentencePiece tokenizer on the files that will be preprocessed.

A command line over `data.tokenizer`; may import tyro.
Source: see `data/tokenizer.py`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import tyro

from data.preprocess import expand_inputs, read_documents
from data.tokenizer import load_tokenizer, train_sentencepiece


@dataclass(frozen=True)
class Arguments:
    """Train a SentencePiece BPE model with byte fallback."""

    input: list[str]
    """JSON-lines files (*.jsonl, *.json), text files, directories or quoted patterns ("src/**/*.py")."""

    vocab_size: int
    """Number of pieces; 256 of them are bytes, three are <unk>, <s> and </s>."""

    output: str
    """File to write, such as tokenizer.model. It appears when it is complete."""

    json_key: str = "text"
    """The field of a JSON line that holds the text."""

    max_characters: int = 10_000_000
    """Train on a uniform sample of the text where there is more than this."""


def main(arguments: list[str] | None = None) -> None:
    options = tyro.cli(Arguments, args=arguments)
    if not options.output.endswith(".model"):
        sys.exit(
            f"error: output {options.output} must end in .model, by which the other tools know a SentencePiece file"
        )
    try:
        documents = (texts[0] for texts, _ in read_documents(expand_inputs(options.input), [options.json_key]))
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        train_sentencepiece(documents, options.vocab_size, options.output, options.max_characters, threads)
        tokenizer = load_tokenizer(options.output)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(f"{options.output}: {tokenizer.vocab_size} pieces, documents end with id {tokenizer.eod_id}")


if __name__ == "__main__":
    main()
