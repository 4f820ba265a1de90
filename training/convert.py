"""Hugging Face's directories to checkpoints and back, in one process and a bounded part of memory.

Lives here: what `tools/hf_checkpoint.py` does. May import the rooms below. Everything that can be wrong is found before
the first tensor is read; what is written appears by one rename, when all of it is on disk.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from data.files import partial_path
from data.tokenizer import copy_tokenizer, load_tokenizer, tokenizer_file
from model.config import DeepSeekConfig
from model.hf import HFDirectory, global_shapes, hf_repeats, hf_tensors, parts_of_box
from training.checkpoint import FORMAT, META, TOKENIZER, find, read_config, stored_key
from training.durable import fsync, write_text
from training.failures import ConfigurationError
from training.hf_files import CONFIG, FILE_BYTES, HFFiles, write_config, write_index
from training.precision import DTYPES
from training.stored import BLOCK_BYTES, Box, StoredTensors, write_tensors

Report = Callable[[int, int], None]
"""Called with the bytes written so far and of the whole, after every tensor or part of one."""


def import_directory(
    source: Path,
    target: Path,
    dtype: str | None = None,
    report: Report = lambda done, total: None,
    block_bytes: int = BLOCK_BYTES,
) -> str:
    """Write the model of a Hugging Face directory as a checkpoint at step 0, weights alone; returns its description.

    dtype: "fp32", "bf16" or "fp16"; None keeps each tensor's own, and FP8 becomes fp32: each value times its block's
    scale. Router biases are fp32. Holds about three blocks of `block_bytes`. Raises ConfigurationError, ValueError or
    OSError before a tensor is read: for a target that exists, a directory that isn't complete (all its faults at once),
    a tokenizer that is too large for the model, too little room; then, before anything is written, where an MTP layer's
    copies of embedding and head differ from these.
    """
    _refuse_existing(target)
    if not (source / CONFIG).is_file():
        raise ConfigurationError(f"{source} has no {CONFIG}: give a directory as Hugging Face has them")
    config = DeepSeekConfig.from_file(source / CONFIG)
    tokenizer = _tokenizer_in(source, config)
    directory = HFDirectory(source, config)
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, shape in global_shapes(config).items():
        found = (directory.dtype_of(piece.hf_name) for piece in hf_tensors(name, config))
        own = functools.reduce(torch.promote_types, found)
        tensors[name] = (shape, _dtype_of(name, own if dtype is None else DTYPES[dtype]))
    total = sum(math.prod(shape) * kept.itemsize for shape, kept in tensors.values())
    _refuse_too_little_room(target, total)
    _check_repeats(directory)
    done = 0

    def read(key: str, box: Box) -> torch.Tensor:
        nonlocal done
        name = names[key]
        values = torch.empty([at.stop - at.start for at in box], dtype=tensors[name][1])
        directory.fill(parts_of_box(name, values, box, config))
        if dtype == "fp16":
            _refuse_overflow(name, values)
        report(done := done + values.nbytes, total)
        return values

    names = {stored_key(name): name for name in tensors}
    with _whole(target) as partial:
        write_tensors(partial, {key: tensors[name] for key, name in names.items()}, read, block_bytes)
        carried = partial / TOKENIZER
        carried.mkdir()
        if tokenizer is not None:
            for copy in copy_tokenizer(tokenizer, carried):
                fsync(copy)
        write_text(carried / CONFIG, json.dumps(config.to_dict(), indent=1))
        fsync(carried)
        meta = {
            "format": FORMAT,
            "step": 0,
            "consumed_samples": 0,
            "optimizer": None,
            "torch": torch.__version__,
            "model": config.to_dict(),
        }
        write_text(partial / META, json.dumps(meta, indent=1))
    kinds = sorted({str(kept).removeprefix("torch.") for _, kept in tensors.values()})
    return f"{len(tensors)} tensors, {_size(total)} in {' and '.join(kinds)}{_named(tokenizer)}"


def export_checkpoint(
    source: Path,
    target: Path,
    dtype: str = "bf16",
    file_bytes: int = FILE_BYTES,
    tokenizer: Path | None = None,
    report: Report = lambda done, total: None,
) -> str:
    """Write a checkpoint's model as a directory like the published ones; returns what was written in words.

    source: a run, its checkpoints (the newest is taken), or a checkpoint, of any layout, ZeRO stage and precision.
    dtype: "fp32", "bf16" or "fp16", in which masters are rounded; router biases are fp32. tokenizer: instead of the one
    that the checkpoint carries. Holds a file of `file_bytes`, and of one tensor a stored block and the rounded whole.
    Raises ConfigurationError, ValueError or OSError before a tensor is read: for a target that exists, a checkpoint
    that isn't complete or isn't the model it says, a tokenizer too large for it, too little room; ConfigurationError
    also for a number beyond fp16's.
    """
    _refuse_existing(target)
    step = find(source)
    if step is None:
        raise ConfigurationError(f"{source} holds no complete checkpoint: give a run, its checkpoints, or a checkpoint")
    config = read_config(step)
    tokenizer = _tokenizer_in(step / TOKENIZER if tokenizer is None else tokenizer, config, asked=tokenizer is not None)
    stored = StoredTensors(step)
    total = sum(
        math.prod(global_shapes(config)[name]) * _dtype_of(name, DTYPES[dtype]).itemsize
        for name in (*global_shapes(config), *hf_repeats(config).values())
    )
    _refuse_too_little_room(target, total)
    done = 0
    with _whole(target) as partial:
        files = HFFiles(partial, "model", file_bytes)
        for hf_name, tensor in _hf_tensors_of(stored, config, DTYPES[dtype]):
            files.add(hf_name, tensor)
            report(done := done + tensor.nbytes, total)
        files.flush()
        files.number()
        write_index(partial, files.weight_map, files.total_bytes)
        if tokenizer is not None:
            for copy in copy_tokenizer(tokenizer, partial):
                fsync(copy)
            config = _with_ids_of(tokenizer, config)
        write_config(partial, config, DTYPES[dtype])  # after the tokenizer, beside which another one may lie
    return f"{len(files.weight_map)} tensors of {step}, {_size(total)} in {dtype}{_named(tokenizer)}"


def _hf_tensors_of(
    stored: StoredTensors, config: DeepSeekConfig, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a published directory, whole, under its name there, one after the other."""
    for name, shape in global_shapes(config).items():
        key, kept = stored_key(name), _dtype_of(name, dtype)
        # What is one tensor there is read whole; experts, and gate and up, as they lie in the checkpoint.
        cut = len(hf_tensors(name, config)) > 1
        for rows in stored.rows(key) if cut else [slice(0, shape[0])]:
            box = (rows, *(slice(0, size) for size in shape[1:]))
            values = stored.read(key, box, kept)
            if kept == torch.float16:
                _refuse_overflow(name, values)
            for part in parts_of_box(name, values, box, config):
                yield part.hf_name, part.view
    for repeat, name in hf_repeats(config).items():  # read once more: a tensor that is kept for a later file is memory
        box = tuple(slice(0, size) for size in global_shapes(config)[name])
        yield repeat, stored.read(stored_key(name), box, _dtype_of(name, dtype))


def _refuse_overflow(name: str, values: torch.Tensor) -> None:
    if not values.isfinite().all():
        raise ConfigurationError(f"{name} has numbers that fp16 can't hold, above 65504: take bf16 or fp32")


def _dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """A published directory's router biases are fp32, whatever the rest is."""
    return torch.float32 if name.endswith("e_score_correction_bias") else dtype


def _check_repeats(directory: HFDirectory) -> None:
    """Raises ConfigurationError where an MTP layer's own copy of embedding or head isn't a copy."""
    differing = []
    for repeat, original in directory.repeats.items():
        rows, columns = directory.shape_of(original)
        height = max(1, BLOCK_BYTES // 16 // columns)
        for start in range(0, rows, height):
            part = (slice(start, min(start + height, rows)), slice(0, columns))
            if not torch.equal(directory.read(repeat, part).float(), directory.read(original, part).float()):
                differing.append(f"{repeat} differs from {original}")
                break
    if differing:
        raise ConfigurationError(
            "\n  ".join([f"{directory.directory} has layers of multi-token prediction of their own kind:", *differing])
            + "\n  here they share the model's embedding and head: this model can't be imported"
        )


def _tokenizer_in(place: Path, config: DeepSeekConfig, asked: bool = False) -> Path | None:
    """A directory's tokenizer, checked against the model; None where it has none and none was asked for."""
    try:
        file = tokenizer_file(place)
    except FileNotFoundError:
        if asked:
            raise
        return None
    load_tokenizer(file, config.vocab_size)
    return file


def _with_ids_of(tokenizer: Path, config: DeepSeekConfig) -> DeepSeekConfig:
    """What begins and ends a text is what the tokenizer says, where config.json says something else (generation)."""
    loaded = load_tokenizer(tokenizer)
    extra = dict(config.extra)
    for key, found in (("bos_token_id", loaded.bos_id), ("eos_token_id", loaded.eod_id)):
        said = extra.get(key)
        if found is not None and found not in (said if isinstance(said, list) else [said]):
            extra[key] = found
    return dataclasses.replace(config, extra=extra)


def _size(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def _named(tokenizer: Path | None) -> str:
    return ", no tokenizer" if tokenizer is None else f", with {tokenizer.name}"


def _refuse_existing(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise ConfigurationError(f"{target} exists: choose another place, or remove it first")


def _refuse_too_little_room(target: Path, needed: int) -> None:
    place = next(parent for parent in target.absolute().parents if parent.exists())
    if (free := shutil.disk_usage(place).free) < needed:
        raise ConfigurationError(f"{target} needs {_size(needed)}, {place} has {_size(free)} left")


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """A directory to write into, with files that are on disk when written. It becomes `target` when the block ends, and
    vanishes where it ends with an exception."""
    partial = partial_path(target)
    partial.mkdir(parents=True)
    try:
        yield partial
        fsync(partial)
        _refuse_existing(target)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    fsync(target.absolute().parent)
