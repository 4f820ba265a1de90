"""Ops in CUDA C++, compiled by nvcc for the GPU that is there and called through ctypes: a plain C interface, no torch.

Lives here: the library of each source in `csrc/`, how its functions are called, and the ops that have a kernel there.
Imports torch and `kernels` only. Each function here has the name and arguments of its op, which has checked them.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kernels import build
from kernels.wire import WireFormat

logger = logging.getLogger(__name__)

# --fmad=false: a product and a sum stay two roundings, as in the references.
FLAGS = ("-O3", "-std=c++17", "--fmad=false", "-shared", "-Xcompiler", "-fPIC")
SOURCES = ("decode_sum_encode.cu", "sign_pack.cu", "peer_all_reduce.cu")
_FORMATS = ("bf16", "int8", "fp8", "int4", "sign")
KINDS = {None: 0, torch.float32: 1, torch.bfloat16: 2}
"""How the sources number dtypes."""


class Layout(ctypes.Structure):
    """Where the parts of a row on the wire are: `Layout` of csrc/wire_formats.cuh."""

    _fields_ = [
        ("m", ctypes.c_int64),
        ("block_log2", ctypes.c_int),
        ("mask_at", ctypes.c_int64),
        ("codes_at", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
    ]

    @classmethod
    def of(cls, wire_format: WireFormat, m: int) -> Layout:
        scales, mask, codes = wire_format.sections(m)
        return cls(m, wire_format.block.bit_length() - 1, scales, scales + mask, scales + mask + codes)


def available() -> bool:
    """Whether there is a GPU, and nvcc compiles the ops for it or has done so before. Says why where it can't."""
    if not torch.cuda.is_available():
        return False
    try:
        for source in SOURCES[:2]:
            library(source, _architecture(torch.device("cuda", torch.cuda.current_device())))
    except (build.BuildError, OSError) as error:
        logger.warning("kernels in CUDA C++ can't be used: %s", error)
        return False
    return True


@functools.cache
def library(source: str, architecture: str) -> ctypes.CDLL:
    """The functions of `csrc/<source>`, compiled on first use. architecture: as "sm_90". Raises BuildError."""
    nvcc = build.find_compiler("nvcc")
    compiled = build.load([source], [nvcc] if nvcc else None, (*FLAGS, f"-arch={architecture}"))
    compiled.error_text.restype = ctypes.c_char_p
    return compiled


def _architecture(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@contextmanager
def on_stream(device: torch.device) -> Iterator[tuple[str, int]]:
    """Inside, `device` is the current one; yields its architecture and its current stream's address."""
    with torch.cuda.device(device):
        yield _architecture(device), torch.cuda.current_stream(device).cuda_stream


def call(source: str, function: str, device: torch.device, *arguments: Any, stream: bool = True) -> None:
    """Call a C function of `csrc/<source>`, with the device's current stream last. Launches don't wait for the device.

    Raises RuntimeError with the function's name and CUDA's words, BuildError where the source can't be compiled.
    """
    with on_stream(device) as (architecture, address):
        compiled = library(source, architecture)
        code = getattr(compiled, function)(*arguments, *([ctypes.c_void_p(address)] if stream else []))
    if code:
        raise RuntimeError(f"{function} on {device}: CUDA says {compiled.error_text(code).decode()} (error {code})")


def _pointer(op: str, what: str, tensor: torch.Tensor | None) -> ctypes.c_void_p:
    if tensor is not None and tensor.data_ptr() % 16:
        raise ValueError(
            f"{op}: {what} begins {tensor.data_ptr() % 16} bytes after a multiple of 16, and the kernel reads 16 bytes "
            "at a time: let it begin at a multiple, or take KERNELS=torch"
        )
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _rows(op: str, wire_format: WireFormat, wire_rw: torch.Tensor, m: int) -> list[Any]:
    """Format, wire, number of rows and their layout."""
    number = _FORMATS.index(wire_format.name)
    return [number, _pointer(op, "wire", wire_rw), wire_rw.shape[0], Layout.of(wire_format, m)]


def _residuals(op: str, *residuals: torch.Tensor | None) -> list[Any]:
    """Pointer and kind of each."""
    arguments: list[Any] = []
    for what, tensor in zip(("residual", "new residual"), residuals, strict=True):
        arguments += [_pointer(op, what, tensor), KINDS[None if tensor is None else tensor.dtype]]
    return arguments


def _statistics(wire_format: WireFormat, m: int, wire: torch.Tensor, rows: int = 1) -> torch.Tensor:
    """One row of three for each thread block, to be summed: fp64 [rows · blocks, 3]. An atomic sum would vary."""
    values = 16 if wire_format.name == "sign" else 128 // wire_format.bits  # of a thread, as in csrc/wire_formats.cuh
    return torch.empty((rows * -(-m // (256 * values)), 3), dtype=torch.float64, device=wire.device)


def decode_sum(wire_rw: torch.Tensor, wire_format: WireFormat, out_m: torch.Tensor) -> torch.Tensor:
    """`kernels.decode_sum.decode_sum`."""
    m, op = out_m.numel(), "decode_sum"
    if m:
        call(SOURCES[0], op, wire_rw.device, *_rows(op, wire_format, wire_rw, m), _pointer(op, "out", out_m))
    return out_m


def decode_sum_encode(
    wire_rw: torch.Tensor,
    wire_format: WireFormat,
    m: int,
    wire_w: torch.Tensor,
    residual_m: torch.Tensor | None = None,
    new_residual_m: torch.Tensor | None = None,
) -> torch.Tensor:
    """`kernels.decode_sum.decode_sum_encode`."""
    op, statistics = "decode_sum_encode", _statistics(wire_format, m, wire_rw)
    if m:
        call(
            SOURCES[0],
            op,
            wire_rw.device,
            *_rows(op, wire_format, wire_rw, m),
            _pointer(op, "new wire", wire_w),
            *_residuals(op, residual_m, new_residual_m),
            ctypes.c_void_p(statistics.data_ptr()),
        )
    return statistics.sum(0)


def sign_pack(
    x_rm: torch.Tensor,
    wire_format: WireFormat,
    wire_rw: torch.Tensor,
    residual_rm: torch.Tensor | None = None,
    new_residual_rm: torch.Tensor | None = None,
) -> torch.Tensor:
    """`kernels.sign_pack.sign_pack`. The scale's sum runs in pairs, not from the left."""
    op, (rows, m) = "sign_pack", x_rm.shape
    statistics = _statistics(wire_format, m, wire_rw, rows)
    if x_rm.numel():
        call(
            SOURCES[1],
            op,
            wire_rw.device,
            _pointer(op, "x", x_rm),
            rows,
            Layout.of(wire_format, m),
            _pointer(op, "wire", wire_rw),
            *_residuals(op, residual_rm, new_residual_rm),
            ctypes.c_void_p(statistics.data_ptr()),
        )
    return statistics.sum(0)


def sign_unpack(wire_rw: torch.Tensor, wire_format: WireFormat, out_rm: torch.Tensor) -> torch.Tensor:
    """`kernels.sign_pack.sign_unpack`."""
    op, (rows, m) = "sign_unpack", out_rm.shape
    if out_rm.numel():
        wire, out = _pointer(op, "wire", wire_rw), _pointer(op, "out", out_rm)
        call(SOURCES[1], op, wire_rw.device, wire, rows, Layout.of(wire_format, m), out)
    return out_rm
