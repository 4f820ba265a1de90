"""Text files to Megatron's .bin/.idx with many processes, in the order of the input.

May import numpy, `data.indexed` and `data.tokenizer` only; no torch, since every worker process imports this file.
Source: Megatron-LM's tools/preprocess_data.py (flags, names, append-eod); the pool is bounded, so memory stays flat.
"""

from __future__ import annotations

import glob
import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data.indexed import IndexedWriter
from data.tokenizer import Tokenizer, load_tokenizer

JSON_SUFFIXES = (".jsonl", ".json")
CHUNK_CHARACTERS = 1 << 18  # what one worker gets at a time: some tenths of a second of work

Texts = tuple[str, ...]  # one document, a text for each key
Encoded = tuple[npt.NDArray[Any], npt.NDArray[np.int32]]  # ids of several documents, and the length of each


@dataclass(frozen=True)
class Chunk:
    """Consecutive documents and the bytes of input that they took."""

    documents: list[Texts]
    bytes: int


@dataclass(frozen=True)
class Written:
    """One finished pair of files."""

    prefix: str
    documents: int
    tokens: int


def expand_inputs(inputs: Sequence[str]) -> list[Path]:
    """Files in a reproducible order: as given; a directory's *.jsonl, *.json and *.txt and a pattern's matches, sorted.

    Raises: FileNotFoundError naming the input that matches nothing.
    """
    files: list[Path] = []
    for item in inputs:
        path = Path(item)
        if path.is_file():
            found = [path]
        elif path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix in (*JSON_SUFFIXES, ".txt") and p.is_file())
        else:
            found = sorted(p for p in map(Path, glob.glob(item, recursive=True)) if p.is_file())
        if not found:
            kind = (
                "holds no *.jsonl, *.json or *.txt"
                if path.is_dir()
                else "is no file, directory or pattern with matches"
            )
            raise FileNotFoundError(f"input {item} {kind}")
        files += found
    return files


def read_documents(files: Iterable[Path], keys: Sequence[str] = ("text",)) -> Iterator[tuple[Texts, int]]:
    """Yield (the document's text for each key, bytes of input it took).

    A *.jsonl or *.json file has one document a line; any other file is one document, under the key "text".

    Raises: ValueError naming file and line for JSON that isn't an object with these keys, or text that isn't UTF-8.
    """
    for file in files:
        if file.suffix not in JSON_SUFFIXES:
            if list(keys) != ["text"]:
                raise ValueError(f"{file} is plain text, which has the key 'text' only; json-keys: {', '.join(keys)}")
            raw = file.read_bytes()
            try:
                yield (raw.decode("utf-8"),), len(raw)
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not UTF-8 text: {error}") from None
            continue
        with open(file, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                    texts = tuple(record[key] for key in keys)
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{file}, line {number}: not a JSON object: {error}") from None
                except KeyError as error:
                    raise ValueError(f"{file}, line {number}: no key {error}; it has {', '.join(record)}") from None
                if not all(isinstance(text, str) for text in texts):
                    raise ValueError(f"{file}, line {number}: the values of {', '.join(keys)} must be strings")
                yield texts, len(line)


def chunked(documents: Iterable[tuple[Texts, int]], characters: int) -> Iterator[Chunk]:
    """Consecutive documents of about `characters` together."""
    waiting: list[Texts] = []
    size = taken = 0
    for texts, count in documents:
        waiting.append(texts)
        size += sum(map(len, texts))
        taken += count
        if size >= characters:
            yield Chunk(waiting, taken)
            waiting, size, taken = [], 0, 0
    if waiting:
        yield Chunk(waiting, taken)


def encode_documents(tokenizer: Tokenizer, documents: Sequence[Texts], append_eod: bool) -> list[Encoded]:
    """For each key: the ids of all documents, one after the other, and the length of each.

    The end-of-document token counts in the length. An empty text stays an empty document, without the token, as in
    Megatron.
    """
    results: list[Encoded] = []
    for texts in zip(*documents, strict=True):
        ids: list[int] = []
        lengths: list[int] = []
        for text in texts:
            # JSON may hold half of a surrogate pair, which no encoding has: it becomes a question mark.
            tokens = tokenizer.encode(text.encode("utf-8", "replace").decode("utf-8"))
            if tokens and append_eod:
                tokens.append(tokenizer.eod_id)
            ids += tokens
            lengths.append(len(tokens))
        results.append((np.array(ids, dtype=np.int32), np.array(lengths, dtype=np.int32)))
    return results


_worker: tuple[Tokenizer, bool] | None = None


def _exit_after(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _start_worker(tokenizer_model: str, append_eod: bool) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends the workers
    parent = multiprocessing.parent_process()
    if parent is not None:
        # A parent killed with -9 can't end them: each waits for its end in a thread.
        threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()
    _worker = load_tokenizer(tokenizer_model), append_eod


def _encode_in_worker(documents: Sequence[Texts]) -> list[Encoded]:
    assert _worker is not None
    return encode_documents(_worker[0], documents, _worker[1])


def encode_chunks(
    chunks: Iterable[Chunk], tokenizer_model: str, append_eod: bool, workers: int
) -> Iterator[tuple[Chunk, list[Encoded]]]:
    """Encode chunks in `workers` processes, in order; four chunks a worker are under way, so memory is bounded.

    Raises: what the encoding raises; BrokenProcessPool when a worker is killed (multiprocessing.Pool would hang).
    """
    if workers == 1:
        tokenizer = load_tokenizer(tokenizer_model)
        for chunk in chunks:
            yield chunk, encode_documents(tokenizer, chunk.documents, append_eod)
        return
    # Spawned, not forked: the progress display has a thread, and its locks would be copied in any state.
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer_model, append_eod),
    )
    under_way: deque[tuple[Chunk, Future[list[Encoded]]]] = deque()
    try:
        for chunk in chunks:
            under_way.append((chunk, pool.submit(_encode_in_worker, chunk.documents)))
            if len(under_way) >= 4 * workers:
                first, future = under_way.popleft()
                yield first, future.result()
        while under_way:
            first, future = under_way.popleft()
            yield first, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    tokenizer_model: str,
    append_eod: bool = True,
    workers: int = 1,
    json_keys: Sequence[str] = ("text",),
    report: Callable[[int, int, int], None] | None = None,
    chunk_characters: int = CHUNK_CHARACTERS,
) -> list[Written]:
    """Tokenise files into OUTPUT_PREFIX_{key}_document.bin and .idx, one pair a key.

    The result doesn't depend on `workers`. The files get their names when all input is done; a killed run leaves
    *.partial at most.

    Args:
        inputs: files, directories and patterns, see `expand_inputs`.
        output_prefix: as Megatron's.
        tokenizer_model: what `load_tokenizer` takes.
        append_eod: end each document with the tokenizer's end-of-document token.
        workers: processes; 1 encodes in this one.
        json_keys: which fields of a JSON line are texts.
        report: called after each chunk with (bytes of input, documents, tokens) since the last call.
        chunk_characters: what a worker gets at a time.
    """
    if workers < 1 or not json_keys:
        raise ValueError(f"workers {workers} must be at least 1, json-keys {list(json_keys)} at least one key")
    files = expand_inputs(inputs)
    vocab_size = load_tokenizer(tokenizer_model).vocab_size
    with ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedWriter(f"{output_prefix}_{key}_document", vocab_size)) for key in json_keys
        ]
        tokens = [0] * len(writers)
        chunks = chunked(read_documents(files, json_keys), chunk_characters)
        for chunk, results in encode_chunks(chunks, tokenizer_model, append_eod, workers):
            for number, (writer, (ids, lengths)) in enumerate(zip(writers, results, strict=True)):
                writer.add_documents(ids, lengths)
                tokens[number] += len(ids)
            if report is not None:
                report(chunk.bytes, len(chunk.documents), sum(len(ids) for ids, _ in results))
        if not writers[0].num_documents:
            raise ValueError(f"there is no document in {', '.join(map(str, files[:5]))}")
        written = [
            Written(writer.prefix, writer.num_documents, count) for writer, count in zip(writers, tokens, strict=True)
        ]
    return written
