"""Blends stay close to their weights, splits are Megatron's, and what can't be built says why with numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import build
from data.blend import Blend, blend_order, parse_data_path, parse_split, split_documents
from data.build import build_datasets
from data.indexed import IndexedDataset, IndexedWriter
from data.samples import PackedSamples


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=12), st.sampled_from([1000, 4096, 65536]))
@settings(max_examples=60, deadline=None)
def test_a_blend_never_strays_from_its_weights(weights: list[float], period: int) -> None:
    try:
        dataset, rank = blend_order(weights, period)
    except ValueError:  # a weight below 1/period of the sum
        assert min(weights) / sum(weights) < 1 / period
        return
    drawn = dataset[:, None] == np.arange(len(weights))
    counts = np.cumsum(drawn, axis=0)
    share = counts[-1] / period
    np.testing.assert_allclose(share, np.array(weights) / sum(weights), atol=1 / period)
    error = np.abs(counts - share * np.arange(1, period + 1)[:, None])
    assert (error <= 0.5 + share * len(weights) / 2 + 1e-9).all()
    # Each dataset is read in its own order, without a gap.
    assert (rank == counts[np.arange(period), dataset] - 1).all()


def test_a_blend_serves_the_greatest_deficit_next() -> None:
    dataset, rank = blend_order([0.5, 0.25, 0.25], 8)
    assert dataset.tolist() == [0, 1, 2, 0, 0, 1, 2, 0]
    assert rank.tolist() == [0, 0, 0, 1, 2, 1, 1, 3]


def test_a_weight_too_small_to_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="weight 1e-09 of dataset 1 is below 1/1048576"):
        blend_order([1.0, 1e-9])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """a: 100 documents of 20 tokens 1; b: 50 documents of 40 tokens 2; one: a single document."""
    directory = tmp_path_factory.mktemp("blend")
    for name, token, count, length in (("a", 1, 100, 20), ("b", 2, 50, 40), ("one", 3, 1, 100)):
        with IndexedWriter(directory / name, 10) as writer:
            for _ in range(count):
                writer.add_document([token] * length)
    return {name: str(directory / name) for name in ("a", "b", "one")}


def test_samples_of_a_blend_come_from_its_datasets_by_weight_in_their_order(files: dict[str, str]) -> None:
    train, valid, test = build_datasets(["0.3", files["a"], "0.7", files["b"]], "1,0,0", 8, 5, 1000, 0, 0)
    assert isinstance(train, Blend) and valid is None and test is None and len(train) == 1000
    assert sum(int(train.sample(index)[0] == 1) for index in range(1000)) == pytest.approx(300, abs=1)
    alone = PackedSamples(IndexedDataset(files["b"]), 8, 5, 1)
    drawn = [index for index in range(100) if train.locate(index)[0] == 1]
    for local, index in enumerate(drawn):
        assert train.locate(index) == (1, local)
        np.testing.assert_array_equal(train.sample(index), alone.sample(local))


def test_random_access_far_beyond_a_period() -> None:
    parts = [object(), object()]
    blend = Blend(parts, [1, 2], 10**12, period=9)  # type: ignore[arg-type]
    seen = [0, 0]
    for index in range(100):
        dataset, local = blend.locate(index)
        assert local == seen[dataset]
        seen[dataset] += 1
    assert blend.locate(9 * 10**10)[1] + blend.locate(9 * 10**10 + 1)[1] == 3 * 10**10 + 6 * 10**10


def test_without_weights_datasets_count_by_their_tokens(files: dict[str, str]) -> None:
    train, valid, _ = build_datasets([files["a"], files["b"]], "80,20", 8, 5, 400, 60, 0)
    assert train is not None and valid is not None
    assert sum(int(train.sample(index)[0] == 1) for index in range(400)) == pytest.approx(200, abs=1)
    assert train.tokens_per_epoch == 3200 and valid.tokens_per_epoch == 800
    # No dataset starts its second epoch within samples_per_epoch.
    for index in range(train.samples_per_epoch):
        dataset, local = train.locate(index)  # type: ignore[union-attr]
        assert local < train.datasets[dataset].samples_per_epoch  # type: ignore[union-attr]
    assert train.samples_per_epoch > 0.95 * 3200 / 8


def test_data_path_forms() -> None:
    assert parse_data_path(["a"]) == (["a"], None)
    assert parse_data_path(["a", "b"]) == (["a", "b"], None)
    assert parse_data_path(["30", "a", "0.7", "b"]) == (["a", "b"], [30.0, 0.7])
    assert parse_data_path(["1", "a"]) == (["a"], [1.0])


@pytest.mark.parametrize(
    ("data_path", "match"),
    [
        ([], "data-path is empty"),
        (["0.3", "a", "b"], "before every prefix or before none"),
        (["a", "0.3"], "before every prefix or before none"),
        (["0.3", "a", "b", "0.7"], "before every prefix or before none"),
        (["0.3", "0.7"], "before every prefix or before none"),
        (["0", "a", "1", "b"], "weight 0.0 of a must be positive"),
        (["1", "a", "inf", "b"], "weight inf of b must be positive"),
    ],
)
def test_a_data_path_that_makes_no_sense_is_refused(data_path: list[str], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parse_data_path(data_path)


@given(st.integers(0, 5000), st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any))
def test_a_split_divides_the_documents_as_megatron_does(documents: int, weights: list[int]) -> None:
    ranges = split_documents(",".join(map(str, weights)), documents)
    assert [number for part in ranges for number in part] == list(range(documents))
    shares = [weight / sum(weights) for weight in weights] + [0.0] * (3 - len(weights))
    bookends = [0.0]
    for share in shares:  # megatron.core.datasets.blended_megatron_dataset_config.convert_split_vector_to_split_matrix
        bookends.append(bookends[-1] + share)
    assert [part.start for part in ranges] == [int(round(bookend * documents)) for bookend in bookends[:-1]]


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan,1,1"])
def test_a_split_that_makes_no_sense_is_refused(split: str) -> None:
    with pytest.raises(ValueError, match="split .* such as 969,30,1"):
        parse_split(split)


def test_splits_share_no_document_and_repeat_for_validation(files: dict[str, str], tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", 1000) as writer:
        for number in range(100):
            writer.add_document([number] * 9)
    parts = build_datasets([str(tmp_path / "x")], "80,15,5", 6, 1, 120, 22, 7)
    seen = [
        {int(token) for index in range(len(part)) for token in part.sample(index)} for part in parts if part is not None
    ]
    assert [min(tokens) for tokens in seen] == [0, 80, 95] and [max(tokens) for tokens in seen] == [79, 94, 99]


def test_an_empty_split_is_refused_with_numbers_only_where_samples_are_asked_for(files: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"split 969,30,1 leaves 0 of the 1 documents of .*one to valid, .* 4 samples"):
        build_datasets([files["one"]], "969,30,1", 8, 0, 10, 4, 0)
    train, valid, test = build_datasets([files["one"]], "969,30,1", 8, 0, 10, 0, 0)
    assert train is not None and valid is None and test is None


def test_ids_beyond_the_vocabulary_are_found_at_the_start_or_on_reading(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data_path = [files["a"], files["b"]]
    with pytest.raises(ValueError, match=r"b\.bin: document 0, position 0: token id 2 is outside the vocabulary of 2"):
        build_datasets(data_path, "1", 8, 0, 10, 0, 0, vocab_size=2)
    monkeypatch.setattr(build, "CHECK_AT_START_BYTES", 100)
    train, _, _ = build_datasets(data_path, "1", 8, 0, 10, 0, 0, vocab_size=2)
    assert train is not None
    with pytest.raises(ValueError, match="token id 2 is outside the vocabulary of 2"):
        for index in range(10):
            train.sample(index)
