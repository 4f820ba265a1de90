"""Many tensors into one flat buffer, as one launch of a Triton kernel over a table of their addresses.

Lives here: `bucket_pack` on a GPU. Imports torch, triton and `kernels`. Same results as `kernels.bucket_pack`, bit for
bit. Shapes: n values of all tensors together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

from kernels.triton_ops.launch import Launch
from kernels.triton_ops.tile import bf16_bits, fp32_of_bf16, not_finite, sum_of_squares

_TILE = 4096
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.int16}
"""bf16 goes through integers: see `tile`."""


@triton.jit
def pack_tile(source, target, left, factor, partials, MASKED: tl.constexpr, TILE: tl.constexpr):
    """One tile from pointer to pointer, `left` values of it where it is masked."""
    place = tl.arange(0, TILE)
    sources, targets = source + place, target + place
    if MASKED:
        mask = place < left
        values = tl.load(sources, mask=mask, other=0)
    else:
        mask = None
        # Addresses from memory tell the compiler nothing of themselves.
        sources, targets = tl.multiple_of(sources, 16), tl.multiple_of(targets, 16)
        values = tl.load(sources)
    if values.dtype == tl.int16:
        values = fp32_of_bf16(values)
    scaled = values.to(tl.float32) * factor
    if target.dtype.element_ty == tl.int16:
        tl.store(targets, bf16_bits(scaled), mask=mask)
    else:
        tl.store(targets, scaled.to(target.dtype.element_ty), mask=mask)
    tl.store(partials + tl.program_id(0), sum_of_squares(scaled))
    tl.store(partials + tl.num_programs(0) + tl.program_id(0), tl.sum(not_finite(scaled)).to(tl.float64))


@triton.jit(do_not_specialize=["tensors"])
def pack_kernel(
    partials, table, tensors, factor: tl.float32, SOURCE: tl.constexpr, TARGET: tl.constexpr, TILE: tl.constexpr
):
    """A program: one tile of one tensor, the last one whose first tile isn't beyond this one."""
    tile = tl.program_id(0)
    found = tl.zeros([], tl.int32)
    beyond = tensors
    while beyond - found > 1:
        middle = (found + beyond) // 2
        before = tl.load(table + 3 * tensors + middle) <= tile
        found = tl.where(before, middle, found)
        beyond = tl.where(before, beyond, middle)
    source = tl.load(table + found)
    target = tl.load(table + tensors + found)
    start = (tile - tl.load(table + 3 * tensors + found)) * TILE
    left = tl.load(table + 2 * tensors + found) - start
    sources = source.to(tl.pointer_type(SOURCE)) + start
    targets = target.to(tl.pointer_type(TARGET)) + start
    if (left >= TILE) & ((source | target) % 16 == 0):
        pack_tile(sources, targets, left, factor, partials, False, TILE)
    else:
        pack_tile(sources, targets, left, factor, partials, True, TILE)


def pack(tensors: Sequence[torch.Tensor], out_n: torch.Tensor, factor: float) -> tuple[Launch, torch.Tensor]:
    """The launch of `bucket_pack`, and its programs' statistics, fp64 [2, programs].

    The table, int64 [4, tensors]: addresses of the tensors and of their parts of `out`, lengths, first tiles.
    """
    sizes = [x.numel() for x in tensors]
    starts = accumulate(sizes, initial=0)
    *first_tiles, programs = accumulate((triton.cdiv(size, _TILE) for size in sizes), initial=0)
    targets = [out_n.data_ptr() + start * out_n.element_size() for start, _ in zip(starts, sizes, strict=False)]
    rows = [[x.data_ptr() for x in tensors], targets, sizes, first_tiles]
    on_gpu = out_n.is_cuda
    # From pinned memory, so that the host doesn't wait for the copy.
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=on_gpu).to(out_n.device, non_blocking=True)
    partials = torch.empty(2, programs, dtype=torch.float64, device=out_n.device)
    source = tensors[0].dtype if tensors else out_n.dtype
    constants = {"SOURCE": _TYPES[source], "TARGET": _TYPES[out_n.dtype], "TILE": _TILE}
    return Launch(pack_kernel, programs, (partials, table, len(sizes), factor), constants), partials


def bucket_pack(tensors: Sequence[torch.Tensor], out_n: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """As `kernels.bucket_pack.bucket_pack`."""
    launch, partials = pack(tensors, out_n, factor)
    launch.run()
    return partials.sum(1)
