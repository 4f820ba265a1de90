"""Megatron's indexed token files: PREFIX.bin holds the token ids, PREFIX.idx says where sequences and documents begin.

May import numpy and `data.files` only.
Source: megatron/core/datasets/indexed_dataset.py of Megatron-LM (core 0.16); files are interchangeable both ways.

Layout of .idx, little-endian, no padding:

    9 bytes   magic "MMIDIDX\\0\\0"
    uint64    version, 1
    uint8     dtype code of .bin (8 uint16, 4 int32, ...)
    uint64    n, the number of sequences
    uint64    d, the number of document indices (documents + 1)
    int32[n]  tokens of each sequence
    int64[n]  byte offset of each sequence in .bin
    int64[d]  document k holds the sequences index[k] .. index[k + 1] - 1; a document may have none

The end-of-document token is an ordinary token: it is in .bin and counted in the lengths.
"""

from __future__ import annotations

import os
import shutil
import struct
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from data.files import fsync_directory, partial_path

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}

Int64Array = npt.NDArray[np.int64]


def token_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """uint16 where the vocabulary fits (Megatron's limit: 65,500), int32 otherwise or when unknown."""
    return np.dtype("<u2") if vocab_size is not None and vocab_size < 65500 else np.dtype("<i4")


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.idx")


class IndexedDataset:
    """Memory-mapped reader. Opening checks the whole index against the sizes of both files; it reads no token.

    Attributes:
        prefix: path without .bin and .idx.
        dtype: of the token ids in the file.
        sequence_lengths: int32 [n], tokens of each sequence (a view of the mapped file).
        document_indices: int64 [documents + 1], first sequence of each document (a view of the mapped file).
        document_offsets: int64 [documents + 1], first token of each document, counted over the whole file.

    Raises:
        FileNotFoundError: one of the two files is missing (named).
        ValueError: bad magic, version or dtype; a truncated file (expected and found bytes); inconsistent indices.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        index, tokens = idx_path(prefix), bin_path(prefix)
        if not index.is_file() and not tokens.is_file():
            raise FileNotFoundError(
                f"no token files at {self.prefix}: neither {index} nor {tokens} exists "
                f"(--data-path takes the prefix, without .bin or .idx)"
            )
        if not index.is_file():
            raise FileNotFoundError(
                f"{index} is missing beside {tokens}: the run that wrote them did not finish, or only one was copied; "
                f"run tools/preprocess_data.py again or copy the .idx"
            )
        if not tokens.is_file():
            raise FileNotFoundError(
                f"{tokens} is missing beside {index}: copy it, or run tools/preprocess_data.py again"
            )

        self._read_index(index)
        offsets = np.zeros(self.num_sequences + 1, dtype=np.int64)
        np.cumsum(self.sequence_lengths, dtype=np.int64, out=offsets[1:])
        self._check_index(index, tokens, offsets)
        self.num_tokens = int(offsets[-1])
        # Nearly always one sequence a document: then both arrays are the same and no second one is kept.
        one_each = len(self.document_indices) == len(offsets) and bool((np.diff(self.document_indices) == 1).all())
        self.document_offsets: Int64Array = offsets if one_each else offsets[self.document_indices]
        # A plain array over the map (the memmap class slows every slice down); an empty file can't be mapped.
        self._tokens: npt.NDArray[Any] = (
            np.memmap(tokens, dtype=self.dtype, mode="r").view(np.ndarray)
            if self.num_tokens
            else np.empty(0, dtype=self.dtype)
        )

    def _read_index(self, path: Path) -> None:
        """Header and the three arrays, after checking that the file is as long as its header says."""
        found = path.stat().st_size
        if found < HEADER.size:
            raise ValueError(f"{path} is truncated: its header alone takes {HEADER.size} bytes, found {found}")
        with open(path, "rb") as stream:
            magic, version, code, sequences, indices = HEADER.unpack(stream.read(HEADER.size))
        if magic != MAGIC:
            raise ValueError(f"{path} is not a Megatron index: it begins with {magic!r} instead of {MAGIC!r}")
        if version != VERSION:
            raise ValueError(f"{path} has format version {version}; only version {VERSION} is known")
        if code not in DTYPES:
            raise ValueError(f"{path} has dtype code {code}; token ids have one of {sorted(DTYPES)}")
        expected = HEADER.size + 12 * sequences + 8 * indices
        # Megatron's multimodal files append one int8 per sequence; it says nothing about text.
        if found not in (expected, expected + sequences):
            state = "is truncated" if found < expected else "is longer than its header says"
            raise ValueError(
                f"{path} {state}: {sequences} sequences and {indices} document indices take {expected} bytes, "
                f"found {found}; write it again"
            )
        self.dtype = DTYPES[code]
        self.num_sequences = int(sequences)
        mapped = np.memmap(path, mode="r")
        self.sequence_lengths = np.frombuffer(mapped, "<i4", sequences, HEADER.size)
        self._pointers = np.frombuffer(mapped, "<i8", sequences, HEADER.size + 4 * sequences)
        self.document_indices: Int64Array = np.frombuffer(mapped, "<i8", indices, HEADER.size + 12 * sequences)

    def _check_index(self, index: Path, tokens: Path, offsets: Int64Array) -> None:
        """What silently reads wrong tokens otherwise. `offsets` int64 [n + 1]: first token of each sequence."""
        if self.num_sequences and int(self.sequence_lengths.min()) < 0:
            bad = int(np.argmin(self.sequence_lengths))
            raise ValueError(f"{index}: sequence {bad} has a negative length, {self.sequence_lengths[bad]}")
        pointers = offsets[:-1] * self.dtype.itemsize
        if not np.array_equal(self._pointers, pointers):
            bad = int(np.flatnonzero(self._pointers != pointers)[0])
            raise ValueError(
                f"{index}: sequence {bad} should begin at byte {pointers[bad]} of the .bin file, the index says "
                f"{self._pointers[bad]}; only files with their sequences in order are read"
            )
        expected, found = int(offsets[-1]) * self.dtype.itemsize, tokens.stat().st_size
        if found != expected:
            state = "is truncated" if found < expected else "does not belong to its .idx"
            raise ValueError(
                f"{tokens} {state}: {index.name} describes {offsets[-1]} tokens of {self.dtype.itemsize} bytes, "
                f"{expected} bytes, found {found}; write or copy both files again"
            )
        documents = self.document_indices
        if not len(documents):
            raise ValueError(f"{index} has no document indices; even a file without documents has one, 0")
        wrong = (documents < 0) | (documents > self.num_sequences)
        wrong[1:] |= np.diff(documents) < 0
        wrong[0] |= documents[0] != 0
        wrong[-1] |= documents[-1] != self.num_sequences
        if wrong.any():
            bad = int(np.flatnonzero(wrong)[0])
            raise ValueError(
                f"{index}: document indices are out of range: number {bad} of {len(documents)} is {documents[bad]}; "
                f"they must rise from 0 to the number of sequences, {self.num_sequences}"
            )

    @property
    def num_documents(self) -> int:
        return len(self.document_offsets) - 1

    def sequence(self, index: int) -> npt.NDArray[Any]:
        """Token ids of one sequence, a read-only view [length]."""
        if not 0 <= index < self.num_sequences:
            raise IndexError(f"{self.prefix}: sequence {index} of {self.num_sequences}")
        first = int(self._pointers[index]) // self.dtype.itemsize
        return self._tokens[first : first + int(self.sequence_lengths[index])]

    def document(self, index: int) -> npt.NDArray[Any]:
        """Token ids of one document (all of its sequences), a read-only view [length]."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"{self.prefix}: document {index} of {self.num_documents}")
        return self._tokens[self.document_offsets[index] : self.document_offsets[index + 1]]

    def read_spans(self, starts: Int64Array, lengths: Int64Array, vocab_size: int | None = None) -> Int64Array:
        """Token ids of several spans, one after the other, in one gather.

        Args:
            starts, lengths: int64 [k], in tokens of the whole file.
            vocab_size: when given, ids outside [0, vocab_size) are refused as in `check_token_ids`.
        Returns: int64 [lengths.sum()]
        """
        before = np.cumsum(lengths) - lengths
        positions = np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(starts - before, lengths)
        ids = self._tokens[positions].astype(np.int64)
        if vocab_size is not None and len(ids) and not (0 <= ids.min() and ids.max() < vocab_size):
            bad = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
            raise self._outside_vocabulary(int(positions[bad]), vocab_size)
        return ids

    def check_token_ids(self, vocab_size: int, chunk: int = 1 << 22) -> None:
        """Read every token once (100 MB: a few hundredths of a second from the page cache).

        Raises: ValueError naming document, position in it and value of the first id outside [0, vocab_size).
        """
        for start in range(0, self.num_tokens, chunk):
            ids = self._tokens[start : start + chunk]
            if ids.max() >= vocab_size or ids.min() < 0:
                raise self._outside_vocabulary(
                    start + int(np.flatnonzero((ids >= vocab_size) | (ids < 0))[0]), vocab_size
                )

    def _outside_vocabulary(self, position: int, vocab_size: int) -> ValueError:
        document = int(np.searchsorted(self.document_offsets, position, side="right")) - 1
        within = position - int(self.document_offsets[document])
        return ValueError(
            f"{bin_path(self.prefix)}: document {document}, position {within}: "
            f"token id {int(self._tokens[position])} is outside the vocabulary of {vocab_size}; "
            f"tokenise with this run's tokenizer, or take a model with a larger vocab_size"
        )


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx; neither exists under its name before `finalize`.

    A context manager: the block's normal end finalises, an exception removes what was written.

    Args:
        prefix: path without .bin and .idx; its directory is created.
        vocab_size: picks uint16 or int32 and refuses ids beyond it; None writes int32.
        dtype: overrides the choice (to merge files of another type).
    """

    def __init__(
        self, prefix: str | os.PathLike[str], vocab_size: int | None = None, dtype: npt.DTypeLike | None = None
    ) -> None:
        self.prefix = os.fspath(prefix)
        self.vocab_size = vocab_size
        self.dtype = np.dtype(dtype).newbyteorder("<") if dtype is not None else token_dtype(vocab_size)
        if self.dtype not in CODES:
            raise ValueError(f"token ids can't be stored as {self.dtype}; take one of {[str(d) for d in CODES]}")
        self._limit = np.iinfo(self.dtype).max if vocab_size is None else vocab_size - 1
        # Typed arrays: 4 and 8 bytes an entry, where a list of ints takes ten times that at 10^8 documents.
        self._lengths = array("i")
        self._documents = array("q", [0])
        bin_path(prefix).parent.mkdir(parents=True, exist_ok=True)
        self._partial_bin, self._partial_idx = partial_path(bin_path(prefix)), partial_path(idx_path(prefix))
        self._stream = open(self._partial_bin, "wb")

    @property
    def num_documents(self) -> int:
        return len(self._documents) - 1

    def add_document(self, tokens: npt.ArrayLike, lengths: Sequence[int] | None = None) -> None:
        """Append one document.

        Args:
            tokens: ids [length], of all its sequences together; may be empty.
            lengths: tokens of each of its sequences; None makes it one sequence.
        """
        ids = self._checked(tokens)
        parts = [len(ids)] if lengths is None else list(lengths)
        if sum(parts) != len(ids):
            raise ValueError(f"sequence lengths {parts} sum to {sum(parts)}, the document has {len(ids)} tokens")
        self._stream.write(ids.tobytes())
        self._lengths.extend(parts)
        self._documents.append(len(self._lengths))

    def add_documents(self, tokens: npt.ArrayLike, lengths: npt.ArrayLike) -> None:
        """Append many documents of one sequence each: ids [sum of lengths], lengths [documents]."""
        ids, counts = self._checked(tokens), np.asarray(lengths, dtype=np.int32)
        if int(counts.sum(dtype=np.int64)) != len(ids):
            raise ValueError(f"document lengths sum to {counts.sum(dtype=np.int64)}, there are {len(ids)} tokens")
        self._stream.write(ids.tobytes())
        first = len(self._lengths) + 1
        self._lengths.frombytes(counts.tobytes())
        self._documents.frombytes(np.arange(first, first + len(counts), dtype=np.int64).tobytes())

    def add_file(self, prefix: str | os.PathLike[str]) -> None:
        """Append all documents of another pair of files; their document boundaries are kept, empty documents too."""
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise ValueError(f"{other.prefix} holds {other.dtype} ids and can't be merged into {self.dtype}")
        if self.vocab_size is not None:
            other.check_token_ids(self.vocab_size)
        with open(bin_path(prefix), "rb") as stream:
            shutil.copyfileobj(stream, self._stream, 1 << 24)
        indices = other.document_indices[1:] + len(self._lengths)  # before the lengths grow
        self._lengths.frombytes(other.sequence_lengths.tobytes())
        self._documents.frombytes(indices.astype(np.int64).tobytes())

    def _checked(self, tokens: npt.ArrayLike) -> npt.NDArray[Any]:
        ids = np.asarray(tokens)
        if ids.ndim != 1:
            raise ValueError(f"a document is one row of token ids, not an array of shape {ids.shape}")
        # numpy would wrap a large id around silently when it narrows.
        if len(ids) and not (0 <= ids.min() and ids.max() <= self._limit):
            bad = int(np.flatnonzero((ids < 0) | (ids > self._limit))[0])
            raise ValueError(f"token id {ids[bad]} at position {bad}: ids of {self.prefix} lie in [0, {self._limit}]")
        return ids.astype(self.dtype)

    def finalize(self) -> None:
        """Write the index and give both files their names, the index last."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        pointers = np.cumsum(lengths, dtype=np.int64)
        pointers -= lengths
        pointers *= self.dtype.itemsize
        with open(self._partial_idx, "wb") as stream:
            stream.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], len(lengths), len(self._documents)))
            for values, dtype in (
                (lengths, "<i4"),
                (pointers, "<i8"),
                (np.frombuffer(self._documents, np.int64), "<i8"),
            ):
                stream.write(values.astype(dtype, copy=False).tobytes())
            stream.flush()
            os.fsync(stream.fileno())
        # An older index must not stand beside the new tokens, not even for an instant.
        idx_path(self.prefix).unlink(missing_ok=True)
        os.replace(self._partial_bin, bin_path(self.prefix))
        os.replace(self._partial_idx, idx_path(self.prefix))
        fsync_directory(bin_path(self.prefix).parent)

    def abort(self) -> None:
        """Remove what was written; files of an earlier run stay as they are."""
        self._stream.close()
        self._partial_bin.unlink(missing_ok=True)
        self._partial_idx.unlink(missing_ok=True)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.finalize()
        except BaseException:
            self.abort()
            raise


def merge_indexed(prefixes: Iterable[str | os.PathLike[str]], output_prefix: str | os.PathLike[str]) -> None:
    """Concatenate pairs of files, in the order given, into one; all must hold ids of one dtype."""
    sources = list(prefixes)
    if not sources:
        raise ValueError(f"nothing to merge into {os.fspath(output_prefix)}")
    with IndexedWriter(output_prefix, dtype=IndexedDataset(sources[0]).dtype) as writer:
        for prefix in sources:
            writer.add_file(prefix)
