"""Megatron's .bin/.idx: interchange with megatron-core, merging, and what a damaged pair of files is told."""

from __future__ import annotations

import importlib
import importlib.util
import os
import struct
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.indexed import HEADER, IndexedDataset, IndexedWriter, merge_indexed, token_dtype


@pytest.fixture(scope="module")
def megatron() -> Iterator[types.ModuleType]:
    """megatron.core.datasets.indexed_dataset, without the 8 s that the package's own __init__ takes to import."""
    spec = importlib.util.find_spec("megatron")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("megatron-core is not installed: pip install megatron-core")
    before = set(sys.modules)
    try:
        for name, path in (("megatron.core", "core"), ("megatron.core.datasets", "core/datasets")):
            package = types.ModuleType(name)
            package.__path__ = [str(Path(location, path)) for location in spec.submodule_search_locations]
            sys.modules[name] = package
        importlib.import_module(
            "megatron.core.parallel_state"
        )  # first, since it and megatron.core.utils import each other
        module = importlib.import_module("megatron.core.datasets.indexed_dataset")
    except ImportError as error:
        pytest.skip(f"megatron-core's indexed_dataset can't be imported: {error}")
    finally:
        # Others in this process get the real package, not the empty one.
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "megatron":
                del sys.modules[name]
    yield module


def random_documents(seed: int, vocab_size: int, count: int = 20) -> list[list[np.ndarray]]:
    """Documents as lists of sequences; the first document is empty, others have an empty sequence or none."""
    random = np.random.default_rng(seed)
    documents: list[list[np.ndarray]] = [[]]
    for _ in range(count):
        sequences = [random.integers(0, vocab_size, random.integers(0, 30)) for _ in range(random.integers(0, 4))]
        documents.append(sequences)
    return documents


def write(prefix: Path, documents: list[list[np.ndarray]], vocab_size: int | None) -> None:
    with IndexedWriter(prefix, vocab_size) as writer:
        for sequences in documents:
            ids = np.concatenate([np.empty(0, dtype=np.int64), *sequences])
            writer.add_document(ids, [len(sequence) for sequence in sequences])


def small(prefix: Path, documents: list[list[int]], vocab_size: int = 100) -> IndexedDataset:
    with IndexedWriter(prefix, vocab_size) as writer:
        for ids in documents:
            writer.add_document(ids)
    return IndexedDataset(prefix)


@pytest.mark.parametrize("vocab_size", [300, 65499, 65500, 129280])
def test_megatron_reads_what_is_written_here(tmp_path: Path, megatron: types.ModuleType, vocab_size: int) -> None:
    documents = random_documents(vocab_size, vocab_size)
    write(tmp_path / "ours", documents, vocab_size)
    theirs = megatron.IndexedDataset(str(tmp_path / "ours"))
    sequences = [sequence for document in documents for sequence in document]
    assert theirs.index.dtype == megatron.DType.optimal_dtype(vocab_size)
    assert len(theirs) == len(sequences)
    for index, expected in enumerate(sequences):
        np.testing.assert_array_equal(theirs[index], expected)
    assert theirs.document_indices.tolist() == np.cumsum([0, *map(len, documents)]).tolist()


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.uint8])
def test_what_megatron_writes_is_read_here(tmp_path: Path, megatron: types.ModuleType, dtype: type) -> None:
    import torch

    documents = random_documents(7, 250)
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for sequences in documents:
        for sequence in sequences:
            builder.add_item(torch.from_numpy(sequence))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    ours = IndexedDataset(tmp_path / "theirs")
    assert ours.dtype == dtype and ours.num_documents == len(documents)
    flat = [sequence for document in documents for sequence in document]
    assert ours.num_sequences == len(flat)
    for index, expected in enumerate(flat):
        np.testing.assert_array_equal(ours.sequence(index), expected)
    for index, sequences in enumerate(documents):
        expected = np.concatenate([np.empty(0, dtype=np.int64), *sequences])
        np.testing.assert_array_equal(ours.document(index), expected)


def test_the_files_are_megatrons_byte_for_byte(tmp_path: Path, megatron: types.ModuleType) -> None:
    documents = random_documents(3, 1000)
    write(tmp_path / "ours", documents, 1000)
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for sequences in documents:
        builder.add_document(np.concatenate([np.empty(0, dtype=np.int64), *sequences]), [len(s) for s in sequences])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


def test_merging_keeps_document_boundaries_and_empty_documents(tmp_path: Path, megatron: types.ModuleType) -> None:
    parts = [random_documents(seed, 500, count) for seed, count in ((1, 5), (2, 0), (3, 9))]
    for number, documents in enumerate(parts):
        write(tmp_path / f"part{number}", documents, 500)
    merge_indexed([tmp_path / f"part{number}" for number in range(3)], tmp_path / "merged")
    write(tmp_path / "at_once", [document for documents in parts for document in documents], 500)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"merged{suffix}").read_bytes() == (tmp_path / f"at_once{suffix}").read_bytes()
    theirs = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for number in range(3):
        theirs.add_index(str(tmp_path / f"part{number}"))
    theirs.finalize(str(tmp_path / "theirs.idx"))
    assert (tmp_path / "merged.idx").read_bytes() == (tmp_path / "theirs.idx").read_bytes()


def test_merging_refuses_another_dtype(tmp_path: Path) -> None:
    small(tmp_path / "short", [[1]], vocab_size=100)
    small(tmp_path / "long", [[1]], vocab_size=100_000)
    with pytest.raises(ValueError, match="int32 ids and can't be merged into uint16"):
        merge_indexed([tmp_path / "short", tmp_path / "long"], tmp_path / "merged")
    assert not list(tmp_path.glob("merged*"))


@given(st.lists(st.lists(st.integers(0, 99), max_size=6), max_size=8))
@settings(max_examples=40, deadline=None)
def test_documents_come_back_as_they_went_in(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]
) -> None:
    prefix = tmp_path_factory.mktemp("indexed") / "x"
    dataset = small(prefix, documents)
    assert [dataset.document(index).tolist() for index in range(dataset.num_documents)] == documents
    assert dataset.num_tokens == sum(map(len, documents))
    with IndexedWriter(f"{prefix}_bulk", 100) as writer:
        writer.add_documents([token for ids in documents for token in ids], list(map(len, documents)))
    assert Path(f"{prefix}_bulk.idx").read_bytes() == Path(f"{prefix}.idx").read_bytes()
    assert Path(f"{prefix}_bulk.bin").read_bytes() == Path(f"{prefix}.bin").read_bytes()


def test_spans_are_read_in_the_order_asked_for(tmp_path: Path) -> None:
    dataset = small(tmp_path / "x", [[], [10, 11, 12], [13], [14, 15, 16, 17]])
    ids = dataset.read_spans(np.array([4, 0, 2, 7]), np.array([3, 2, 0, 1]))
    assert ids.tolist() == [14, 15, 16, 10, 11, 17] and ids.dtype == np.int64


def test_the_token_type_switches_where_megatrons_does() -> None:
    assert [token_dtype(size).name for size in (1, 65499, 65500, None)] == ["uint16", "uint16", "int32", "int32"]


def test_an_interrupted_writer_leaves_earlier_files_and_nothing_new(tmp_path: Path) -> None:
    small(tmp_path / "x", [[1, 2, 3]])
    with pytest.raises(RuntimeError, match="stop"), IndexedWriter(tmp_path / "x", 100) as writer:
        writer.add_document([4])
        raise RuntimeError("stop")
    assert IndexedDataset(tmp_path / "x").document(0).tolist() == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]


def test_an_old_index_never_stands_beside_new_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(tmp_path / "x", [[1, 2, 3]])
    replace = os.replace

    def fail_at_the_index(source: Path, target: Path) -> None:
        if target.suffix == ".idx":
            raise OSError("the disk went away")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_at_the_index)
    with pytest.raises(OSError, match="disk"):
        small(tmp_path / "x", [[4, 5], [6]])
    with pytest.raises(FileNotFoundError, match=r"x\.idx is missing"):
        IndexedDataset(tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]


@pytest.mark.parametrize("ids", [[3, 100], [-1]])
def test_the_writer_refuses_ids_that_would_wrap_around(tmp_path: Path, ids: list[int]) -> None:
    writer = IndexedWriter(tmp_path / "x", 100)
    with pytest.raises(ValueError, match=rf"token id {ids[-1]} at position {len(ids) - 1}.*\[0, 99\]"):
        writer.add_document(ids)
    writer.abort()


def test_an_id_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    dataset = small(tmp_path / "x", [[], [1, 2], [], [3, 99, 98]])
    dataset.check_token_ids(100)
    for check in (
        lambda: dataset.check_token_ids(99, chunk=2),
        lambda: dataset.read_spans(np.array([2]), np.array([2]), 99),
    ):
        with pytest.raises(ValueError, match=r"x\.bin: document 3, position 1: token id 99 .* vocabulary of 99"):
            check()


def test_missing_files_are_named(tmp_path: Path) -> None:
    small(tmp_path / "x", [[1]])
    (tmp_path / "x.idx").rename(tmp_path / "y.idx")
    with pytest.raises(FileNotFoundError, match=r"x\.idx is missing beside .*x\.bin"):
        IndexedDataset(tmp_path / "x")
    with pytest.raises(FileNotFoundError, match=r"y\.bin is missing beside .*y\.idx"):
        IndexedDataset(tmp_path / "y")
    with pytest.raises(FileNotFoundError, match="takes the prefix, without .bin or .idx"):
        IndexedDataset(tmp_path / "x.bin")


def test_damaged_files_are_refused_with_expected_and_found_bytes(tmp_path: Path) -> None:
    small(tmp_path / "x", [[1, 2], [3], []])
    tokens, index = tmp_path / "x.bin", tmp_path / "x.idx"
    whole_tokens, whole_index = tokens.read_bytes(), index.read_bytes()
    assert len(whole_index) == HEADER.size + 3 * 4 + 3 * 8 + 4 * 8 == 102

    def refused(match: str) -> None:
        with pytest.raises(ValueError, match=match):
            IndexedDataset(tmp_path / "x")
        tokens.write_bytes(whole_tokens)
        index.write_bytes(whole_index)

    tokens.write_bytes(whole_tokens[:-1])
    refused(r"x\.bin is truncated: .*3 tokens of 2 bytes, 6 bytes, found 5")
    tokens.write_bytes(whole_tokens + b"\0\0")
    refused(r"x\.bin does not belong to its \.idx: .*6 bytes, found 8")
    index.write_bytes(whole_index[:-1])
    refused(r"x\.idx is truncated: 3 sequences and 4 document indices take 102 bytes, found 101")
    index.write_bytes(whole_index[:20])
    refused(r"x\.idx is truncated: its header alone takes 34 bytes, found 20")
    index.write_bytes(b"TNTIDX\0\0\0" + whole_index[9:])
    refused(r"x\.idx is not a Megatron index: it begins with b'TNTIDX")
    index.write_bytes(whole_index[:9] + struct.pack("<Q", 2) + whole_index[17:])
    refused("format version 2")
    index.write_bytes(whole_index[:17] + b"\x07" + whole_index[18:])
    refused("dtype code 7")
    index.write_bytes(whole_index[:34] + struct.pack("<i", 1) + whole_index[38:])
    refused("sequence 1 should begin at byte 2 of the .bin file, the index says 4")
    index.write_bytes(whole_index[:34] + struct.pack("<i", -2) + whole_index[38:])
    refused("sequence 0 has a negative length, -2")
    for number, value in ((0, 1), (1, 4), (1, -1), (2, 0), (3, 2)):
        place = 34 + 3 * 4 + 3 * 8 + 8 * number
        index.write_bytes(whole_index[:place] + struct.pack("<q", value) + whole_index[place + 8 :])
        refused(rf"document indices are out of range: number {number} of 4 is {value};.* number of sequences, 3")
    IndexedDataset(tmp_path / "x")  # the files as written pass
