"""Encoding a bucket's values and decoding them, as Triton kernels: each reads and writes its values once.

Lives here: `quantize` and `dequantize` on a GPU, and the two kernels for every wire format. Imports torch, triton and
`kernels`. Same results as `kernels.quantize`, bit for bit. Shapes: see `wire`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton_ops.launch import Launch, as_integers
from kernels.triton_ops.tile import decode_tile, encode_tile, load_values, places, store_statistics, store_values
from kernels.wire import WireFormat

_TILE = 4096
"""Values of a program: the largest block. Where it decodes, 32 a thread, so that codes of 4 bits also load 16 bytes at
a time; where it encodes, 16: with 32, ptxas spilled a few registers of int4's."""
_SIGN_TILE = 8192
"""Of a program that decodes signs: 128 a thread of 2 warps, again 16 bytes."""


@triton.jit(do_not_specialize=["blocks", "row_units", "mask_unit", "codes_unit"])
def encode_kernel(
    x_rm,
    residual_rm,
    new_residual_rm,
    wire_rw,
    partials,
    blocks,
    row_units,
    mask_unit,
    codes_unit,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """A program: up to BLOCKS blocks of a row."""
    tiles = tl.cdiv(blocks, BLOCKS)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles).to(tl.int64) * BLOCKS
    start = (row * blocks + first) * BLOCK
    value_tpv = places(FORMAT, BLOCK, BLOCKS)
    in_row_tpv = (first + tl.arange(0, BLOCKS) < blocks)[:, None, None]

    raw_tpv = load_values(x_rm + start + value_tpv, in_row_tpv)
    total_tpv = raw_tpv
    if residual_rm is not None:
        total_tpv = raw_tpv + load_values(residual_rm + start + value_tpv, in_row_tpv)
    row_wire = wire_rw + row * row_units * 16
    decoded_tpv = encode_tile(total_tpv, row_wire, first, blocks, mask_unit, codes_unit, FORMAT, BLOCK, BLOCKS)
    error_tpv = total_tpv - decoded_tpv
    if new_residual_rm is not None:
        store_values(new_residual_rm + start + value_tpv, error_tpv, in_row_tpv)
    store_statistics(partials, total_tpv, error_tpv, raw_tpv)


@triton.jit(do_not_specialize=["blocks", "row_units", "mask_unit", "codes_unit"])
def decode_kernel(
    wire_rw,
    out_rm,
    blocks,
    row_units,
    mask_unit,
    codes_unit,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """A program: up to BLOCKS blocks of a row."""
    tiles = tl.cdiv(blocks, BLOCKS)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles).to(tl.int64) * BLOCKS
    row_wire = wire_rw + row * row_units * 16
    decoded_tpv = decode_tile(row_wire, first, blocks, mask_unit, codes_unit, FORMAT, BLOCK, BLOCKS)
    in_row_tpv = (first + tl.arange(0, BLOCKS) < blocks)[:, None, None]
    tl.store(
        out_rm + (row * blocks + first) * BLOCK + places(FORMAT, BLOCK, BLOCKS),
        decoded_tpv,
        mask=in_row_tpv,
    )


def layout(wire_format: WireFormat, m: int) -> tuple[int, int, int, int]:
    """Blocks of a row, and in units of 16 bytes: length of its wire, start of its mask and of its codes."""
    scales, mask, codes = (size // 16 for size in wire_format.sections(m))
    return m // wire_format.block, scales + mask + codes, scales, scales + mask


def tiling(wire_format: WireFormat, values: int = _TILE) -> dict[str, Any]:
    """Constants of a kernel whose programs take `values` values of a row."""
    return {"FORMAT": wire_format.name, "BLOCK": wire_format.block, "BLOCKS": values // wire_format.block}


def encode(
    x_rm: torch.Tensor,
    wire_format: WireFormat,
    wire_rw: torch.Tensor,
    residual_rm: torch.Tensor | None = None,
    new_residual_rm: torch.Tensor | None = None,
) -> tuple[Launch, torch.Tensor]:
    """The launch that encodes, and its programs' statistics, fp64 [3, programs]."""
    rows, m = x_rm.shape
    constants = tiling(wire_format)
    sizes = layout(wire_format, m)
    programs = rows * triton.cdiv(sizes[0], constants["BLOCKS"])
    partials = torch.empty(3, programs, dtype=torch.float64, device=x_rm.device)
    residuals = (as_integers(residual_rm), as_integers(new_residual_rm))
    return Launch(
        encode_kernel, programs, (x_rm, *residuals, wire_rw, partials, *sizes), constants, num_warps=8
    ), partials


def decode(wire_rw: torch.Tensor, wire_format: WireFormat, out_rm: torch.Tensor) -> Launch:
    """The launch that decodes."""
    values, warps = (_SIGN_TILE, 2) if wire_format.name == "sign" else (_TILE, 4)
    constants = tiling(wire_format, values)
    sizes = layout(wire_format, out_rm.shape[1])
    programs = out_rm.shape[0] * triton.cdiv(sizes[0], constants["BLOCKS"])
    return Launch(decode_kernel, programs, (wire_rw, out_rm, *sizes), constants, warps)


def quantize(
    x_rm: torch.Tensor,
    wire_format: WireFormat,
    wire_rw: torch.Tensor,
    residual_rm: torch.Tensor | None = None,
    new_residual_rm: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `kernels.quantize.quantize`; any format."""
    launch, partials = encode(x_rm, wire_format, wire_rw, residual_rm, new_residual_rm)
    launch.run()
    return partials.sum(1)


def dequantize(wire_rw: torch.Tensor, wire_format: WireFormat, out_rm: torch.Tensor) -> torch.Tensor:
    """As `kernels.quantize.dequantize`; any format."""
    decode(wire_rw, wire_format, out_rm).run()
    return out_rm
