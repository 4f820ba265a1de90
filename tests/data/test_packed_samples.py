"""The order of samples: every token once an epoch, a pure function of the seed and the sample's number."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.indexed import IndexedDataset, IndexedWriter
from data.samples import PackedSamples, SampleIndex, permute


def offsets(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def positions(index: SampleIndex, sample: int) -> list[int]:
    """The tokens of a sample, each named by its place in the file."""
    starts, lengths = index.spans(sample)
    return [
        position for start, length in zip(starts, lengths, strict=True) for position in range(start, start + length)
    ]


LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any)


@given(LENGTHS, st.integers(1, 12), st.integers(0, 2**40))
@settings(max_examples=150, deadline=None)
def test_the_cuts_in_order_are_shuffled_whole_documents_epoch_after_epoch(
    lengths: list[int], seq_length: int, seed: int
) -> None:
    index = SampleIndex(offsets(lengths), seq_length, seed)
    epoch_tokens = sum(lengths)
    count = -(-3 * epoch_tokens // seq_length)  # the samples that begin in the first three epochs
    by_cut = {index.cut(sample): positions(index, sample) for sample in range(count)}
    assert sorted(by_cut) == list(range(count))  # each cut is consumed once
    stream: list[int] = []
    for cut in range(count):
        assert len(by_cut[cut]) == seq_length + 1
        assert cut == 0 or by_cut[cut][0] == by_cut[cut - 1][-1]  # consecutive samples share one token
        stream += by_cut[cut][:-1]
    documents = {start: list(range(start, start + n)) for start, n in zip(offsets(lengths), lengths, strict=False) if n}
    for epoch in range(3):
        rest = stream[epoch * epoch_tokens : (epoch + 1) * epoch_tokens]
        assert sorted(rest) == list(range(epoch_tokens))  # every token exactly once
        while rest:  # in whole documents
            document = documents[rest[0]]
            assert rest[: len(document)] == document
            rest = rest[len(document) :]


@given(LENGTHS, st.integers(1, 12), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_samples_stay_within_their_epoch(lengths: list[int], seq_length: int, seed: int) -> None:
    index = SampleIndex(offsets(lengths), seq_length, seed)
    for sample in range(50):
        epoch = sample * seq_length // sum(lengths)
        assert index.cut(sample) * seq_length // sum(lengths) == epoch


def test_access_in_any_order_gives_the_same_samples() -> None:
    lengths = [5, 0, 17, 3, 11] * 10
    forwards = SampleIndex(offsets(lengths), 7, 3)
    expected = [positions(forwards, sample) for sample in range(300)]  # six epochs, more than are kept
    jumping = SampleIndex(offsets(lengths), 7, 3)
    for sample in np.random.default_rng(0).permutation(300):
        assert positions(jumping, int(sample)) == expected[sample]


def test_the_order_of_a_seed_never_changes() -> None:
    # A resumed run would silently see other data if these moved. The numbers must be the same for every numpy release.
    index = SampleIndex(offsets([3, 0, 5, 2, 7]), 4, 1234)
    assert [index.cut(sample) for sample in range(12)] == [1, 3, 4, 0, 2, 6, 7, 8, 5, 11, 12, 10]
    assert positions(index, 0) + positions(index, 7) == [9, 3, 4, 5, 6, 6, 7, 8, 9, 10]


def test_seed_and_epoch_change_the_order() -> None:
    lengths = list(range(1, 60))
    total = sum(lengths)
    orders = {
        (seed, epoch): tuple(SampleIndex(offsets(lengths), 10, seed)._document_order(epoch)[0].tolist())
        for seed in (0, 1, 2**32, 2**32 + 1)
        for epoch in (0, 1)
    }
    assert len(set(orders.values())) == 8
    cuts = {tuple(SampleIndex(offsets(lengths), 10, seed).cut(i) for i in range(total // 10)) for seed in (0, 1, 2**32)}
    assert len(cuts) == 3


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
@settings(max_examples=30, deadline=None)
def test_permute_is_a_bijection(size: int, key: int) -> None:
    assert sorted(permute(index, size, key) for index in range(size)) == list(range(size))


def test_permute_mixes_well() -> None:
    for size in (2, 3, 5, 6):  # every image of 0 equally often over keys: chi-square at 5 degrees, p = 1e-6 is 35.9
        seen = Counter(permute(0, size, key * 0x9E3779B97F4A7C15 % 2**64) for key in range(6000))
        assert sum((seen[value] - 6000 / size) ** 2 / (6000 / size) for value in range(size)) < 36
    images = np.array([permute(index, 10_000, 99) for index in range(10_000)])
    assert abs(np.corrcoef(np.arange(10_000), images)[0, 1]) < 0.05
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < 0.05


def dataset(prefix: Path, documents: list[list[int]]) -> IndexedDataset:
    with IndexedWriter(prefix, 1000) as writer:
        for ids in documents:
            writer.add_document(ids)
    return IndexedDataset(prefix)


def test_the_number_of_samples_asked_for_does_not_change_them(tmp_path: Path) -> None:
    file = dataset(tmp_path / "x", [list(range(n)) for n in range(1, 40)])
    few, many = PackedSamples(file, 16, 5, 10), PackedSamples(file, 16, 5, 10_000)
    assert len(few) == 10 and len(many) == 10_000
    for index in range(10):
        np.testing.assert_array_equal(few.sample(index), many.sample(index))
        assert few.sample(index).dtype == np.int64 and few.sample(index).shape == (17,)


def test_samples_of_a_split_hold_its_documents_only(tmp_path: Path) -> None:
    file = dataset(tmp_path / "x", [[], [10] * 7, [20] * 5, [], [30] * 9, [40] * 3])
    split = PackedSamples(file, 4, 0, 20, first_document=2, last_document=5)
    seen = Counter(np.concatenate([split.sample(index)[:-1] for index in range(7)]).tolist())
    assert seen == {20: 10, 30: 18}  # 28 tokens are two epochs of 5 + 9
    assert split.tokens_per_epoch == 14 and split.samples_per_epoch == 3


def test_bad_ranges_and_ids_are_named(tmp_path: Path) -> None:
    file = dataset(tmp_path / "x", [[], [], [1, 2, 700]])
    with pytest.raises(ValueError, match="x, documents 0 to 2: none of the 2 documents holds a token"):
        PackedSamples(file, 4, 0, 1, 0, 2)
    with pytest.raises(ValueError, match=r"documents 1 to 9 \(exclusive\) are no range of its 3 documents"):
        PackedSamples(file, 4, 0, 1, 1, 9)
    with pytest.raises(ValueError, match="document 2, position 2: token id 700 .* vocabulary of 700"):
        PackedSamples(file, 4, 0, 1, vocab_size=700).sample(0)
    with pytest.raises(ValueError, match="seq-length 0"):
        PackedSamples(file, 0, 0, 1)
    with pytest.raises(IndexError, match="sample -1"):
        PackedSamples(file, 4, 0, 1).sample(-1)


@pytest.mark.parametrize("documents", [10**6, pytest.param(10**7, marks=pytest.mark.full)])
def test_building_the_index_takes_seconds(documents: int) -> None:
    ends = np.cumsum(np.random.default_rng(0).integers(0, 2000, documents))
    begin = time.perf_counter()
    index = SampleIndex(np.concatenate([[0], ends]), 4096, 1)
    index.spans(0)
    seconds = time.perf_counter() - begin
    print(f"index of {documents:,} documents and {ends[-1]:,} tokens: {seconds:.2f} s")
    assert seconds < 3e-6 * documents + 3  # alone 2 s for 10^7; a Python loop over them would take 10 s and more
