"""Codecs: rows of fp32 values to bytes and back. They keep no state and know no ranks.

Lives here: the codecs by name. Imports `kernels` and the options only. Shapes: r rows, m values of a row, w bytes of a
row on the wire.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from kernels.decode_sum import decode_sum, decode_sum_encode
from kernels.quantize import dequantize, quantize
from kernels.select_top import ENTRY_BYTES, scatter_sum, select_top
from kernels.sign_pack import sign_pack, sign_unpack
from kernels.wire import FormatName, WireFormat
from parallel.compression.options import CompressionOptions

_FORMATS: dict[str, FormatName] = {"bf16": "bf16", "fp8": "fp8", "int8": "int8", "int4": "int4", "1bit": "sign"}


class Codec(Protocol):
    """Encodes values plus a residual, and keeps for the next residual what the code doesn't carry.

    granule: rows are multiples of it. Encoding returns `kernels.wire.STATISTICS`, fp64 [3]. Residuals are fp32 or bf16,
    of the shape of the values, or None.
    """

    granule: int

    def wire_bytes(self, m: int) -> int:
        """w: bytes of a row of m values."""

    def encode(
        self,
        x_rm: torch.Tensor,
        wire_rw: torch.Tensor,
        residual_rm: torch.Tensor | None,
        new_residual_rm: torch.Tensor | None,
    ) -> torch.Tensor: ...

    def decode(self, wire_rw: torch.Tensor, out_rm: torch.Tensor) -> None: ...

    def decode_sum(self, wire_rw: torch.Tensor, out_m: torch.Tensor) -> None:
        """The sum of the rows' values in fp32, from row 0 on."""

    def decode_sum_encode(
        self,
        wire_rw: torch.Tensor,
        m: int,
        wire_w: torch.Tensor,
        residual_m: torch.Tensor | None,
        new_residual_m: torch.Tensor | None,
    ) -> torch.Tensor: ...


class BlockCodec:
    """Fixed bits a value, in blocks that share a scale: bf16, fp8, int8, int4, 1bit."""

    def __init__(self, wire_format: WireFormat):
        self.format = wire_format
        self.granule = wire_format.block
        sign = wire_format.name == "sign"
        self._encode, self._decode = (sign_pack, sign_unpack) if sign else (quantize, dequantize)

    def wire_bytes(self, m: int) -> int:
        return self.format.wire_bytes(m)

    def encode(
        self,
        x_rm: torch.Tensor,
        wire_rw: torch.Tensor,
        residual_rm: torch.Tensor | None = None,
        new_residual_rm: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._encode(x_rm, self.format, wire_rw, residual_rm, new_residual_rm)

    def decode(self, wire_rw: torch.Tensor, out_rm: torch.Tensor) -> None:
        self._decode(wire_rw, self.format, out_rm)

    def decode_sum(self, wire_rw: torch.Tensor, out_m: torch.Tensor) -> None:
        decode_sum(wire_rw, self.format, out_m)

    def decode_sum_encode(
        self,
        wire_rw: torch.Tensor,
        m: int,
        wire_w: torch.Tensor,
        residual_m: torch.Tensor | None = None,
        new_residual_m: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return decode_sum_encode(wire_rw, self.format, m, wire_w, residual_m, new_residual_m)


class TopK:
    """The largest share `density` of each row's values, exact, with their places."""

    granule = 32

    def __init__(self, density: float):
        self.density = density

    def entries(self, m: int) -> int:
        """Of a row of m values: at least one."""
        return min(m, max(1, math.ceil(self.density * m)))

    def wire_bytes(self, m: int) -> int:
        return ENTRY_BYTES * self.entries(m)

    def encode(
        self,
        x_rm: torch.Tensor,
        wire_rw: torch.Tensor,
        residual_rm: torch.Tensor | None = None,
        new_residual_rm: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return select_top(x_rm, wire_rw, residual_rm, new_residual_rm)

    def decode(self, wire_rw: torch.Tensor, out_rm: torch.Tensor) -> None:
        for wire_w, out_m in zip(wire_rw, out_rm, strict=True):
            scatter_sum(wire_w.unsqueeze(0), out_m)

    def decode_sum(self, wire_rw: torch.Tensor, out_m: torch.Tensor) -> None:
        scatter_sum(wire_rw, out_m)

    def decode_sum_encode(
        self,
        wire_rw: torch.Tensor,
        m: int,
        wire_w: torch.Tensor,
        residual_m: torch.Tensor | None = None,
        new_residual_m: torch.Tensor | None = None,
    ) -> torch.Tensor:
        sum_1m = torch.empty((1, m), device=wire_rw.device)
        scatter_sum(wire_rw, sum_1m[0])
        residuals = (None if x is None else x.unsqueeze(0) for x in (residual_m, new_residual_m))
        return select_top(sum_1m, wire_w.unsqueeze(0), *residuals)


def codec_of(options: CompressionOptions) -> Codec:
    """The codec that the options name. Raises ValueError for powersgd, which is no code of single values."""
    if options.name == "topk":
        return TopK(options.density)
    if options.name in _FORMATS:
        return BlockCodec(WireFormat(_FORMATS[options.name], options.block))
    raise ValueError(f"{options.name} has no codec")
