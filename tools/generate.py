"""Text from a checkpoint: prompts in, continuations out as they come.

A command line over `training.inference` and `model.generation`; may import tyro.

    python tools/generate.py --load RUN --prompt "def main():"
    torchrun --nproc-per-node 2 tools/generate.py --load RUN --tensor-model-parallel-size 2 --prompt-file prompt.txt
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # run as a file: then its own directory is on the path, and not the project's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import tyro  # noqa: E402

from training.arguments import Unset  # noqa: E402
from training.failures import ConfigurationError, FailureReport, leave  # noqa: E402
from training.inference_arguments import InferenceArguments  # noqa: E402

if TYPE_CHECKING:
    from data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Arguments(InferenceArguments):
    """Continue prompts with a trained model. All prompts run together, each is shown when its turn has come; the text
    goes to standard output, speed to standard error. With data-parallel ranks the prompts are dealt out over them."""

    prompt: tuple[str, ...] = ()
    """Texts to go on from. Without prompts, standard input is one (on one rank)."""
    prompt_file: tuple[str, ...] = ()
    """Files, each a whole prompt; they come after those of --prompt."""
    max_new_tokens: int = 128
    """Tokens of each continuation, unless a token that ends a document comes before."""
    temperature: float = 0.0
    """0 takes the likeliest token; above it tokens are drawn, the more evenly the higher."""
    top_k: int = 0
    """Draw from the so many likeliest tokens only; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest tokens that have this probability together."""
    seed: int = 1234
    """Of the draws: the same seed gives the same text, on any layout."""
    bos_id: Unset[int] = None
    """Token put before each prompt: DeepSeek's published models want their bos_token_id. By default none."""


class Display:
    """Texts that grow at the same time, written one after the other: the first one that hasn't ended is live."""

    def __init__(self, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], ended: int, eod_id: int):
        self.tokenizer, self.ids = tokenizer, [list(ids) for ids in prompts]
        self.stops = (ended, eod_id)
        self.open = [True] * len(prompts)
        self.turn, self.shown = 0, ""
        self._headline()

    def add(self, tokens: Sequence[int]) -> None:
        """A step's tokens, one for each prompt."""
        for i, token in enumerate(tokens):
            self.open[i] = self.open[i] and token not in self.stops
            if self.open[i]:
                self.ids[i].append(token)
        self.write()

    def close(self) -> None:
        """There are no more tokens."""
        self.open = [False] * len(self.open)
        self.write()

    def write(self) -> None:
        """Write what is new, and go on with the next text where this one has ended."""
        while self.turn < len(self.ids):
            text = self.tokenizer.decode(self.ids[self.turn])
            if self.open[self.turn]:
                text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # the bytes of a character that isn't whole yet
            sys.stdout.write(text[len(self.shown) :])
            self.shown = text
            if self.open[self.turn]:
                break
            sys.stdout.write("\n")
            self.turn, self.shown = self.turn + 1, ""
            if self.turn < len(self.ids):
                self._headline()
        sys.stdout.flush()

    def _headline(self) -> None:
        if len(self.ids) > 1:
            sys.stdout.write(f"=== prompt {self.turn + 1} of {len(self.ids)}\n")


def read_prompts(options: Arguments) -> list[str]:
    """Raises ConfigurationError where a file can't be read, or several ranks would share standard input."""
    prompts = list(options.prompt)
    for path in options.prompt_file:
        try:
            prompts.append(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"--prompt-file {path} can't be read: {error}") from error
    if not prompts:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigurationError("ranks can't share standard input: give --prompt or --prompt-file")
        prompts.append(sys.stdin.read())
    return prompts


def run(options: Arguments) -> None:
    texts = read_prompts(options)

    # From here on with torch.
    from model.generation import ENDED, Decoder, check_prompts, generate
    from model.sampling import Sampling
    from parallel.launch import destroy
    from training.inference import Request

    request = Request.check(options)
    tokenizer, first = request.tokenizer, [] if options.bos_id is None else [options.bos_id]
    assert tokenizer is not None
    prompts = [[*first, *tokenizer.encode(text)] if text else [] for text in texts]
    try:
        sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
        check_prompts(prompts, options.max_new_tokens, request.source.config)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error

    began = time.perf_counter()
    model = request.load()
    display = None
    if model.mesh.world.is_first:
        seconds = time.perf_counter() - began
        ranks = f"{model.mesh.world_size} rank{'s' * (model.mesh.world_size > 1)}"
        print(f"loaded {request.source.path} on {ranks} in {seconds:.1f} s", file=sys.stderr)
        display = Display(tokenizer, [ids[len(first) :] for ids in prompts], ENDED, tokenizer.eod_id)
        display.write()
    decoder = Decoder(model.config, model.stage, model.mesh, model.dtype)
    times, counts = [time.perf_counter()], []
    steps = generate(decoder, prompts, options.max_new_tokens, sampling, tokenizer.eod_id, tokenizer.vocab_size)
    for tokens in steps:
        times.append(time.perf_counter())
        counts.append(len(tokens) - tokens.count(ENDED))
        if display is not None:
            display.add(tokens)
    if display is not None:
        display.close()
        read, prefill, decode = sum(map(len, prompts)), times[1] - times[0], times[-1] - times[1]
        said = f"prefill: {read} tokens, {read / prefill:,.1f} tokens/s"
        if len(counts) > 1:
            said += f"; decode: {sum(counts[1:])} tokens, {sum(counts[1:]) / decode:,.1f} tokens/s"
        print(said, file=sys.stderr)
    destroy()


def main(arguments: list[str] | None = None) -> None:
    options = tyro.cli(tyro.conf.OmitArgPrefixes[tyro.conf.DisallowNone[Arguments]], args=arguments)
    with FailureReport():
        run(options)


if __name__ == "__main__":
    main()
    leave()
