"""Packed samples: the documents, shuffled anew every epoch, form one endless stream, cut every seq_length tokens.

May import numpy and `data.indexed` only.
Source: Megatron's GPTDataset (document, sample and shuffle index), without its cache files: the order is computed.

    epoch 0                          epoch 1
    |doc 7 |doc 2    |doc 9|doc 0  .|doc 0 |doc 9 |doc 7    |doc 2 ...     documents in a random order per epoch
    0         s         2s        3s        4s        5s                   cut k starts at token k·s of the stream
    |---------|---------|---------|---------|---------|                    and has s + 1 tokens: its last one is
                                                                           the first one of cut k + 1

Cut k belongs to the epoch that holds its first token. Sample i, the i-th that training consumes, is a cut of the same
epoch as cut i, through a permutation of that epoch's cuts. No token is dropped between epochs, and sample i depends on
(seed, document lengths, seq_length, i) alone: not on how many samples a run will take, nor on ranks or batch sizes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from data.indexed import IndexedDataset, Int64Array

_MASK64 = (1 << 64) - 1
_ROUNDS = 6


class SampleSource(Protocol):
    """What the batches read: `len` samples, each int64 [seq_length + 1]."""

    def __len__(self) -> int: ...

    def sample(self, index: int) -> Int64Array: ...


def mix64(x: int) -> int:
    """SplitMix64's finaliser: 64 bits in, 64 well mixed bits out."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)


def permute(index: int, size: int, key: int) -> int:
    """Where `index` goes in a pseudo-random permutation of range(size), without storing the permutation.

    A six-round Feistel network is a bijection of [0, 4^k); walking on until the value falls below `size` makes it one
    of [0, size) (k is minimal, so fewer than four steps on average). An epoch of 10^9 samples costs no memory this
    way, and a run that resumes in the middle of one starts at once.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (mix64((right ^ key) + number * 0x9E3779B97F4A7C15 & _MASK64) & mask)
        index = left << half | right
        if index < size:
            return index


class SampleIndex:
    """Which tokens make up sample i. Holds no tokens; computes the document order of an epoch when it is first needed.

    Args:
        document_offsets: int64 [documents + 1], first token of each document, not necessarily from 0.
        seq_length: s; a sample has s + 1 tokens.
        seed: any integer ≥ 0.
    Raises: ValueError without a single token.
    """

    def __init__(self, document_offsets: Int64Array, seq_length: int, seed: int) -> None:
        if seq_length < 1 or seed < 0:
            raise ValueError(f"seq-length {seq_length} must be at least 1, seed {seed} at least 0")
        self.document_offsets = document_offsets
        self.seq_length = seq_length
        self.seed = seed
        self.tokens_per_epoch = int(document_offsets[-1] - document_offsets[0])
        if self.tokens_per_epoch == 0:
            raise ValueError(f"none of the {len(document_offsets) - 1} documents holds a token")
        # Two epochs, since the cuts at the end of one reach into the next. 10^7 documents take 120 MB an epoch.
        self._epoch = lru_cache(maxsize=2)(self._document_order)

    def _document_order(self, epoch: int) -> tuple[npt.NDArray[np.integer], Int64Array]:
        """(documents in the order of this epoch [documents], first token of each in the epoch [documents + 1])."""
        count = len(self.document_offsets) - 1
        # RandomState and not Generator: numpy guarantees its streams to be the same in every version (NEP 19).
        words = [self.seed & 0xFFFFFFFF, self.seed >> 32 & 0xFFFFFFFF, epoch & 0xFFFFFFFF, epoch >> 32]
        order = np.random.RandomState(words).permutation(count)
        begins = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(self.document_offsets[order + 1] - self.document_offsets[order], out=begins[1:])
        return order.astype(np.int32 if count < 1 << 31 else np.int64), begins

    def cut(self, index: int) -> int:
        """Sample `index` → its place in the stream: the cut that starts at token cut·s."""
        if index < 0:
            raise IndexError(f"sample {index} is negative")
        epoch = index * self.seq_length // self.tokens_per_epoch
        first = -(-epoch * self.tokens_per_epoch // self.seq_length)
        end = -(-(epoch + 1) * self.tokens_per_epoch // self.seq_length)
        return first + permute(index - first, end - first, mix64(mix64(self.seed & _MASK64) + epoch & _MASK64))

    def spans(self, index: int) -> tuple[Int64Array, Int64Array]:
        """Where the s + 1 tokens of sample `index` lie: (starts, lengths), int64 [k], in tokens of the file."""
        epoch, begin = divmod(self.cut(index) * self.seq_length, self.tokens_per_epoch)
        missing = self.seq_length + 1
        starts, lengths = [], []
        while missing > 0:
            order, begins = self._epoch(epoch)
            end = min(begin + missing, self.tokens_per_epoch)
            # Documents that overlap [begin, end). Empty ones share their begin with the next: "right" steps over them.
            low = int(np.searchsorted(begins, begin, side="right")) - 1
            high = int(np.searchsorted(begins, end, side="left"))
            inside = np.maximum(begin - begins[low:high], 0)
            starts.append(self.document_offsets[order[low:high]] + inside)
            lengths.append(np.minimum(begins[low + 1 : high + 1], end) - begins[low:high] - inside)
            missing -= end - begin
            epoch, begin = epoch + 1, 0
        return np.concatenate(starts), np.concatenate(lengths)


class PackedSamples:
    """Samples of the documents [first_document, last_document) of an indexed dataset.

    `sample(i)` is defined for every i ≥ 0, since epochs follow each other without end; `len` is what the run asked
    for.

    Args:
        dataset: the token files.
        seq_length: s.
        seed: of the order.
        num_samples: what `len` says.
        first_document, last_document: the split's share; None means to the end.
        vocab_size: when given, every sample's ids are checked against it as they are read.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        seq_length: int,
        seed: int,
        num_samples: int,
        first_document: int = 0,
        last_document: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        last = dataset.num_documents if last_document is None else last_document
        if not 0 <= first_document < last <= dataset.num_documents:
            raise ValueError(
                f"{dataset.prefix}: documents {first_document} to {last} (exclusive) are no range of its "
                f"{dataset.num_documents} documents"
            )
        self.dataset = dataset
        self.documents = range(first_document, last)
        self.num_samples = num_samples
        self.vocab_size = vocab_size
        try:
            self.index = SampleIndex(dataset.document_offsets[first_document : last + 1], seq_length, seed)
        except ValueError as error:
            raise ValueError(f"{dataset.prefix}, documents {first_document} to {last}: {error}") from None

    @property
    def tokens_per_epoch(self) -> int:
        return self.index.tokens_per_epoch

    @property
    def samples_per_epoch(self) -> int:
        """The first so many samples hold no token twice (but for the shared one where two samples meet)."""
        return max(1, self.index.tokens_per_epoch // self.index.seq_length)

    def __len__(self) -> int:
        return self.num_samples

    def sample(self, index: int) -> Int64Array:
        """Token ids of the `index`-th sample that training consumes, int64 [seq_length + 1]."""
        starts, lengths = self.index.spans(index)
        return self.dataset.read_spans(starts, lengths, self.vocab_size)
