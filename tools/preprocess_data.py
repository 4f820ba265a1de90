"""Tokenise text into the .bin/.idx files that `--data-path` takes.

A command line over `data.preprocess`; may import tyro and rich.
Source: Megatron-LM's tools/preprocess_data.py; same flags, same output names.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from data.preprocess import expand_inputs, preprocess


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Arguments:
    """Tokenise JSON lines or plain text into Megatron's indexed format."""

    input: list[str]
    """JSON-lines files (*.jsonl, *.json: one document a line), text files (one document each), directories (*.jsonl,
    *.json and *.txt) or quoted patterns ("src/**/*.py"). The order of the documents is that of the inputs."""

    output_prefix: str
    """Writes OUTPUT_PREFIX_{key}_document.bin and .idx. They appear when all is done."""

    tokenizer_model: str
    """SentencePiece model (*.model), from tools/train_tokenizer.py or elsewhere, or a tokenizer.json of Hugging Face's,
    or the directory of one (a downloaded model's)."""

    append_eod: bool = True
    """End every document with the end-of-document token. Samples are packed across documents, so without it nothing
    can tell afterwards where one ends: no loss mask, no reset of positions or attention. Megatron's flag is off by
    default and often forgotten; --no-append-eod gives its default."""

    workers: int = field(default_factory=_processors)
    """Processes that tokenise; one for each processor when not given. The output doesn't depend on it."""

    json_keys: list[str] = field(default_factory=lambda: ["text"])
    """Fields of a JSON line to tokenise, each into its own pair of files."""


def main(arguments: list[str] | None = None) -> None:
    options = tyro.cli(Arguments, args=arguments)
    console = Console(stderr=True)
    columns = (
        TextColumn("tokenising"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TextColumn("{task.fields[documents]:,} documents, {task.fields[tokens]:,} tokens"),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    documents = tokens = 0
    try:
        total = sum(path.stat().st_size for path in expand_inputs(options.input))
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("tokenising", total=total, documents=0, tokens=0)

            def report(new_bytes: int, new_documents: int, new_tokens: int) -> None:
                nonlocal documents, tokens
                documents += new_documents
                tokens += new_tokens
                progress.update(task, advance=new_bytes, documents=documents, tokens=tokens)

            results = preprocess(
                options.input,
                options.output_prefix,
                options.tokenizer_model,
                options.append_eod,
                options.workers,
                options.json_keys,
                report,
            )
    except (OSError, ValueError, BrokenProcessPool) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: nothing was written")
    for result in results:
        print(f"{result.prefix}: {result.documents} documents, {result.tokens} tokens")


if __name__ == "__main__":
    main()
