"""A smoothed bigram model: the loss that a language model must beat to show that it uses more than the previous token.

May import numpy and `data.indexed` only.
Source: interpolated modified Kneser-Ney smoothing, Chen and Goodman 1999, eqs. 20 to 26, discounts in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from data.indexed import Int64Array

FloatArray = npt.NDArray[np.float64]
_MERGE_EVERY = 1 << 22


def discounts(counts: Int64Array) -> FloatArray:
    """[D(1), D(2), D(3 or more)] from how many events were seen once, twice, three and four times (eq. 26).

    D(c) = c - (c + 1)·Y·n(c+1)/n(c) with Y = n1/(n1 + 2·n2), kept in [0, c]. Where a class is empty (tiny or repeated
    data)
    the formula says nothing: ½ for D(1), and each missing D(c) takes the one before.
    """
    n = np.bincount(np.minimum(counts, 5), minlength=6).astype(np.float64)
    y = n[1] / (n[1] + 2 * n[2]) if n[1] and n[2] else 0.0
    result = np.zeros(3)
    for c in (1, 2, 3):
        known = y > 0 and n[c] > 0 and n[c + 1] > 0
        result[c - 1] = (
            min(max(c - (c + 1) * y * n[c + 1] / n[c], 0.0), c) if known else result[c - 2] if c > 1 else 0.5
        )
    return result


class BigramModel:
    """P(w | u) with three terms, each handing the mass it discounts to the next.

        P(w | u) = (c(u,w) - D(c(u,w)))/c(u) + back_off(u)·P(w)     c: how often the pair, the first token, was seen
        P(w)     = (N(w) - D'(N(w)))/N + back_off'·1/V              N(w): how many different tokens w was seen after

    A pair never seen has no first term; a token never seen as first has back_off 1. Both sum to one over the
    vocabulary.

    Args:
        samples: token ids, int64 [length] each; pairs are counted within each. Consecutive samples of `PackedSamples`
            share one token, so every pair of the stream counts once. Give each token once (at most one epoch:
            repeated text has no pair seen once, and the discounts rest on those).
        vocab_size: V.
    Raises: ValueError for an id outside the vocabulary, or no pair at all.
    """

    def __init__(self, samples: Iterable[npt.ArrayLike], vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._pairs, counts = self._count(samples)
        if not len(self._pairs):
            raise ValueError("a bigram model needs at least one pair of tokens to count")
        first, second = np.divmod(self._pairs, vocab_size)

        # P(w): from the number of different left neighbours, which is what a token's novelty after u depends on.
        neighbours = np.bincount(second, minlength=vocab_size)
        total = len(self._pairs)
        seen = neighbours[neighbours > 0]
        taken = discounts(seen)
        kept = np.maximum(neighbours - np.concatenate(([0.0], taken))[np.minimum(neighbours, 3)], 0.0)
        self._unigram: FloatArray = kept / total + (1 - math.fsum(kept) / total) / vocab_size

        # P(w | u): the pairs' own terms, and what they leave to P(w).
        self._seen: FloatArray = counts - discounts(counts)[np.minimum(counts, 3) - 1]
        context: FloatArray = np.bincount(first, weights=counts, minlength=vocab_size).astype(np.float64)
        self._seen /= context[first]
        self._back_off: FloatArray = 1 - np.bincount(first, self._seen, minlength=vocab_size).astype(np.float64)
        # A context without discount (every D at 0) would give a new pair probability 0 and a loss without end.
        floor = 1e-6
        short = self._back_off < floor
        scale = np.where(short, (1 - floor) / np.maximum(1 - self._back_off, floor), 1.0)
        self._seen *= scale[first]
        self._back_off[short] = floor

    def _count(self, samples: Iterable[npt.ArrayLike]) -> tuple[Int64Array, Int64Array]:
        """(pairs u·V + w in rising order, how often each was seen), int64 [different pairs]."""
        pairs, counts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        waiting: list[Int64Array] = []
        size = 0

        def merge() -> tuple[Int64Array, Int64Array]:
            new, times = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *waiting]), return_counts=True)
            if not len(pairs):
                return new, times.astype(np.int64)
            merged, place = np.unique(np.concatenate([pairs, new]), return_inverse=True)
            # float64 weights are exact for counts below 2^53.
            sums = np.bincount(place, weights=np.concatenate([counts, times]), minlength=len(merged))
            return merged, sums.astype(np.int64)

        for sample in samples:
            tokens = np.asarray(sample, dtype=np.int64)
            if len(tokens) and not (0 <= tokens.min() and tokens.max() < self.vocab_size):
                raise ValueError(
                    f"token ids {tokens.min()} to {tokens.max()} are outside the vocabulary of {self.vocab_size}"
                )
            waiting.append(tokens[:-1] * self.vocab_size + tokens[1:])
            size += len(tokens)
            if size >= _MERGE_EVERY:  # bounds the memory to the different pairs plus 32 MB
                pairs, counts = merge()
                waiting.clear()
                size = 0
        return merge()

    def probability(self, first: npt.ArrayLike, second: npt.ArrayLike) -> FloatArray:
        """P(second | first), float64, elementwise; ids int64 of equal shape."""
        u, w = np.asarray(first, dtype=np.int64), np.asarray(second, dtype=np.int64)
        keys = u * self.vocab_size + w
        place = np.minimum(np.searchsorted(self._pairs, keys), len(self._pairs) - 1)
        own = np.where(self._pairs[place] == keys, self._seen[place], 0.0)
        return own + self._back_off[u] * self._unigram[w]

    def loss(self, samples: npt.ArrayLike, loss_mask: npt.ArrayLike | None = None) -> float:
        """Mean negative log likelihood in nats per token.

        Args:
            samples: int64 [n, s + 1] (or [s + 1]); each token but the first is predicted from the one before.
            loss_mask: [n, s], weight of each prediction; None counts all.
        """
        tokens = np.asarray(samples, dtype=np.int64)
        losses = -np.log(self.probability(tokens[..., :-1], tokens[..., 1:]))
        weights = np.ones(losses.shape) if loss_mask is None else np.asarray(loss_mask, dtype=np.float64)
        return float((losses * weights).sum() / weights.sum())


def bigram_baseline(
    train_samples: Iterable[npt.ArrayLike],
    valid_samples: Iterable[npt.ArrayLike],
    vocab_size: int,
    eod_id: int | None = None,
) -> float:
    """Validation loss in nats per token of a bigram model fitted on exactly `train_samples`.

    Args:
        train_samples, valid_samples: int64 [s + 1] each; see `BigramModel` for repeated ones.
        vocab_size: V.
        eod_id: give it where training runs with eod-mask-loss, so that the same tokens count.
    """
    model = BigramModel(train_samples, vocab_size)
    valid = np.stack([np.asarray(sample, dtype=np.int64) for sample in valid_samples])
    return model.loss(valid, None if eod_id is None else valid[:, :-1] != eod_id)
