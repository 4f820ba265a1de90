"""The k largest absolutes of each row, and the sum of such rows, as Triton kernels; no run's order depends on timing.

Lives here: `select_top` and `scatter_sum` on a GPU. Imports torch, triton and `kernels`. Same results as
`kernels.select_top`, bit for bit. Shapes: see there; e exponents, s steps of a mantissa's first 3 bits.

1. Count the exponents of each row: atomic additions, but of integers. 2. From these each program knows the exponent in
which the k-th entry lies, and counts its tile's values above it, and of it by the mantissa's first three bits. 3. One
program a row adds the tiles' counts: the threshold, and how many entries lie before each tile. 4. Each tile puts its
own where they belong.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import select_top as reference
from kernels.triton_ops.launch import Launch, as_integers
from kernels.triton_ops.tile import bits_of, load_values, store_statistics, store_values

_TILE = 4096
"""Values of a program."""
_ENTRIES = 1024
BIN_SHIFT = tl.constexpr(reference.BIN_SHIFT)
STEPS = tl.constexpr(8)
"""Bins of one exponent."""
EXPONENTS = tl.constexpr(reference.BINS // 8)
COLUMNS = tl.constexpr(16)
"""A tile's counts: of each step of the threshold's exponent, then of all exponents above, then zeros."""


@triton.jit
def load_total(x_rm, residual_rm, row, m, start, TILE: tl.constexpr):
    """Raw values and values with residual of one tile of a row, their places in the row, which of these exist."""
    place = start + tl.arange(0, TILE)
    in_row = place < m
    base = row.to(tl.int64) * m
    raw = load_values(x_rm + base + place, in_row)
    total = raw
    if residual_rm is not None:
        total = raw + load_values(residual_rm + base + place, in_row)
    return raw, total, place, in_row


@triton.jit
def threshold_exponent(exponents_re, row, m, k):
    """The largest exponent such that k values have it or a larger one."""
    count_e = tl.load(exponents_re + row * EXPONENTS + tl.arange(0, EXPONENTS))
    at_least_e = m - tl.cumsum(count_e, axis=0) + count_e
    return tl.sum((at_least_e >= k).to(tl.int32)) - 1


@triton.jit
def count_exponents_kernel(x_rm, residual_rm, exponents_re, m, TILE: tl.constexpr):
    """1. A program: one tile of a row."""
    tiles = tl.cdiv(m, TILE)
    row = tl.program_id(0) // tiles
    _, total, _, in_row = load_total(x_rm, residual_rm, row, m, (tl.program_id(0) % tiles) * TILE, TILE)
    count_e = tl.histogram((bits_of(total) & 0x7FFFFFFF) >> 23, EXPONENTS, mask=in_row)
    counts = exponents_re + row * EXPONENTS + tl.arange(0, EXPONENTS)
    tl.atomic_add(counts, count_e, mask=count_e != 0, sem="relaxed")


@triton.jit(do_not_specialize=["k"])
def count_tiles_kernel(x_rm, residual_rm, exponents_re, counts, m, k, TILE: tl.constexpr):
    """2. A program: one tile of a row, into int32 [row, tile, COLUMNS]."""
    tiles = tl.cdiv(m, TILE)
    row = tl.program_id(0) // tiles
    exponent = threshold_exponent(exponents_re, row, m, k)
    _, total, _, in_row = load_total(x_rm, residual_rm, row, m, (tl.program_id(0) % tiles) * TILE, TILE)
    step = ((bits_of(total) & 0x7FFFFFFF) >> BIN_SHIFT) - exponent * STEPS
    step = tl.where(in_row, tl.minimum(step, STEPS), -1)
    tile_counts = counts + tl.program_id(0) * COLUMNS
    for column in tl.static_range(STEPS + 1):
        tl.store(tile_counts + column, tl.sum((step == column).to(tl.int32)))


@triton.jit(do_not_specialize=["m", "k", "tiles"])
def place_tiles_kernel(exponents_re, counts, before, thresholds, m, k, tiles, CHUNK: tl.constexpr):
    """3. A program: a row. Entries before each tile into int32 [row, tile, 2]: above the threshold, and in its bin; the
    threshold's bin and how many entries of it are taken into int32 [row, 2].
    """
    row = tl.program_id(0)
    column_c = tl.arange(0, COLUMNS)
    row_counts = counts + row.to(tl.int64) * tiles * COLUMNS
    total_c = tl.zeros([COLUMNS], tl.int32)
    start = tl.zeros([], tl.int32)
    while start < tiles:
        tile = start + tl.arange(0, CHUNK)
        in_row = (tile < tiles)[:, None] & (column_c <= STEPS)[None, :]
        count = tl.load(row_counts + tile[:, None] * COLUMNS + column_c[None, :], mask=in_row, other=0)
        total_c += tl.sum(count, axis=0)
        start += CHUNK
    at_least_c = tl.sum(total_c) - tl.cumsum(total_c, axis=0) + total_c
    step = tl.sum(((at_least_c >= k) & (column_c < STEPS)).to(tl.int32)) - 1
    above = tl.sum(tl.where(column_c > step, total_c, 0))
    tl.store(thresholds + row * 2, threshold_exponent(exponents_re, row, m, k) * STEPS + step)
    tl.store(thresholds + row * 2 + 1, k - above)

    row_before = before + row.to(tl.int64) * tiles * 2
    above_before = tl.zeros([], tl.int32)
    equal_before = tl.zeros([], tl.int32)
    start = tl.zeros([], tl.int32)
    while start < tiles:
        tile = start + tl.arange(0, CHUNK)
        in_row = (tile < tiles)[:, None] & (column_c <= STEPS)[None, :]
        count = tl.load(row_counts + tile[:, None] * COLUMNS + column_c[None, :], mask=in_row, other=0)
        above_tile = tl.sum(tl.where(column_c[None, :] > step, count, 0), axis=1)
        equal_tile = tl.sum(tl.where(column_c[None, :] == step, count, 0), axis=1)
        tl.store(row_before + tile * 2, above_before + tl.cumsum(above_tile, axis=0) - above_tile, mask=tile < tiles)
        tl.store(
            row_before + tile * 2 + 1, equal_before + tl.cumsum(equal_tile, axis=0) - equal_tile, mask=tile < tiles
        )
        above_before += tl.sum(above_tile)
        equal_before += tl.sum(equal_tile)
        start += CHUNK


@triton.jit(do_not_specialize=["k"])
def take_kernel(x_rm, residual_rm, new_residual_rm, wire_rw, before, thresholds, partials, m, k, TILE: tl.constexpr):
    """4. A program: one tile of a row."""
    tiles = tl.cdiv(m, TILE)
    row = tl.program_id(0) // tiles
    raw, total, place, in_row = load_total(x_rm, residual_rm, row, m, (tl.program_id(0) % tiles) * TILE, TILE)
    threshold = tl.load(thresholds + row * 2)
    needed = tl.load(thresholds + row * 2 + 1)
    above_before = tl.load(before + tl.program_id(0) * 2)
    equal_before = tl.load(before + tl.program_id(0) * 2 + 1)

    bins = (bits_of(total) & 0x7FFFFFFF) >> BIN_SHIFT
    above = in_row & (bins > threshold)
    equal = in_row & (bins == threshold)
    # Both counts in one scan: a tile's fit into 16 bits.
    flags = above.to(tl.int32) + (equal.to(tl.int32) << 16)
    rank = tl.cumsum(flags, axis=0) - flags
    equal_rank = equal_before + (rank >> 16)
    taken = above | (equal & (equal_rank < needed))
    entry = above_before + (rank & 0xFFFF) + tl.minimum(equal_rank, needed)
    values = wire_rw.to(tl.pointer_type(tl.float32)) + row.to(tl.int64) * k * 2
    tl.store(values + entry, total, mask=taken)
    tl.store(values.to(tl.pointer_type(tl.int32)) + k + entry, place, mask=taken)

    error = tl.where(taken, 0.0, total)
    if new_residual_rm is not None:
        store_values(new_residual_rm + row.to(tl.int64) * m + place, error, in_row)
    store_statistics(partials, total, error, raw)


@triton.jit(do_not_specialize=["m"])
def scatter_add_kernel(wire_w, out_m, k, m, TILE: tl.constexpr):
    """A program: TILE entries of one row, whose places differ. One outside of the row is left out: refusing it would
    make the host wait.
    """
    entry = tl.program_id(0) * TILE + tl.arange(0, TILE)
    values = wire_w.to(tl.pointer_type(tl.float32))
    value = tl.load(values + entry, mask=entry < k, other=0.0)
    place = tl.load(values.to(tl.pointer_type(tl.int32)) + k + entry, mask=entry < k, other=-1)
    inside = (place >= 0) & (place < m)
    tl.store(out_m + place, tl.load(out_m + place, mask=inside, other=0.0) + value, mask=inside)


def select(
    x_rm: torch.Tensor,
    wire_rw: torch.Tensor,
    residual_rm: torch.Tensor | None = None,
    new_residual_rm: torch.Tensor | None = None,
) -> tuple[list[Launch], torch.Tensor]:
    """The launches of `select_top`, in order, and the programs' statistics, fp64 [3, programs]."""
    rows, m = x_rm.shape
    k = wire_rw.shape[1] // reference.ENTRY_BYTES
    if m > (1 << 31) - _TILE:
        raise ValueError(
            f"select_top: rows of {m} values; places are int32, up to the last tile's end: smaller buckets"
        )
    tiles = triton.cdiv(m, _TILE)
    integers = {"dtype": torch.int32, "device": x_rm.device}
    exponents_re = torch.zeros(rows, EXPONENTS.value, **integers)
    counts = torch.empty(rows, tiles, COLUMNS.value, **integers)
    before = torch.empty(rows, tiles, 2, **integers)
    thresholds = torch.empty(rows, 2, **integers)
    partials = torch.empty(3, rows * tiles, dtype=torch.float64, device=x_rm.device)
    values = (x_rm, as_integers(residual_rm))
    tile = {"TILE": _TILE}
    taken = (*values, as_integers(new_residual_rm), wire_rw, before, thresholds, partials, m, k)
    launches = [
        Launch(count_exponents_kernel, rows * tiles, (*values, exponents_re, m), tile),
        Launch(count_tiles_kernel, rows * tiles, (*values, exponents_re, counts, m, k), tile),
        Launch(place_tiles_kernel, rows, (exponents_re, counts, before, thresholds, m, k, tiles), {"CHUNK": 512}),
        Launch(take_kernel, rows * tiles, taken, tile, num_warps=8),
    ]
    return launches, partials


def scatter(wire_rw: torch.Tensor, out_m: torch.Tensor) -> list[Launch]:
    """The launches that add each row's entries to `out`, in the order of rows."""
    k = wire_rw.shape[1] // reference.ENTRY_BYTES
    programs, sizes = triton.cdiv(k, _ENTRIES), (k, out_m.numel())
    return [Launch(scatter_add_kernel, programs, (wire_w, out_m, *sizes), {"TILE": _ENTRIES}) for wire_w in wire_rw]


def select_top(
    x_rm: torch.Tensor,
    wire_rw: torch.Tensor,
    residual_rm: torch.Tensor | None = None,
    new_residual_rm: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `kernels.select_top.select_top`."""
    launches, partials = select(x_rm, wire_rw, residual_rm, new_residual_rm)
    for launch in launches:
        launch.run()
    return partials.sum(1)


def scatter_sum(wire_rw: torch.Tensor, out_m: torch.Tensor) -> torch.Tensor:
    """As `kernels.select_top.scatter_sum`."""
    out_m.zero_()
    for launch in scatter(wire_rw, out_m):
        launch.run()
    return out_m
