"""The k largest absolutes of each row, by a threshold and a compaction in index order; and the sum of such rows.

Lives here: one op and its inverse. Imports torch and `kernels` only. Top-k with error feedback as in Deep Gradient
Compression (1712.01887). Shapes: r rows, m values of a row, k entries of a row; the wire of a row is fp32 [k] values,
then int32 [k] places, 8·k bytes.
"""

from __future__ import annotations

import torch

from kernels import backend
from kernels.wire import check_values, statistics_of

ENTRY_BYTES = 8
BIN_SHIFT = 20
"""A value's bin is its absolute's bits without the lowest 20: 8 of exponent, 3 of mantissa; 2,048 bins in all."""
BINS = 1 << (31 - BIN_SHIFT)


def entries(wire_rw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a wire uint8 [r, 8k]: values fp32 [r, k] and places int32 [r, k]."""
    half = wire_rw.shape[1] // 2
    return wire_rw[:, :half].view(torch.float32), wire_rw[:, half:].view(torch.int32)


def select_top_reference(
    x_rm: torch.Tensor,
    wire_rw: torch.Tensor,
    residual_rm: torch.Tensor | None = None,
    new_residual_rm: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same as `select_top`, a step at a time."""
    total_rm = x_rm if residual_rm is None else x_rm + residual_rm.float()
    values_rk, places_rk = entries(wire_rw)
    k = values_rk.shape[1]
    bins_rm = (total_rm.contiguous().view(torch.int32) & 0x7FFFFFFF) >> BIN_SHIFT
    # Stable: of one bin, the first in the row. What was chosen then lies in the row's order.
    chosen_rk = bins_rm.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values
    places_rk.copy_(chosen_rk)
    values_rk.copy_(total_rm.gather(1, chosen_rk))
    error_rm = total_rm.scatter(1, chosen_rk, 0.0)
    if new_residual_rm is not None:
        new_residual_rm.copy_(error_rm)
    return statistics_of(x_rm, total_rm, error_rm)


def scatter_sum_reference(wire_rw: torch.Tensor, out_m: torch.Tensor) -> torch.Tensor:
    """The same as `scatter_sum`, a row at a time."""
    out_m.zero_()
    for values_k, places_k in zip(*entries(wire_rw), strict=True):
        out_m[places_k.long()] += values_k
    return out_m


def select_top(
    x_rm: torch.Tensor,
    wire_rw: torch.Tensor,
    residual_rm: torch.Tensor | None = None,
    new_residual_rm: torch.Tensor | None = None,
) -> torch.Tensor:
    """Of each row of x + residual, k entries into the wire, the rest into the new residual. Statistics as `quantize`.

    Chosen are all values of the largest bins (`BIN_SHIFT`: within 1/8 of each other in size), and of the last bin
    needed the first ones in the row; entries lie in the row's order, so the result doesn't depend on who ran when.
    x: fp32 [r, m], unchanged; wire: uint8 [r, 8k], k at most m, overwritten; residual, new_residual: fp32 or bf16
    [r, m], may be the same tensor. m below 2^31. Returns fp64 [3] (`wire.STATISTICS`).
    """
    rows, m = x_rm.shape
    _check_entries("select_top", wire_rw, rows, m)
    for what, values in (("x", x_rm), ("residual", residual_rm), ("new residual", new_residual_rm)):
        check_values("select_top", what, values, wire_rw, (rows, m))
    run = backend.pick("select_top", x_rm.device.type) or select_top_reference
    return run(x_rm, wire_rw, residual_rm, new_residual_rm)


def scatter_sum(wire_rw: torch.Tensor, out_m: torch.Tensor) -> torch.Tensor:
    """out = Σ over rows, from row 0 on, of their entries at their places, elsewhere 0: uint8 [r, 8k] -> fp32 [m]."""
    (m,) = out_m.shape
    _check_entries("scatter_sum", wire_rw, wire_rw.shape[0], m)
    check_values("scatter_sum", "out", out_m, wire_rw, (m,))
    run = backend.pick("scatter_sum", out_m.device.type) or scatter_sum_reference
    return run(wire_rw, out_m)


def _check_entries(op: str, wire_rw: torch.Tensor, rows: int, m: int) -> None:
    if wire_rw.dtype != torch.uint8:
        raise TypeError(f"{op}: the wire is {wire_rw.dtype}, it takes torch.uint8")
    if wire_rw.ndim != 2 or wire_rw.shape[0] != rows or wire_rw.shape[1] % ENTRY_BYTES or not wire_rw.is_contiguous():
        raise ValueError(
            f"{op}: {rows} rows need a contiguous wire of {rows} rows of {ENTRY_BYTES} bytes an entry, it is "
            f"{tuple(wire_rw.shape)}"
        )
    if wire_rw.shape[1] // ENTRY_BYTES > m:
        raise ValueError(f"{op}: {wire_rw.shape[1] // ENTRY_BYTES} entries of a row of {m} values")
    if m >= 1 << 31:
        raise ValueError(f"{op}: rows of {m} values; places are int32, so it takes fewer than 2^31: smaller buckets")
