"""Ops on gradients in C, for a CPU: one pass over memory each, where torch makes ten.

Lives here: the functions of `csrc/*.c` as `backend` calls them. Imports torch and `kernels` only. Arguments and what is
computed: the public functions in each op's own file, which have checked them. ctypes lets other threads run meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shlex
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch

from kernels import build
from kernels.select_top import ENTRY_BYTES
from kernels.wire import WireFormat

logger = logging.getLogger(__name__)

# No fast-math and no contraction of a · b + c: results are the reference's bits. omp-simd: sums and maxima in lanes,
# where a pragma allows it; no OpenMP runtime is linked.
FLAGS = (
    *("-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    "-fopenmp-simd",
)
_FORMATS = ("bf16", "int8", "fp8", "int4", "sign")
_DTYPES = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


class _Layout(ctypes.Structure):
    """`Layout` of csrc/codecs.c."""

    _fields_ = [
        *((name, c_int64) for name in ("format", "rows", "m", "block", "mask_at", "codes_at", "row_bytes")),
        ("level_inverse", c_float),
    ]


_ENCODED = (c_void_p, c_int32, c_void_p, c_int32, c_void_p)  # residual, its dtype, new residual, its dtype, statistics
_LAYOUT = ctypes.POINTER(_Layout)
_SIGNATURES = {
    "encode": (None, (_LAYOUT, c_void_p, c_void_p, *_ENCODED)),
    "decode": (None, (_LAYOUT, c_void_p, c_void_p)),
    "decode_sum": (None, (_LAYOUT, c_void_p, c_void_p)),
    "decode_sum_encode": (None, (_LAYOUT, c_void_p, c_void_p, *_ENCODED)),
    "select_top": (c_int32, (c_int64, c_int64, c_int64, c_void_p, c_void_p, *_ENCODED)),
    "scatter_sum": (c_int32, (c_int64, c_int64, c_int64, c_void_p, c_void_p)),
    "bucket_pack": (None, (c_int64, c_void_p, c_void_p, c_int32, c_void_p, c_int32, c_float, c_void_p)),
}


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The functions of the C files; None, with one warning, where they can't be compiled or loaded."""
    compiler = _compiler()
    try:
        if not compiler:
            raise build.BuildError("no C compiler (cc, gcc or clang, or the one that CC names)")
        sources = sorted(file.name for file in build.SOURCES.glob("*.c"))
        library = build.load(sources, compiler, (*FLAGS, "-shared", "-fPIC"), build.processor(compiler, FLAGS))
    except (build.BuildError, OSError) as error:
        logger.warning("gradient codecs run as torch ops, which are slower: %s", str(error).strip().splitlines()[-1])
        return None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _compiler() -> list[str]:
    """As $CC says, words split; else the first that is there; empty where none is."""
    if asked := os.environ.get("CC"):
        return shlex.split(asked)
    found = build.find_compiler("cc", "gcc", "clang")
    return [found] if found else []


def available() -> bool:
    """Whether the C files are compiled, or could be now; a warning says once why not."""
    return _library() is not None


def _loaded() -> ctypes.CDLL:
    library = _library()
    if library is None:
        raise RuntimeError("kernels.native: no compiled library; ask available() first")
    return library


def _layout(wire_format: WireFormat, rows: int, m: int) -> _Layout:
    scales, mask, codes = wire_format.sections(m)
    inverse = 1 / wire_format.level if wire_format.name in ("int8", "fp8", "int4") else 0.0
    return _Layout(
        _FORMATS.index(wire_format.name),
        rows,
        m,
        wire_format.block,
        scales,
        scales + mask,
        scales + mask + codes,
        inverse,
    )


def _residual(tensor: torch.Tensor | None) -> tuple[int | None, int]:
    return (None, 0) if tensor is None else (tensor.data_ptr(), _DTYPES[tensor.dtype])


def quantize(
    x_rm: torch.Tensor,
    wire_format: WireFormat,
    wire_rw: torch.Tensor,
    residual_rm: torch.Tensor | None = None,
    new_residual_rm: torch.Tensor | None = None,
) -> torch.Tensor:
    statistics = torch.zeros(3, dtype=torch.float64)
    _loaded().encode(
        _layout(wire_format, *x_rm.shape),
        x_rm.data_ptr(),
        wire_rw.data_ptr(),
        *_residual(residual_rm),
        *_residual(new_residual_rm),
        statistics.data_ptr(),
    )
    return statistics


def dequantize(wire_rw: torch.Tensor, wire_format: WireFormat, out_rm: torch.Tensor) -> torch.Tensor:
    _loaded().decode(_layout(wire_format, *out_rm.shape), wire_rw.data_ptr(), out_rm.data_ptr())
    return out_rm


sign_pack = quantize
sign_unpack = dequantize


def decode_sum(wire_rw: torch.Tensor, wire_format: WireFormat, out_m: torch.Tensor) -> torch.Tensor:
    layout = _layout(wire_format, wire_rw.shape[0], out_m.shape[0])
    _loaded().decode_sum(layout, wire_rw.data_ptr(), out_m.data_ptr())
    return out_m


def decode_sum_encode(
    wire_rw: torch.Tensor,
    wire_format: WireFormat,
    m: int,
    wire_w: torch.Tensor,
    residual_m: torch.Tensor | None = None,
    new_residual_m: torch.Tensor | None = None,
) -> torch.Tensor:
    statistics = torch.zeros(3, dtype=torch.float64)
    _loaded().decode_sum_encode(
        _layout(wire_format, wire_rw.shape[0], m),
        wire_rw.data_ptr(),
        wire_w.data_ptr(),
        *_residual(residual_m),
        *_residual(new_residual_m),
        statistics.data_ptr(),
    )
    return statistics


def select_top(
    x_rm: torch.Tensor,
    wire_rw: torch.Tensor,
    residual_rm: torch.Tensor | None = None,
    new_residual_rm: torch.Tensor | None = None,
) -> torch.Tensor:
    """Raises MemoryError where there is none for the candidates."""
    statistics = torch.zeros(3, dtype=torch.float64)
    rows, m = x_rm.shape
    status = _loaded().select_top(
        rows,
        m,
        wire_rw.shape[1] // ENTRY_BYTES,
        x_rm.data_ptr(),
        wire_rw.data_ptr(),
        *_residual(residual_rm),
        *_residual(new_residual_rm),
        statistics.data_ptr(),
    )
    if status:
        raise MemoryError(f"select_top: no memory for the candidates of a row of {m} values: smaller buckets")
    return statistics


def scatter_sum(wire_rw: torch.Tensor, out_m: torch.Tensor) -> torch.Tensor:
    """Raises IndexError where a place is outside of `out`."""
    rows, m = wire_rw.shape[0], out_m.shape[0]
    if _loaded().scatter_sum(rows, m, wire_rw.shape[1] // ENTRY_BYTES, wire_rw.data_ptr(), out_m.data_ptr()):
        raise IndexError(f"scatter_sum: a place lies outside of 0..{m - 1}: rows of another length?")
    return out_m


def bucket_pack(tensors: Sequence[torch.Tensor], out_n: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    statistics = torch.zeros(2, dtype=torch.float64)
    count = len(tensors)
    _loaded().bucket_pack(
        count,
        (c_void_p * count)(*(x.data_ptr() for x in tensors)),
        (c_int64 * count)(*(x.numel() for x in tensors)),
        _DTYPES[tensors[0].dtype] if tensors else 0,
        out_n.data_ptr(),
        _DTYPES[out_n.dtype],
        factor,
        statistics.data_ptr(),
    )
    return statistics
