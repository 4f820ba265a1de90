"""Perplexity and bits per byte of a text file, or of token files, under a trained model.

A command line over `training.evaluation`; may import tyro and rich.

    python tools/evaluate.py --load RUN --text-file text.txt
    torchrun --nproc-per-node 4 tools/evaluate.py --load RUN --data-path PREFIX --part valid
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

if not __package__:  # run as a file: then its own directory is on the path, and not the project's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import tyro  # noqa: E402

from training.arguments import Unset  # noqa: E402
from training.failures import ConfigurationError, FailureReport, leave  # noqa: E402
from training.inference_arguments import InferenceArguments  # noqa: E402


@dataclass(frozen=True)
class Arguments(InferenceArguments):
    """How well a trained model predicts a text. The text is cut into windows of --seq-length tokens, which are
    predicted each by itself, by the forward pass of training: with the default --stride one after the other, so a
    window's first tokens have little before them. With a smaller stride windows overlap, and each counts its last
    --stride tokens only: the model then always sees at least seq-length minus stride tokens before, and there is that
    much more to compute. Every token counts once."""

    text_file: Unset[str] = None
    """Text to predict, as one document."""
    data_path: Unset[str] = None
    """Or a prefix of .bin/.idx files, as one stream of documents. Bits per byte need its tokenizer."""
    split: str = "969,30,1"
    """With --data-path: shares of the documents for training, validation and test, as in training."""
    part: Literal["train", "valid", "test", "all"] = "valid"
    """With --data-path: which of these is predicted."""
    seq_length: int = 512
    """Tokens of a window: best those the model was trained with. Must suit the layout, as in training."""
    stride: Unset[int] = None
    """Tokens from a window's first to the next one's; by default --seq-length."""
    micro_batch_size: int = 8
    """Windows of one forward pass."""
    bos_id: Unset[int] = None
    """Token before the text: DeepSeek's published models want their bos_token_id. By default the one that ends a
    document, which in training comes before each."""


def run(options: Arguments) -> None:
    if (options.text_file is None) == (options.data_path is None):
        raise ConfigurationError("give a --text-file or a --data-path, one of them")
    for flag, number in (("seq-length", options.seq_length), ("micro-batch-size", options.micro_batch_size)):
        if number < 1:
            raise ConfigurationError(f"--{flag} {number} must be at least 1")

    # From here on with torch.
    from rich.console import Console
    from rich.progress import Progress

    from parallel.launch import destroy
    from training.evaluation import Text, Windows, evaluate
    from training.inference import Request

    needs_tokenizer = options.text_file is not None
    request = Request.check(options, options.seq_length, options.micro_batch_size, needs_tokenizer)
    vocab_size, tokenizer = request.source.config.vocab_size, request.tokenizer
    if options.bos_id is not None and not 0 <= options.bos_id < vocab_size:
        raise ConfigurationError(f"--bos-id {options.bos_id} is outside the model's vocabulary of {vocab_size}")
    if options.text_file is not None:
        assert tokenizer is not None
        text = Text.of_file(Path(options.text_file), tokenizer, options.bos_id)
    else:
        assert options.data_path is not None
        text = Text.of_documents(options.data_path, options.split, options.part, vocab_size, tokenizer, options.bos_id)
    try:
        windows = Windows(
            text.ids, options.seq_length, options.seq_length if options.stride is None else options.stride
        )
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    model = request.load()
    shows = model.mesh.world.is_first
    began = time.perf_counter()
    with Progress(console=Console(stderr=True), disable=not shows) as progress:
        task = progress.add_task("evaluating", total=len(windows))
        nats, tokens = evaluate(
            model, windows, options.micro_batch_size, lambda done: progress.update(task, completed=done)
        )
    if shows:
        seconds = time.perf_counter() - began
        print(f"{tokens} tokens in {len(windows)} windows of {options.seq_length}, {tokens / seconds:,.0f} tokens/s")
        print(f"loss {nats / tokens:.4f} nats a token, perplexity {math.exp(nats / tokens):.3f}")
        if text.bytes:
            print(f"bits per byte {nats / math.log(2) / text.bytes:.4f} ({text.bytes} bytes)")
        else:
            print("bits per byte: unknown without --tokenizer-model")
    destroy()


def main(arguments: list[str] | None = None) -> None:
    options = tyro.cli(tyro.conf.OmitArgPrefixes[tyro.conf.DisallowNone[Arguments]], args=arguments)
    with FailureReport():
        run(options)


if __name__ == "__main__":
    main()
    leave()
