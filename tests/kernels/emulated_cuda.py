"""CUDA C++ without a GPU: the sources compiled by g++ against cuda_on_cpu.h, which runs their kernels on the CPU.

For tests only, also from ranks. Imports `kernels` only.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from kernels import build, cuda

HEADER = Path(__file__).resolve().parent / "cuda_on_cpu.h"
# Products and sums round twice, as under nvcc's --fmad=false.
FLAGS = ("-O1", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-x", "c++", "-include", str(HEADER))


def compiler() -> str | None:
    return build.find_compiler("g++", "c++")


@functools.cache
def library(source: str, architecture: str = "") -> ctypes.CDLL:
    """What `kernels.cuda.library` returns, for the CPU. Many ranks at once: one compiles."""
    emulated = build.load([source], [compiler()], FLAGS, machine=HEADER.read_text(encoding="utf-8"))
    emulated.error_text.restype = ctypes.c_char_p
    return emulated


@contextmanager
def _no_stream(device: torch.device) -> Iterator[tuple[str, int]]:
    yield "", 0


@contextmanager
def emulated() -> Iterator[None]:
    """Inside, `kernels.cuda` takes CPU tensors."""
    with mock.patch.object(cuda, "library", library), mock.patch.object(cuda, "on_stream", _no_stream):
        yield
