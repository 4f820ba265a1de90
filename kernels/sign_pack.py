"""Signs with a scale for each block, one bit a value, and back, with the update of error feedback in the same pass.

Lives here: one op and its inverse. Imports torch and `kernels` only. After 1-bit SGD and 1-bit Adam (2102.02888), with
a mask of zeros: a sign has no zero, and rows that get no gradient must not drift. Shapes: see `wire`.
"""

from __future__ import annotations

import torch

from kernels import backend
from kernels.wire import TINY, WORD, WireFormat, check_decode, check_encode, statistics_of


def _pack(bits: torch.Tensor) -> torch.Tensor:
    """bool [..., 8k] as uint8 [..., k]: value i is bit i % 8."""
    weights = 1 << torch.arange(8, device=bits.device, dtype=torch.uint8)
    return (bits.unflatten(-1, (-1, 8)) * weights).sum(-1, dtype=torch.uint8)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., k] as bool [..., 8k]."""
    shifts = torch.arange(8, device=packed.device, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts) & 1).bool().flatten(-2)


def sign_pack_reference(
    x_rm: torch.Tensor,
    wire_format: WireFormat,
    wire_rw: torch.Tensor,
    residual_rm: torch.Tensor | None = None,
    new_residual_rm: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same as `sign_pack`, a step at a time."""
    total_rm = x_rm if residual_rm is None else x_rm + residual_rm.float()
    scales_rn, mask, codes = wire_format.split(wire_rw, x_rm.shape[1])
    words_rnjk = total_rm.unflatten(1, (scales_rn.shape[1], -1, WORD))
    some_rnj = (words_rnjk != 0).any(-1)
    values_rn = some_rnj.sum(-1) * WORD
    mean_rn = words_rnjk.abs().sum((-2, -1)) / values_rn.clamp(min=1)
    scales_rn.copy_(torch.where(mean_rn < TINY, 0.0, mean_rn))
    mask.copy_(_pack(some_rnj.flatten(1)))
    codes.copy_(_pack(total_rm < 0))
    error_rm = total_rm - sign_unpack_reference(wire_rw, wire_format, torch.empty_like(total_rm))
    if new_residual_rm is not None:
        new_residual_rm.copy_(error_rm)
    return statistics_of(x_rm, total_rm, error_rm)


def sign_unpack_reference(wire_rw: torch.Tensor, wire_format: WireFormat, out_rm: torch.Tensor) -> torch.Tensor:
    """The same as `sign_unpack`."""
    scales_rn, mask, codes = wire_format.split(wire_rw, out_rm.shape[1])
    some = _unpack(mask).repeat_interleave(WORD, dim=1)
    scale_rm = scales_rn.repeat_interleave(wire_format.block, dim=1)
    return out_rm.copy_(torch.where(some, torch.where(_unpack(codes), -scale_rm, scale_rm), 0.0))


def sign_pack(
    x_rm: torch.Tensor,
    wire_format: WireFormat,
    wire_rw: torch.Tensor,
    residual_rm: torch.Tensor | None = None,
    new_residual_rm: torch.Tensor | None = None,
) -> torch.Tensor:
    """Encode the signs of x + residual; what they don't carry of it into the new residual. `STATISTICS` of it.

    As `quantize`, for the format sign. The scale is a sum in an order of the implementation's own: two of them may
    differ in its last bits, every rank decodes with the scale that was sent.
    """
    _check_format("sign_pack", wire_format)
    check_encode("sign_pack", wire_format, x_rm, wire_rw, residual_rm, new_residual_rm)
    run = backend.pick("sign_pack", x_rm.device.type) or sign_pack_reference
    return run(x_rm, wire_format, wire_rw, residual_rm, new_residual_rm)


def sign_unpack(wire_rw: torch.Tensor, wire_format: WireFormat, out_rm: torch.Tensor) -> torch.Tensor:
    """Decode the wire, uint8 [r, w], into `out`, fp32 [r, m], and return it. Format sign."""
    _check_format("sign_unpack", wire_format)
    check_decode("sign_unpack", wire_format, wire_rw, out_rm)
    run = backend.pick("sign_unpack", out_rm.device.type) or sign_unpack_reference
    return run(wire_rw, wire_format, out_rm)


def _check_format(op: str, wire_format: WireFormat) -> None:
    if wire_format.name != "sign":
        raise ValueError(f"{op}: the format is {wire_format.name}, it takes sign")
