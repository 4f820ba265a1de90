"""The bigram baseline: its probabilities by hand, by an independent slow version, and that they sum to one."""

from __future__ import annotations

import math
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import bigram
from data.bigram import BigramModel, bigram_baseline, discounts


def slow_discounts(counts: list[int]) -> list[float]:
    n = Counter(counts)
    y = n[1] / (n[1] + 2 * n[2]) if n[1] and n[2] else 0.0
    result: list[float] = []
    for c in (1, 2, 3):
        if y and n[c] and n[c + 1]:
            result.append(min(max(c - (c + 1) * y * n[c + 1] / n[c], 0.0), float(c)))
        else:
            result.append(result[-1] if result else 0.5)
    return result


def slow_probability(stream: list[int], vocab_size: int, u: int, w: int) -> float:
    """Chen and Goodman's formula with dictionaries, a pair at a time."""
    pairs = Counter(zip(stream[:-1], stream[1:], strict=True))
    neighbours = Counter(second for _, second in pairs)
    d = slow_discounts(list(neighbours.values()))
    left = sum(d[min(count, 3) - 1] for count in neighbours.values()) / len(pairs)
    own = (neighbours[w] - d[min(neighbours[w], 3) - 1]) / len(pairs) if neighbours[w] else 0.0
    back_off = own + left / vocab_size
    after = {second: count for (first, second), count in pairs.items() if first == u}
    if not after:
        return back_off
    d = slow_discounts(list(pairs.values()))
    total = sum(after.values())
    left = sum(d[min(count, 3) - 1] for count in after.values()) / total
    own = (after[w] - d[min(after[w], 3) - 1]) / total if w in after else 0.0
    return own + left * back_off


def text(seed: int, length: int, vocab_size: int) -> np.ndarray:
    """A stream with structure: a random sparse Markov chain, with Zipf-like tokens mixed in."""
    random = np.random.default_rng(seed)
    following = random.integers(0, vocab_size, (vocab_size, 4))
    tokens = np.zeros(length, dtype=np.int64)
    choice, other = random.integers(0, 4, length), np.minimum(random.zipf(1.5, length) - 1, vocab_size - 1)
    jump = random.random(length) < 0.4
    for place in range(1, length):
        tokens[place] = other[place] if jump[place] else following[tokens[place - 1], choice[place]]
    return tokens


def test_by_hand() -> None:
    # 0→1 twice, 1→0 twice, 0→2 once: n1 = 1, n2 = 2, Y = 1/5, D(1) = 1 - 2·(1/5)·2 = 1/5, D(2) the same for want of n3.
    model = BigramModel([[0, 1, 0, 1, 0, 2]], 3)
    # Every token has one left neighbour: the back-off distribution is uniform, and 0 leaves it 1 - (1.8 + 0.8)/3.
    assert model.probability(0, 1) == pytest.approx(1.8 / 3 + 0.4 / 3 / 3)
    assert model.probability(0, 2) == pytest.approx(0.8 / 3 + 0.4 / 3 / 3)
    assert model.probability(0, 0) == pytest.approx(0.4 / 3 / 3)
    assert model.probability(1, 0) == pytest.approx(1.8 / 2 + 0.2 / 2 / 3)
    assert model.probability(2, 1) == pytest.approx(1 / 3)  # 2 was never followed by anything
    assert model.loss([0, 1, 0]) == pytest.approx(-(math.log(1.8 / 3 + 0.4 / 9) + math.log(0.9 + 0.1 / 3)) / 2)
    assert model.loss([[0, 1, 0]], [[0, 1]]) == pytest.approx(-math.log(0.9 + 0.1 / 3))


@given(st.lists(st.integers(0, 5), min_size=2, max_size=80))
@settings(max_examples=60, deadline=None)
def test_equals_an_independent_slow_version_and_sums_to_one(stream: list[int]) -> None:
    model = BigramModel([stream], 7)
    first, second = np.divmod(np.arange(49), 7)
    table = model.probability(first, second).reshape(7, 7)
    expected = [[slow_probability(stream, 7, u, w) for w in range(7)] for u in range(7)]
    np.testing.assert_allclose(table, expected, rtol=1e-5, atol=2e-6)  # the floor of the back-off
    np.testing.assert_allclose(table.sum(1), 1, rtol=1e-12)
    assert (table > 0).all()


def test_on_a_longer_text_it_equals_the_slow_version_exactly() -> None:
    stream = text(1, 3000, 30)
    model = BigramModel([stream], 30)
    assert (discounts(np.unique(stream[:-1] * 30 + stream[1:], return_counts=True)[1]) > 0).all()
    for u, w in np.random.default_rng(0).integers(0, 30, (40, 2)).tolist():
        assert model.probability(u, w) == pytest.approx(slow_probability(stream.tolist(), 30, u, w), rel=1e-9)


def test_overlapping_samples_count_each_pair_once_in_any_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = text(2, 1001, 20)
    whole = BigramModel([stream], 20)
    samples = [stream[start : start + 51] for start in range(0, 1000, 50)]
    monkeypatch.setattr(bigram, "_MERGE_EVERY", 120)
    parts = BigramModel(samples, 20)
    np.testing.assert_array_equal(whole._pairs, parts._pairs)
    np.testing.assert_array_equal(whole._seen, parts._seen)


def test_it_is_a_strong_baseline() -> None:
    stream = text(3, 30_000, 200)
    train, valid = stream[:25_000], stream[25_000:]
    counts = np.zeros((200, 200))
    np.add.at(counts, (train[:-1], train[1:]), 1)
    unigram = np.bincount(train, minlength=200) + 0.5
    unigram = unigram / unigram.sum()

    def loss(table: np.ndarray) -> float:
        return float(-np.log(table[valid[:-1], valid[1:]]).mean())

    kneser_ney = bigram_baseline([train], [valid], 200)
    add_one = loss((counts + 1) / (counts + 1).sum(1, keepdims=True))
    mixed = loss(0.9 * counts / np.maximum(counts.sum(1, keepdims=True), 1) + 0.1 * unigram)
    assert kneser_ney < add_one - 0.05 and kneser_ney < mixed and kneser_ney < loss(np.tile(unigram, (200, 1))) - 0.5


def test_masked_tokens_do_not_count() -> None:
    train, valid = text(4, 2000, 10), [text(5, 9, 10), text(6, 9, 10)]
    model = BigramModel([train], 10)
    kept = [(u, w) for sample in valid for u, w in zip(sample[:-1], sample[1:], strict=True) if u != 0]
    assert 0 < len(kept) < 16
    expected = -np.mean([math.log(model.probability(u, w)) for u, w in kept])
    assert bigram_baseline([train], valid, 10, eod_id=0) == pytest.approx(expected)


def test_bad_streams_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one pair"):
        BigramModel([[3]], 10)
    with pytest.raises(ValueError, match="token ids 1 to 10 are outside the vocabulary of 10"):
        BigramModel([[1, 10]], 10)


def test_two_million_tokens_take_a_second_or_two() -> None:
    random = np.random.default_rng(0)
    samples = np.minimum(random.zipf(1.2, (2000, 1025)) - 1, 8191)
    begin = time.perf_counter()
    BigramModel(samples, 8192)
    seconds = time.perf_counter() - begin
    print(f"bigram model of {samples.size:,} tokens: {seconds:.2f} s")
    assert seconds < 8  # alone about half a second
