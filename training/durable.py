"""Files that are on disk when the call returns: what a checkpoint's rename may rely on.

Lives here: fsync of files and directories, and safetensors files with everyone's permissions. May import torch,
safetensors and the standard library.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch


def fsync(path: Path) -> None:
    """Of a file's bytes, or of a directory's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    fsync(path)


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """The directory's entry isn't on disk yet: `fsync` it once all its files are written. Raises OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode  # that of every other file of a checkpoint: safetensors' own can be read by nobody else
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    except SafetensorError as error:  # such as a full disk
        raise OSError(f"{path} can't be written: {error}") from error
    path.chmod(mode)
    fsync(path)
