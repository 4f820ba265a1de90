"""Decode several ranks' rows, sum them in rank order, and encode the sum: one Triton kernel, nothing kept in memory.

Lives here: `decode_sum` and `decode_sum_encode` on a GPU. Imports torch, triton and `kernels`. Same results as
`kernels.decode_sum`, bit for bit. Shapes: see `wire`; row i came from rank i.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_ops.launch import Launch, as_integers
from kernels.triton_ops.quantize import layout, tiling
from kernels.triton_ops.tile import (
    WORD,
    decode_tile,
    encode_tile,
    load_values,
    places,
    signed_values,
    store_statistics,
    store_values,
)
from kernels.wire import WireFormat


@triton.jit
def sum_tiles(
    wire_rw,
    rows,
    first,
    blocks,
    row_units,
    mask_unit,
    codes_unit,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Σ of the rows' values of one tile, from row 0 on: fp32 [t, p, v]."""
    row = tl.zeros([], tl.int64)
    sum_tpv = places(FORMAT, BLOCK, BLOCKS).to(tl.float32) * 0.0
    while row < rows:  # Triton's interpreter can't take a number at run time as the end of a range.
        if FORMAT == "sign":
            # Four rows at a time: the words of one are fewer than 4 a thread, and a load would have 4 bytes.
            word_tpq, scale_tpq = load_signs(
                wire_rw, row, rows, first, blocks, row_units, mask_unit, codes_unit, BLOCK, BLOCKS
            )
            word0_tp, word1_tp, word2_tp, word3_tp = four(word_tpq)
            scale0_tp, scale1_tp, scale2_tp, scale3_tp = four(scale_tpq)
            sum_tpv += signed_values(word0_tp, scale0_tp)
            sum_tpv += signed_values(word1_tp, scale1_tp)
            sum_tpv += signed_values(word2_tp, scale2_tp)
            sum_tpv += signed_values(word3_tp, scale3_tp)
            row += 4
        else:
            row_wire = wire_rw + row * row_units * 16
            sum_tpv += decode_tile(row_wire, first, blocks, mask_unit, codes_unit, FORMAT, BLOCK, BLOCKS)
            row += 1
    return sum_tpv


@triton.jit
def load_signs(
    wire_rw, row, rows, first, blocks, row_units, mask_unit, codes_unit, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """Words of signs, and the scale of each or 0, of four rows from `row` on: int32 and fp32 [t, p, 4]. A row that
    isn't there adds 0, which changes no sum: one that begins with 0 is never -0.
    """
    WORDS: tl.constexpr = BLOCK // WORD
    row_q = (row + tl.arange(0, 4))[:, None, None]
    block_t = tl.arange(0, BLOCKS)[None, :, None]
    word_p = tl.arange(0, WORDS)[None, None, :]
    there_qt = (row_q < rows) & (first + block_t < blocks)
    codes = (wire_rw + codes_unit.to(tl.int64) * 16).to(tl.pointer_type(tl.int32)) + first * WORDS
    word_qtp = tl.load(codes + row_q * row_units * 4 + block_t * WORDS + word_p, mask=there_qt, other=0)
    scales = wire_rw.to(tl.pointer_type(tl.float32)) + first
    scale_qt = tl.load(scales + row_q * row_units * 4 + block_t, mask=there_qt, other=0.0)
    mask = wire_rw + mask_unit.to(tl.int64) * 16 + first * (WORDS // 8)
    byte_qtp = tl.load(mask + row_q * row_units * 16 + block_t * (WORDS // 8) + word_p // 8, mask=there_qt, other=0)
    some_qtp = ((byte_qtp.to(tl.int32) >> (word_p % 8)) & 1) != 0
    scale_qtp = tl.where(some_qtp, scale_qt, 0.0)
    return tl.permute(word_qtp, [1, 2, 0]), tl.permute(scale_qtp, [1, 2, 0])


@triton.jit
def four(x_tpq):
    """The four slices of the last dimension."""
    even, odd = tl.split(tl.reshape(x_tpq, [x_tpq.shape[0], x_tpq.shape[1], 2, 2]))
    x0_tp, x2_tp = tl.split(even)
    x1_tp, x3_tp = tl.split(odd)
    return x0_tp, x1_tp, x2_tp, x3_tp


@triton.jit(do_not_specialize=["rows", "blocks", "row_units", "mask_unit", "codes_unit"])
def decode_sum_kernel(
    wire_rw,
    out_m,
    rows,
    blocks,
    row_units,
    mask_unit,
    codes_unit,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """A program: up to BLOCKS blocks of all rows."""
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    sum_tpv = sum_tiles(wire_rw, rows, first, blocks, row_units, mask_unit, codes_unit, FORMAT, BLOCK, BLOCKS)
    in_row_tpv = (first + tl.arange(0, BLOCKS) < blocks)[:, None, None]
    tl.store(out_m + first * BLOCK + places(FORMAT, BLOCK, BLOCKS), sum_tpv, mask=in_row_tpv)


@triton.jit(do_not_specialize=["rows", "blocks", "row_units", "mask_unit", "codes_unit"])
def decode_sum_encode_kernel(
    wire_rw,
    residual_m,
    new_residual_m,
    wire_w,
    partials,
    rows,
    blocks,
    row_units,
    mask_unit,
    codes_unit,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """A program: up to BLOCKS blocks of all rows, and of the sum."""
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    sum_tpv = sum_tiles(wire_rw, rows, first, blocks, row_units, mask_unit, codes_unit, FORMAT, BLOCK, BLOCKS)
    place_tpv = places(FORMAT, BLOCK, BLOCKS)
    in_row_tpv = (first + tl.arange(0, BLOCKS) < blocks)[:, None, None]
    total_tpv = sum_tpv
    if residual_m is not None:
        total_tpv = sum_tpv + load_values(residual_m + first * BLOCK + place_tpv, in_row_tpv)
    decoded_tpv = encode_tile(total_tpv, wire_w, first, blocks, mask_unit, codes_unit, FORMAT, BLOCK, BLOCKS)
    error_tpv = total_tpv - decoded_tpv
    if new_residual_m is not None:
        store_values(new_residual_m + first * BLOCK + place_tpv, error_tpv, in_row_tpv)
    store_statistics(partials, total_tpv, error_tpv, sum_tpv)


def sum_rows(wire_rw: torch.Tensor, wire_format: WireFormat, out_m: torch.Tensor) -> Launch:
    """The launch of `decode_sum`."""
    constants = tiling(wire_format)
    sizes = layout(wire_format, out_m.numel())
    programs = triton.cdiv(sizes[0], constants["BLOCKS"])
    return Launch(decode_sum_kernel, programs, (wire_rw, out_m, wire_rw.shape[0], *sizes), constants)


def sum_rows_encode(
    wire_rw: torch.Tensor,
    wire_format: WireFormat,
    m: int,
    wire_w: torch.Tensor,
    residual_m: torch.Tensor | None = None,
    new_residual_m: torch.Tensor | None = None,
) -> tuple[Launch, torch.Tensor]:
    """The launch of `decode_sum_encode`, and its programs' statistics, fp64 [3, programs]."""
    constants = tiling(wire_format)
    sizes = layout(wire_format, m)
    programs = triton.cdiv(sizes[0], constants["BLOCKS"])
    partials = torch.empty(3, programs, dtype=torch.float64, device=wire_rw.device)
    residuals = (as_integers(residual_m), as_integers(new_residual_m))
    arguments = (wire_rw, *residuals, wire_w, partials, wire_rw.shape[0], *sizes)
    return Launch(decode_sum_encode_kernel, programs, arguments, constants), partials


def decode_sum(wire_rw: torch.Tensor, wire_format: WireFormat, out_m: torch.Tensor) -> torch.Tensor:
    """As `kernels.decode_sum.decode_sum`."""
    sum_rows(wire_rw, wire_format, out_m).run()
    return out_m


def decode_sum_encode(
    wire_rw: torch.Tensor,
    wire_format: WireFormat,
    m: int,
    wire_w: torch.Tensor,
    residual_m: torch.Tensor | None = None,
    new_residual_m: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `kernels.decode_sum.decode_sum_encode`."""
    launch, partials = sum_rows_encode(wire_rw, wire_format, m, wire_w, residual_m, new_residual_m)
    launch.run()
    return partials.sum(1)
