"""How well a model predicts a text: nats of every token, by the forward pass that training has.

Lives here: a text cut into windows, and the sum of its losses on any layout. May import the rooms below. A model sees
at most a window, so the first tokens of one have less before them; overlapping windows cost more and tell better.
Shapes: w windows, s their length.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from data.blend import SPLITS, split_documents
from data.indexed import IndexedDataset
from data.tokenizer import Tokenizer
from model.microbatch import MicroBatch, set_denominators
from parallel.comm import all_reduce_
from parallel.pipeline.make import make_schedule
from parallel.pipeline.runtime import PipelineRuntime
from training.failures import ConfigurationError
from training.inference import Model


@dataclass(frozen=True)
class Windows:
    """ids cut every `stride` tokens into windows of `length`; every id but the first is predicted exactly once.

    With a stride below the length, windows overlap, and a window counts those of its tokens that none before it had,
    its last `stride`. Raises ValueError for fewer than two ids, or a stride that isn't from 1 to the length.
    """

    ids: npt.NDArray[np.integer]
    length: int
    stride: int

    def __post_init__(self) -> None:
        if len(self.ids) < 2:
            raise ValueError(f"a text of {len(self.ids)} tokens has nothing to predict: give a longer one")
        if not 1 <= self.stride <= self.length:
            raise ValueError(f"stride {self.stride} must be from 1 to the {self.length} tokens of a window")

    def __len__(self) -> int:
        return 1 + max(0, math.ceil((len(self.ids) - 1 - self.length) / self.stride))

    def micro_batch(self, first: int, count: int) -> MicroBatch:
        """Windows first … first + count - 1; what lies beyond the last, or beyond the text, counts nothing."""
        tokens = np.zeros((count, self.length + 1), dtype=np.int64)
        mask = np.zeros((count, self.length), dtype=np.float32)
        for row in range(count):
            begin = (first + row) * self.stride
            part = self.ids[begin : begin + self.length + 1] if first + row < len(self) else self.ids[:0]
            tokens[row, : len(part)] = part
            counted_before = self.length - self.stride if first + row else 0
            mask[row, counted_before : max(len(part) - 1, 0)] = 1.0
        tokens_t = torch.from_numpy(tokens)
        positions = torch.arange(self.length).expand(count, -1)
        return MicroBatch(
            tokens_t[:, :-1].contiguous(), tokens_t[:, 1:].contiguous(), torch.from_numpy(mask), positions
        )


def evaluate(
    model: Model, windows: Windows, micro_batch_size: int, progress: Callable[[int], None] = lambda done: None
) -> tuple[float, int]:
    """Sum of the nats of all predicted tokens, and how many they are; the same on every rank. Collective.

    Windows are dealt out over data-parallel ranks; `progress` is told how many are done. The window's length must suit
    the layout as a training sequence does.
    """
    mesh = model.mesh
    runtime = PipelineRuntime(mesh, {mesh.pp.rank: model.stage}, model.dtype, MicroBatch.finished)
    pipelined = 2 * mesh.pp.size if mesh.pp.size > 1 else 1
    schedule = make_schedule("1f1b", mesh.pp.size, pipelined).forward_only()
    shape = torch.Size((windows.length // mesh.sequence.size, micro_batch_size, model.config.hidden_size))
    stride = micro_batch_size * mesh.dp.size
    nats, tokens = 0.0, 0
    for first in range(0, len(windows), stride * pipelined):
        places = range(first + mesh.dp.rank * micro_batch_size, first + stride * pipelined, stride)
        batches = [windows.micro_batch(place, micro_batch_size).to(mesh.device) for place in places]
        set_denominators(batches, 0, mesh)
        runtime.run(schedule, batches, shape)
        total = torch.zeros((), dtype=torch.float64, device=mesh.device)
        for loss in itertools.chain.from_iterable(batch.losses.values() for batch in batches):
            total += loss
        all_reduce_(total, mesh.world)
        assert batches[0].denominators is not None
        counted = batches[0].denominators.tokens.item()
        nats, tokens = nats + total.item() * counted, tokens + int(counted)
        progress(min(first + stride * pipelined, len(windows)))
    return nats, tokens


@dataclass(frozen=True)
class Text:
    """What is predicted: ids, of which the first is only a beginning, and the bytes that they spell (None: unknown)."""

    ids: npt.NDArray[np.integer]
    bytes: int | None

    @classmethod
    def of_file(cls, path: Path, tokenizer: Tokenizer, bos_id: int | None = None) -> Text:
        """A text file as one document, after `bos_id` or else the token that ends a document, as documents in training.

        Raises ConfigurationError where it can't be read.
        """
        try:
            with open(path, encoding="utf-8", newline="") as stream:  # line ends as they are: they are bytes too
                text = stream.read()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"--text-file {path} can't be read: {error}") from error
        if not text:
            raise ConfigurationError(f"--text-file {path} is empty: there is nothing to predict")
        first = tokenizer.eod_id if bos_id is None else bos_id
        return cls(np.array([first, *tokenizer.encode(text)]), len(text.encode()))

    @classmethod
    def of_documents(
        cls, prefix: str, split: str, part: str, vocab_size: int, tokenizer: Tokenizer | None, bos_id: int | None = None
    ) -> Text:
        """One part of a split of a data set, or "all" of it, as one stream, in which tokens that end documents count.

        Bytes are those of the decoded documents. Raises ConfigurationError for damaged files, an empty part, foreign
        ids.
        """
        try:
            data = IndexedDataset(prefix)
            whole = range(data.num_documents)
            documents = whole if part == "all" else split_documents(split, len(whole))[SPLITS.index(part)]
            begin, end = (int(data.document_offsets[at]) for at in (documents.start, documents.stop))
            if begin == end:
                raise ValueError(f"{prefix}: part {part} of --split {split} has no token; choose another one")
            ids = data.read_spans(np.array([begin]), np.array([end - begin]), vocab_size)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"--data-path {error}") from error
        if bos_id is None and tokenizer is not None:
            bos_id = tokenizer.eod_id
        size = None
        if tokenizer is not None:
            spelt = (data.document(i).tolist() for i in documents)
            size = sum(len(tokenizer.decode([x for x in one if x != tokenizer.eod_id]).encode()) for one in spelt)
        return cls(ids if bos_id is None else np.concatenate([[bos_id], ids]), size)
