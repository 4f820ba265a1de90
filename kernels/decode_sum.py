"""Decode the rows that several ranks sent, sum them in fp32 in rank order, and encode the sum again: one pass.

Lives here: one op, with and without the second encoding. Imports torch and `kernels` only. The middle of a two-shot
quantised all-reduce (ZeRO++, 2306.10209). Shapes: see `wire`; row i came from rank i.
"""

from __future__ import annotations

import torch

from kernels import backend
from kernels.quantize import dequantize_reference, quantize_reference
from kernels.sign_pack import sign_pack_reference, sign_unpack_reference
from kernels.wire import WireFormat, check_values, check_wire


def decode_sum_reference(wire_rw: torch.Tensor, wire_format: WireFormat, out_m: torch.Tensor) -> torch.Tensor:
    """The same as `decode_sum`, a row at a time."""
    decode = sign_unpack_reference if wire_format.name == "sign" else dequantize_reference
    row_1m = torch.empty_like(out_m).unsqueeze(0)
    out_m.zero_()
    for wire_w in wire_rw:
        out_m += decode(wire_w.unsqueeze(0), wire_format, row_1m).squeeze(0)
    return out_m


def decode_sum_encode_reference(
    wire_rw: torch.Tensor,
    wire_format: WireFormat,
    m: int,
    wire_w: torch.Tensor,
    residual_m: torch.Tensor | None = None,
    new_residual_m: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same as `decode_sum_encode`."""
    sum_m = torch.empty(m, device=wire_rw.device)
    decode_sum_reference(wire_rw, wire_format, sum_m)
    encode = sign_pack_reference if wire_format.name == "sign" else quantize_reference
    rows = (None if x is None else x.unsqueeze(0) for x in (residual_m, new_residual_m))
    return encode(sum_m.unsqueeze(0), wire_format, wire_w.unsqueeze(0), *rows)


def decode_sum(wire_rw: torch.Tensor, wire_format: WireFormat, out_m: torch.Tensor) -> torch.Tensor:
    """out = Σ over rows, from row 0 on, of their decoded values, summed in fp32 from 0: uint8 [r, w] -> fp32 [m]."""
    (m,) = out_m.shape
    check_wire("decode_sum", wire_format, wire_rw, wire_rw.shape[0], m)
    check_values("decode_sum", "out", out_m, wire_rw, (m,))
    run = backend.pick("decode_sum", wire_rw.device.type) or decode_sum_reference
    return run(wire_rw, wire_format, out_m)


def decode_sum_encode(
    wire_rw: torch.Tensor,
    wire_format: WireFormat,
    m: int,
    wire_w: torch.Tensor,
    residual_m: torch.Tensor | None = None,
    new_residual_m: torch.Tensor | None = None,
) -> torch.Tensor:
    """Encode the sum of the rows [+ residual] into `wire_w`, uint8 [w]; `STATISTICS` of this second encoding, fp64 [3].

    residual, new_residual: fp32 or bf16 [m], may be the same tensor: error feedback on the second shot. The sum is
    `decode_sum`'s, bit for bit; it needn't touch memory.
    """
    check_wire("decode_sum_encode", wire_format, wire_rw, wire_rw.shape[0], m)
    check_wire("decode_sum_encode", wire_format, wire_w.unsqueeze(0), 1, m)
    for what, residual in (("residual", residual_m), ("new residual", new_residual_m)):
        check_values("decode_sum_encode", what, residual, wire_rw, (m,))
    run = backend.pick("decode_sum_encode", wire_rw.device.type) or decode_sum_encode_reference
    return run(wire_rw, wire_format, m, wire_w, residual_m, new_residual_m)
