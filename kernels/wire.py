"""How gradients lie on the wire: formats of a few bits a value, in blocks that share a scale. Data, no op.

Lives here: the formats' layout, and the checks that every op on them shares. Imports torch only. Shapes: r rows (one
for each rank that a row goes to or comes from), m values of a row, b values of a block, w bytes of a row on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

FormatName = Literal["bf16", "int8", "fp8", "int4", "sign"]
_BITS: dict[str, int] = {"bf16": 16, "int8": 8, "fp8": 8, "int4": 4, "sign": 1}
_LEVELS: dict[str, float] = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}
_ALIGNMENT = 16
"""Bytes at which each section of a row starts, so that a GPU can load it 16 bytes at a time."""

TINY = 2.0**-100
"""A block whose largest value is below this counts as zero: the reciprocal of a smaller scale would overflow."""
WORD = 32
"""Values of the format "sign" that share one bit of the mask of zeros."""

STATISTICS = ("input_squares", "error_squares", "not_finite")
"""What an encoding op returns, fp64 [3]: Σ of squares of what was encoded (residual included), Σ of squares of what the
code doesn't carry of it, and how many of the raw values (without the residual) were Inf or NaN."""


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class WireFormat:
    """A row of m values as bytes: [scales fp32 of each block][mask of zeros][codes], each section padded to 16 bytes.

    name: "bf16" has neither scales nor mask. "int8": code q in -127..127, value q · scale, scale = amax / 127. "fp8":
    e4m3, scale = amax / 448. "int4": q in -7..7, scale = amax / 7; value i of a block's first half is the low nibble of
    byte i, value i of its second half the high one, in two's complement. "sign": bit i % 8 of byte i // 8 is 1 for a
    value below 0; a value is ±scale, the mean of absolutes over the words that aren't all zero; bit j % 8 of the mask's
    byte j // 8 is 1 where word j (32 values) has a value other than 0, else all of it decodes to 0.
    block: values that share a scale, a power of two from 32 to 4096; for "sign" at least 256. Rows hold whole blocks.
    """

    name: FormatName
    block: int = 256

    def __post_init__(self) -> None:
        if self.name not in _BITS:
            raise ValueError(f"wire format {self.name!r} is not known: choose among {', '.join(_BITS)}")
        least = 256 if self.name == "sign" else 32
        if not least <= self.block <= 4096 or self.block & (self.block - 1):
            raise ValueError(f"{self.name} block of {self.block} values: must be a power of two from {least} to 4096")

    @property
    def bits(self) -> int:
        return _BITS[self.name]

    @property
    def level(self) -> float:
        """The code of a block's largest absolute value; int8, fp8 and int4 only."""
        return _LEVELS[self.name]

    def sections(self, m: int) -> tuple[int, int, int]:
        """Bytes of scales, mask and codes in a row of m values, padding included."""
        if m % self.block:
            raise ValueError(f"{self.name}: a row of {m} values isn't made of whole blocks of {self.block}")
        scales = 0 if self.name == "bf16" else _aligned(m // self.block * 4)
        mask = _aligned(m // (8 * WORD)) if self.name == "sign" else 0
        return scales, mask, _aligned(m * self.bits // 8)

    def wire_bytes(self, m: int) -> int:
        """Bytes w of a row of m values."""
        return sum(self.sections(m))

    def split(self, wire_rw: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of a wire buffer, uint8 [r, w]: scales fp32 [r, m/b], mask uint8 [r, m/256], codes uint8 [r, m·bits/8].

        Scales are empty for bf16, the mask for all but sign.
        """
        scales, mask, codes = self.sections(m)
        if scales:
            scales_rn = wire_rw[:, : m // self.block * 4].view(torch.float32)
        else:  # not a view, which an empty row's stride may forbid
            scales_rn = wire_rw.new_empty((wire_rw.shape[0], 0), dtype=torch.float32)
        mask_rn = wire_rw[:, scales : scales + (m // (8 * WORD) if mask else 0)]
        codes_rn = wire_rw[:, scales + mask : scales + mask + m * self.bits // 8]
        return scales_rn, mask_rn, codes_rn


def statistics_of(x_rm: torch.Tensor, total_rm: torch.Tensor, error_rm: torch.Tensor) -> torch.Tensor:
    """`STATISTICS` of encoding x [+ residual] = total, of which the code leaves an error."""
    squares = [x.double().square().sum() for x in (total_rm, error_rm)]
    return torch.stack([*squares, (~x_rm.isfinite()).sum().double()])


def check_wire(op: str, wire_format: WireFormat, wire_rw: torch.Tensor, rows: int, m: int) -> None:
    """Raise TypeError or ValueError, naming the op, unless this is a contiguous wire, uint8 [rows, wire_bytes(m)]."""
    if wire_rw.dtype != torch.uint8:
        raise TypeError(f"{op}: the wire is {wire_rw.dtype}, it takes torch.uint8")
    try:
        expected = (rows, wire_format.wire_bytes(m))
    except ValueError as error:
        raise ValueError(f"{op}: {error}") from error
    if tuple(wire_rw.shape) != expected or not wire_rw.is_contiguous():
        raise ValueError(
            f"{op}: {rows} rows of {m} values in {wire_format.name} need a contiguous wire of {expected}, it is "
            f"{tuple(wire_rw.shape)}"
        )


def check_values(op: str, what: str, values: torch.Tensor | None, like: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise TypeError or ValueError, naming op and tensor, unless `values` is None or contiguous, of this shape, fp32
    (a residual may be bf16), on the device of `like`.
    """
    if values is None:
        return
    taken = (torch.float32, torch.bfloat16) if "residual" in what else (torch.float32,)
    if values.dtype not in taken:
        raise TypeError(f"{op}: {what} is {values.dtype}, it takes {' or '.join(map(str, taken))}")
    if tuple(values.shape) != shape or not values.is_contiguous():
        raise ValueError(f"{op}: {what} must be contiguous, {shape}, it is {tuple(values.shape)}")
    if values.device != like.device:
        raise ValueError(f"{op}: {what} is on {values.device}, the wire on {like.device}: it takes one device")


def check_encode(
    op: str,
    wire_format: WireFormat,
    x_rm: torch.Tensor,
    wire_rw: torch.Tensor,
    residual_rm: torch.Tensor | None,
    new_residual_rm: torch.Tensor | None,
) -> None:
    """All of an encoding op's tensors, as `check_wire` and `check_values` do."""
    if x_rm.ndim != 2:
        raise ValueError(f"{op}: values must have 2 dimensions, rows and values, not {tuple(x_rm.shape)}")
    rows, m = x_rm.shape
    check_wire(op, wire_format, wire_rw, rows, m)
    for what, values in (("x", x_rm), ("residual", residual_rm), ("new residual", new_residual_rm)):
        check_values(op, what, values, wire_rw, (rows, m))


def check_decode(op: str, wire_format: WireFormat, wire_rw: torch.Tensor, out_rm: torch.Tensor) -> None:
    """Both of a decoding op's tensors."""
    if out_rm.ndim != 2:
        raise ValueError(f"{op}: the output must have 2 dimensions, rows and values, not {tuple(out_rm.shape)}")
    check_wire(op, wire_format, wire_rw, *out_rm.shape)
    check_values(op, "out", out_rm, wire_rw, tuple(out_rm.shape))
