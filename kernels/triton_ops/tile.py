"""What the kernels do with one tile of values: load, store, encode and decode it, and its statistics.

Lives here: device functions only. Imports triton and `kernels`. Casts to bf16 and fp8 are integer arithmetic: Triton's
interpreter truncates them, and sm_80 has no e4m3. Shapes: t blocks of a tile, p parts of a block, v values of a part;
the parts are two halves, for "sign" words of 32 values. A "unit" is 16 bytes: row starts and sections count in units,
so the compiler sees that they are aligned.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels import wire

TINY = tl.constexpr(wire.TINY)
WORD = tl.constexpr(wire.WORD)
ROUND = tl.constexpr(1.5 * 2.0**23)
"""Added to |x| < 2^22, it rounds to the nearest integer, ties to even, and leaves that in the sum's lowest bits."""
FP8_REBIAS = tl.constexpr((127 - 7) << 3)


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def with_sign(x, negative):
    """-x where `negative` is 1, else x, of x not below 0. By its bit: Triton's -x is 0 - x, which makes no -0."""
    return (bits_of(x) | (negative << 31)).to(tl.float32, bitcast=True)


@triton.jit
def not_finite(x):
    """1 where Inf or NaN, else 0."""
    return ((bits_of(x) & 0x7F800000) == 0x7F800000).to(tl.int32)


@triton.jit
def bf16_bits(x):
    """bf16 of fp32, rounded to nearest, ties to even; NaN stays NaN. int16."""
    bits = bits_of(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def fp32_of_bf16(bits):
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def fp8_codes(x):
    """e4m3 of fp32 up to 448 in size, as the reference does it. int32."""
    bits = bits_of(x)
    absolute = bits & 0x7FFFFFFF
    normal = ((absolute + 0x7FFFF + ((absolute >> 20) & 1)) >> 20) - FP8_REBIAS
    subnormal = bits_of(tl.abs(x) * 512.0 + ROUND) & 0xFF
    return tl.where(tl.abs(x) < 0.015625, subnormal, normal) | ((bits >> 24) & 0x80)


@triton.jit
def fp8_values(code):
    """fp32 of e4m3 codes, int32."""
    low = code & 0x7F
    normal = ((low + FP8_REBIAS) << 20).to(tl.float32, bitcast=True)
    return with_sign(tl.where(low >= 8, normal, low.to(tl.float32) * 0.001953125), code >> 7)


@triton.jit
def load_values(pointers, mask):
    """fp32 of a tensor in fp32, or in bf16 that was handed over as int16."""
    values = tl.load(pointers, mask=mask, other=0)
    if values.dtype == tl.int16:
        values = fp32_of_bf16(values)
    return values


@triton.jit
def store_values(pointers, values, mask):
    if pointers.dtype.element_ty == tl.int16:
        tl.store(pointers, bf16_bits(values), mask=mask)
    else:
        tl.store(pointers, values, mask=mask)


@triton.jit
def places(FORMAT: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Where a tile's values lie from its first one on: int32 [t, p, v]."""
    PARTS: tl.constexpr = BLOCK // WORD if FORMAT == "sign" else 2
    LENGTH: tl.constexpr = BLOCK // PARTS
    block_t = tl.arange(0, BLOCKS)[:, None, None] * BLOCK
    return block_t + tl.arange(0, PARTS)[None, :, None] * LENGTH + tl.arange(0, LENGTH)[None, None, :]


@triton.jit
def block_scale(amax, LEVEL: tl.constexpr):
    """A block's scale and its reciprocal, both 0 for a block of zeros."""
    tiny = amax < TINY
    scale = tl.where(tiny, 0.0, amax * (1 / LEVEL))
    return scale, tl.where(tiny, 0.0, tl.div_rn(1.0, tl.where(tiny, 1.0, scale)))


@triton.jit
def encode_tile(
    total_tpv,
    row_wire,
    first,
    blocks,
    mask_unit,
    codes_unit,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Store the codes of a tile that begins with block `first` of a row of `blocks`; return what they decode to.

    Needs no clamp: a finite block's largest value becomes the format's level, give or take 3 roundings.
    """
    HALF: tl.constexpr = BLOCK // 2
    in_row_t = first + tl.arange(0, BLOCKS) < blocks
    in_row_tpv = in_row_t[:, None, None]
    codes = row_wire + codes_unit.to(tl.int64) * 16
    value_tpv = places(FORMAT, BLOCK, BLOCKS)
    if FORMAT == "bf16":
        code_tpv = bf16_bits(total_tpv)
        tl.store(codes.to(tl.pointer_type(tl.int16)) + first * BLOCK + value_tpv, code_tpv, mask=in_row_tpv)
        decoded_tpv = fp32_of_bf16(code_tpv)
    elif FORMAT == "sign":
        scale_t, some_tp = _encode_signs(
            total_tpv, row_wire + mask_unit.to(tl.int64) * 16, codes, first, in_row_t, BLOCK, BLOCKS
        )
        _store_scales(row_wire, first, scale_t, in_row_t, BLOCKS)
        signed_tpv = with_sign(scale_t[:, None, None], (total_tpv < 0).to(tl.int32))
        decoded_tpv = tl.where(some_tp[:, :, None] != 0, signed_tpv, 0.0)
    else:
        LEVEL: tl.constexpr = 127.0 if FORMAT == "int8" else (448.0 if FORMAT == "fp8" else 7.0)
        scale_t, inverse_t = block_scale(tl.max(tl.max(tl.abs(total_tpv), axis=2), axis=1), LEVEL)
        scaled_tpv = total_tpv * inverse_t[:, None, None]
        if FORMAT == "fp8":
            code_tpv = fp8_codes(scaled_tpv)
            decoded_tpv = fp8_values(code_tpv) * scale_t[:, None, None]
        else:
            raised_tpv = scaled_tpv + ROUND
            code_tpv = bits_of(raised_tpv)
            decoded_tpv = (raised_tpv - ROUND) * scale_t[:, None, None]
        if FORMAT == "int4":
            shift_p = tl.arange(0, 2)[None, :, None] * 4
            code_tv = tl.sum((code_tpv & 0xF) << shift_p, axis=1)
            byte_tv = tl.arange(0, BLOCKS)[:, None] * HALF + tl.arange(0, HALF)[None, :]
            tl.store(codes + first * HALF + byte_tv, code_tv.to(tl.uint8), mask=in_row_t[:, None])
        else:
            tl.store(codes + first * BLOCK + value_tpv, (code_tpv & 0xFF).to(tl.uint8), mask=in_row_tpv)
        _store_scales(row_wire, first, scale_t, in_row_t, BLOCKS)
    return decoded_tpv


@triton.jit
def _store_scales(row_wire, first, scale_t, in_row_t, BLOCKS: tl.constexpr):
    tl.store(row_wire.to(tl.pointer_type(tl.float32)) + first + tl.arange(0, BLOCKS), scale_t, mask=in_row_t)


@triton.jit
def _encode_signs(total_tpv, mask, codes, first, in_row_t, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Store mask of zeros and signs of a tile. Returns the scales [t], and [t, p] 1 where a word isn't all zero."""
    WORDS: tl.constexpr = BLOCK // WORD
    BYTES: tl.constexpr = WORDS // 8
    some_tp = tl.max((total_tpv != 0).to(tl.int32), axis=2)
    values_t = tl.sum(some_tp, axis=1) * WORD
    sum_t = tl.sum(tl.sum(tl.abs(total_tpv), axis=2), axis=1)
    mean_t = tl.div_rn(sum_t, tl.maximum(values_t, 1).to(tl.float32))
    scale_t = tl.where(mean_t < TINY, 0.0, mean_t)
    word_tp = tl.sum((total_tpv < 0).to(tl.int32) << tl.arange(0, WORD)[None, None, :], axis=2)
    place_tp = tl.arange(0, BLOCKS)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    tl.store(codes.to(tl.pointer_type(tl.int32)) + first * WORDS + place_tp, word_tp, mask=in_row_t[:, None])
    byte_tb = tl.sum(tl.reshape(some_tp, [BLOCKS, BYTES, 8]) << tl.arange(0, 8)[None, None, :], axis=2)
    place_tb = tl.arange(0, BLOCKS)[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    tl.store(mask + first * BYTES + place_tb, byte_tb.to(tl.uint8), mask=in_row_t[:, None])
    return scale_t, some_tp


@triton.jit
def signed_values(word_tp, scale_tp):
    """fp32 [t, p, v]: the scale of each word with each of its bits as the sign."""
    negative_tpv = (word_tp[:, :, None] >> tl.arange(0, WORD)[None, None, :]) & 1
    return with_sign(scale_tp[:, :, None], negative_tpv)


@triton.jit
def decode_tile(
    row_wire,
    first,
    blocks,
    mask_unit,
    codes_unit,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Values of the tile that begins with block `first` of a row of `blocks`: fp32 [t, p, v], 0 beyond the row."""
    HALF: tl.constexpr = BLOCK // 2
    WORDS: tl.constexpr = BLOCK // WORD
    tile_t = tl.arange(0, BLOCKS)
    in_row_t = first + tile_t < blocks
    in_row_tpv = in_row_t[:, None, None]
    codes = row_wire + codes_unit.to(tl.int64) * 16
    value_tpv = places(FORMAT, BLOCK, BLOCKS)
    if FORMAT == "bf16":
        pointers = codes.to(tl.pointer_type(tl.int16)) + first * BLOCK + value_tpv
        decoded_tpv = load_values(pointers, in_row_tpv)
    else:
        scales = row_wire.to(tl.pointer_type(tl.float32)) + first + tile_t
        scale_t = tl.load(scales, mask=in_row_t, other=0.0)
        scale_tpv = scale_t[:, None, None]
        if FORMAT == "sign":
            words = codes.to(tl.pointer_type(tl.int32)) + first * WORDS
            word_tp = tl.load(
                words + tile_t[:, None] * WORDS + tl.arange(0, WORDS)[None, :], mask=in_row_t[:, None], other=0
            )
            place_tp = tile_t[:, None] * (WORDS // 8) + tl.arange(0, WORDS)[None, :] // 8
            mask = row_wire + mask_unit.to(tl.int64) * 16 + first * (WORDS // 8)
            byte_tp = tl.load(mask + place_tp, mask=in_row_t[:, None], other=0).to(tl.int32)
            some_tp = ((byte_tp >> (tl.arange(0, WORDS)[None, :] % 8)) & 1) != 0
            decoded_tpv = signed_values(tl.where(some_tp, word_tp, 0), tl.where(some_tp, scale_t[:, None], 0.0))
        elif FORMAT == "int4":
            byte_tv = tile_t[:, None] * HALF + tl.arange(0, HALF)[None, :]
            code_tv = tl.load(codes + first * HALF + byte_tv, mask=in_row_t[:, None], other=0).to(tl.int32)
            nibble_tpv = (code_tv[:, None, :] >> (tl.arange(0, 2)[None, :, None] * 4)) & 0xF
            decoded_tpv = ((nibble_tpv ^ 8) - 8).to(tl.float32) * scale_tpv
        else:
            code_tpv = tl.load(codes + first * BLOCK + value_tpv, mask=in_row_tpv, other=0)
            if FORMAT == "int8":
                decoded_tpv = code_tpv.to(tl.int8, bitcast=True).to(tl.float32) * scale_tpv
            else:
                decoded_tpv = fp8_values(code_tpv.to(tl.int32)) * scale_tpv
    return decoded_tpv


@triton.jit
def sum_of_squares(x):
    """fp64: squares of gradients leave fp32's range."""
    wide = x.to(tl.float64)
    return tl.sum(wide * wide)


@triton.jit
def store_statistics(partials, total, error, raw):
    """This program's part of `wire.STATISTICS` into fp64 [3, programs]."""
    part = partials + tl.program_id(0)
    programs = tl.num_programs(0)
    tl.store(part, sum_of_squares(total))
    tl.store(part + programs, sum_of_squares(error))
    tl.store(part + 2 * programs, tl.sum(not_finite(raw)).to(tl.float64))
