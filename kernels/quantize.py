"""Block quantisation to bf16, int8, fp8 (e4m3) or int4 and back, with the update of error feedback in the same pass.

Lives here: one op and its inverse. Imports torch and `kernels` only. Blocks with a scale each as in ZeRO++
(2306.10209); error feedback as in EF-SGD (1901.09847). Shapes: see `wire`; n blocks.
"""

from __future__ import annotations

import torch

from kernels import backend
from kernels.wire import TINY, WireFormat, check_decode, check_encode, statistics_of

_FP8_SUBNORMAL = 2.0**-6
"""Absolutes below this are multiples of 2^-9 in e4m3."""
_FP8_REBIAS = (127 - 7) << 3


def fp8_codes(x: torch.Tensor) -> torch.Tensor:
    """e4m3 of fp32 values up to 448 in size, rounded to nearest, ties to even: uint8. By integers, so that every
    implementation gives the same bits (Triton's interpreter truncates casts, and sm_80 has none).
    """
    bits = x.view(torch.int32)
    absolute = bits & 0x7FFFFFFF
    normal = ((absolute + 0x7FFFF + ((absolute >> 20) & 1)) >> 20) - _FP8_REBIAS
    subnormal = (x.abs() * 512.0).round().to(torch.int32)
    code = torch.where(x.abs() < _FP8_SUBNORMAL, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(torch.uint8)


def fp8_values(codes: torch.Tensor) -> torch.Tensor:
    """fp32 of e4m3 codes."""
    code = codes.to(torch.int32)
    low = code & 0x7F
    normal = ((low + _FP8_REBIAS) << 20).view(torch.float32)
    value = torch.where(low >= 8, normal, low.float() / 512.0)
    return torch.where(code >= 0x80, -value, value)


def quantize_reference(
    x_rm: torch.Tensor,
    wire_format: WireFormat,
    wire_rw: torch.Tensor,
    residual_rm: torch.Tensor | None = None,
    new_residual_rm: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same as `quantize`, a step at a time."""
    total_rm = x_rm if residual_rm is None else x_rm + residual_rm.float()
    scales_rn, _, codes = wire_format.split(wire_rw, x_rm.shape[1])
    if wire_format.name == "bf16":
        codes.copy_(total_rm.bfloat16().view(torch.uint8))
    else:
        blocks_rnb = total_rm.unflatten(1, (-1, wire_format.block))
        amax_rn = blocks_rnb.abs().amax(-1)
        scale_rn = torch.where(amax_rn < TINY, 0.0, amax_rn * (1 / wire_format.level))
        inverse_rn = torch.where(amax_rn < TINY, 0.0, 1.0 / scale_rn)
        level = wire_format.level
        scaled_rnb = (blocks_rnb * inverse_rn.unsqueeze(-1)).clamp(-level, level)
        scales_rn.copy_(scale_rn)
        codes.copy_(_codes(wire_format, scaled_rnb).flatten(1))
    error_rm = total_rm - dequantize_reference(wire_rw, wire_format, torch.empty_like(total_rm))
    if new_residual_rm is not None:
        new_residual_rm.copy_(error_rm)
    return statistics_of(x_rm, total_rm, error_rm)


def _codes(wire_format: WireFormat, scaled_rnb: torch.Tensor) -> torch.Tensor:
    """uint8 [r, n, bytes of a block]."""
    if wire_format.name == "fp8":
        return fp8_codes(scaled_rnb)
    q_rnb = scaled_rnb.nan_to_num().round().to(torch.int8).view(torch.uint8)
    if wire_format.name == "int8":
        return q_rnb
    low, high = q_rnb.chunk(2, dim=-1)
    return (low & 0xF) | (high << 4)


def dequantize_reference(wire_rw: torch.Tensor, wire_format: WireFormat, out_rm: torch.Tensor) -> torch.Tensor:
    """The same as `dequantize`."""
    scales_rn, _, codes = wire_format.split(wire_rw, out_rm.shape[1])
    if wire_format.name == "bf16":
        return out_rm.copy_(codes.view(torch.bfloat16))
    q = codes.unflatten(1, (scales_rn.shape[1], -1))
    if wire_format.name == "fp8":
        value = fp8_values(q)
    elif wire_format.name == "int8":
        value = q.view(torch.int8).float()
    else:
        nibbles = torch.cat([q & 0xF, q >> 4], dim=-1).to(torch.int8)
        value = ((nibbles ^ 8) - 8).float()
    return out_rm.copy_((value * scales_rn.unsqueeze(-1)).flatten(1))


def quantize(
    x_rm: torch.Tensor,
    wire_format: WireFormat,
    wire_rw: torch.Tensor,
    residual_rm: torch.Tensor | None = None,
    new_residual_rm: torch.Tensor | None = None,
) -> torch.Tensor:
    """Encode x + residual into the wire; what the code doesn't carry of it into the new residual. `STATISTICS` of it.

    x: fp32 [r, m], unchanged; wire: uint8 [r, w], overwritten; residual, new_residual: fp32 or bf16 [r, m], which may
    be the same tensor. Formats bf16, int8, fp8, int4. Values that aren't finite are counted and spoil their block only.
    Rounds to nearest, ties to even. Returns fp64 [3]. Raises TypeError and ValueError, naming what is wrong.
    """
    check_encode("quantize", wire_format, x_rm, wire_rw, residual_rm, new_residual_rm)
    if wire_format.name == "sign":
        raise ValueError("quantize: the format sign is sign_pack's")
    run = backend.pick("quantize", x_rm.device.type) or quantize_reference
    return run(x_rm, wire_format, wire_rw, residual_rm, new_residual_rm)


def dequantize(wire_rw: torch.Tensor, wire_format: WireFormat, out_rm: torch.Tensor) -> torch.Tensor:
    """Decode the wire, uint8 [r, w], into `out`, fp32 [r, m], and return it. Formats bf16, int8, fp8, int4."""
    check_decode("dequantize", wire_format, wire_rw, out_rm)
    if wire_format.name == "sign":
        raise ValueError("dequantize: the format sign is sign_unpack's")
    run = backend.pick("dequantize", out_rm.device.type) or dequantize_reference
    return run(wire_rw, wire_format, out_rm)
