"""Micro-batches of one data-parallel rank, in an order that depends on the number of samples consumed and nothing else.

May import torch, numpy, `data.indexed`, `data.samples` and `data.prefetch` only.
Source: Megatron's MegatronPretrainingSampler (who takes which sample) and _get_ltor_masks_and_position_ids (masks).

Shapes: b micro-batch size, s sequence length. All tensors are on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TypedDict

import numpy as np
import torch

from data.indexed import Int64Array
from data.prefetch import Prefetcher
from data.samples import SampleSource


class MicroBatchTensors(TypedDict):
    """What one forward pass takes, on the CPU; see `make_micro_batch`."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    positions: torch.Tensor
    documents: torch.Tensor | None


def make_micro_batch(
    samples: Int64Array,
    eod_id: int | None = None,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
) -> MicroBatchTensors:
    """Samples → what one forward pass takes.

    Args:
        samples: int64 [b, s + 1].
        eod_id: the end-of-document token; a document ends with it. Needed by the three flags.
        reset_position_ids: count positions from 0 in every document instead of every sample.
        reset_attention_mask: give `documents`, so that attention stays within a document.
        eod_mask_loss: no loss where the INPUT token is the end of a document: what follows is the first token of an
            unrelated document, which nothing predicts. The end-of-document token itself stays a target. As Megatron.
    Returns:
        tokens int64 [b, s]; labels int64 [b, s], the next token; loss_mask float32 [b, s];
        positions int64 [b, s]; documents int64 [b, s], 0, 1, 2 ... within each sample, or None.
    """
    flags = {
        "reset-position-ids": reset_position_ids,
        "reset-attention-mask": reset_attention_mask,
        "eod-mask-loss": eod_mask_loss,
    }
    if eod_id is None and any(flags.values()):
        names = ", ".join(name for name, on in flags.items() if on)
        raise ValueError(f"{names} need the tokenizer's end-of-document id: give --tokenizer-model")
    tokens, labels = samples[:, :-1], samples[:, 1:]
    ended = tokens == eod_id if eod_id is not None else np.zeros(tokens.shape, dtype=bool)
    begins = np.zeros(tokens.shape, dtype=bool)  # a document begins after an end-of-document token
    begins[:, 1:] = ended[:, :-1]
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int64), tokens.shape)
    if reset_position_ids:
        positions = positions - np.maximum.accumulate(np.where(begins, positions, 0), axis=1)
    return {
        "tokens": _tensor(tokens),
        "labels": _tensor(labels),
        "loss_mask": _tensor(~ended if eod_mask_loss else np.ones(tokens.shape), torch.float32),
        "positions": _tensor(positions),
        "documents": _tensor(np.cumsum(begins, axis=1)) if reset_attention_mask else None,
    }


def _tensor(array: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A contiguous tensor with memory of its own, so that nothing is a view of another array."""
    return torch.from_numpy(np.array(array, order="C")).to(dtype)


class Batches:
    """The steps of one data-parallel rank.

    Step n, after c consumed samples, takes samples c .. c + global_batch_size - 1, whatever the layout. Micro-batch k
    of rank r holds the samples c + (k·dp_size + r)·micro_batch_size + [0, micro_batch_size), as in Megatron. Tensor,
    pipeline and context ranks of one data-parallel rank build equal objects and get equal batches.

    Args:
        dataset: `len` samples, each int64 [seq_length + 1].
        seq_length: s; a dataset that was cut for another one is refused.
        micro_batch_size: b, sequences of one forward pass.
        global_batch_size: sequences of one step over all ranks; or, for a ramp-up, a pure function of the consumed
            samples.
        dp_rank, dp_size: place on the mesh's data-parallel axis.
        consumed_samples: where to begin; a resumed run gives the number its checkpoint holds.
        eod_id, reset_position_ids, reset_attention_mask, eod_mask_loss: see `make_micro_batch`.
        prefetch_steps: steps made ahead by a background thread; 0 makes each when asked.
    Raises: ValueError, also from `next_step`, naming the numbers.
    """

    def __init__(
        self,
        dataset: SampleSource,
        *,
        seq_length: int,
        micro_batch_size: int,
        global_batch_size: int | Callable[[int], int],
        dp_rank: int = 0,
        dp_size: int = 1,
        consumed_samples: int = 0,
        eod_id: int | None = None,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        eod_mask_loss: bool = False,
        prefetch_steps: int = 2,
    ) -> None:
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"data-parallel rank {dp_rank} is outside 0 .. {dp_size - 1}")
        if micro_batch_size < 1 or consumed_samples < 0 or prefetch_steps < 0:
            raise ValueError(
                f"micro-batch-size {micro_batch_size} must be at least 1, consumed samples {consumed_samples} "
                f"and prefetched steps {prefetch_steps} at least 0"
            )
        self.dataset = dataset
        self.seq_length = seq_length
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = global_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self._masks = (eod_id, reset_position_ids, reset_attention_mask, eod_mask_loss)
        self._consumed = consumed_samples
        self._size_after(consumed_samples)  # a batch size that doesn't divide is refused here, not in the thread
        make_micro_batch(np.zeros((1, 2), dtype=np.int64), *self._masks)  # and so are flags without an eod_id
        self._prefetcher = Prefetcher(self._steps(consumed_samples), prefetch_steps) if prefetch_steps else None

    @property
    def consumed_samples(self) -> int:
        """Samples of all ranks in the steps delivered so far; prefetched ones don't count. This is the whole state."""
        return self._consumed

    def next_step(self) -> list[MicroBatchTensors]:
        """The micro-batches of this rank for one global batch, in order. Raises ValueError when the samples run out."""
        if self._prefetcher is None:
            step, consumed = self._step_and_state(self._consumed)
        else:
            step, consumed = next(self._prefetcher)
        self._consumed = consumed
        return step

    def step_at(self, consumed_samples: int) -> list[MicroBatchTensors]:
        """The step that follows `consumed_samples` samples; a pure function, which changes no state."""
        return self._step_and_state(consumed_samples)[0]

    def _size_after(self, consumed: int) -> int:
        size = self.global_batch_size(consumed) if callable(self.global_batch_size) else self.global_batch_size
        each = self.micro_batch_size * self.dp_size
        if size < 1 or size % each:
            lower = size // each * each
            near = f"{lower} or {lower + each}" if lower else str(each)
            raise ValueError(
                f"global-batch-size {size} is not a multiple of micro-batch-size {self.micro_batch_size} x "
                f"data-parallel size {self.dp_size} = {each}: take {near}"
            )
        return size

    def _step_and_state(self, consumed: int) -> tuple[list[MicroBatchTensors], int]:
        size = self._size_after(consumed)
        if consumed + size > len(self.dataset):
            raise ValueError(
                f"the dataset ends: {consumed} of its {len(self.dataset)} samples are consumed and the next step takes "
                f"{size}; build it with more samples"
            )
        stride = self.micro_batch_size * self.dp_size
        firsts = range(consumed + self.dp_rank * self.micro_batch_size, consumed + size, stride)
        return [self._micro_batch(first) for first in firsts], consumed + size

    def _micro_batch(self, first: int) -> MicroBatchTensors:
        samples = np.stack([self.dataset.sample(index) for index in range(first, first + self.micro_batch_size)])
        if samples.shape[1] != self.seq_length + 1:
            raise ValueError(
                f"samples have {samples.shape[1]} tokens, seq-length {self.seq_length} needs one more than itself"
            )
        return make_micro_batch(samples, *self._masks)

    def _steps(self, consumed: int) -> Iterator[tuple[list[MicroBatchTensors], int]]:
        while True:
            step, consumed = self._step_and_state(consumed)
            yield step, consumed

    def close(self) -> None:
        """End the background thread; safe to call twice."""
        if self._prefetcher is not None:
            self._prefetcher.close()

    def __enter__(self) -> Batches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ValidationSteps:
    """The same `iterations` steps, from sample 0 on, each time it is iterated: validation losses stay comparable.

    Args: `dataset`, `iterations`, and those of `Batches` with one global_batch_size.
    Raises: ValueError at once when the dataset has fewer than iterations·global_batch_size samples.
    """

    def __init__(
        self,
        dataset: SampleSource,
        iterations: int,
        *,
        seq_length: int,
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        eod_id: int | None = None,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        eod_mask_loss: bool = False,
    ) -> None:
        if iterations * global_batch_size > len(dataset):
            raise ValueError(
                f"{iterations} validation iterations of {global_batch_size} sequences need "
                f"{iterations * global_batch_size} samples, the dataset has {len(dataset)}: "
                f"build it with more, or lower eval-iters"
            )
        self.iterations = iterations
        self._global_batch_size = global_batch_size
        self._batches = Batches(
            dataset,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            eod_id=eod_id,
            reset_position_ids=reset_position_ids,
            reset_attention_mask=reset_attention_mask,
            eod_mask_loss=eod_mask_loss,
            prefetch_steps=0,
        )

    def __len__(self) -> int:
        return self.iterations

    def __iter__(self) -> Iterator[list[MicroBatchTensors]]:
        for number in range(self.iterations):
            yield self._batches.step_at(number * self._global_batch_size)
