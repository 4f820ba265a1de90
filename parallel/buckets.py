"""Buckets of gradients: which parameters share a message, the flat fp32 buffer they lie in, and how it is reduced.

Lives here: one bucket, and the cut of parameters into buckets. Imports `parallel` only. Buckets as in PyTorch DDP
(2006.15704).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from parallel.comm import Work, all_reduce_
from parallel.compression.compression import Compression
from parallel.compression.reduction import Reduction, Span
from parallel.mesh import Axis, Mesh
from parallel.sharding import sharding_of, valid_part


def cut(sizes: Sequence[int], cap: float) -> list[tuple[int, int]]:
    """(start, stop) of consecutive buckets over sizes: each is full, as DDP's is, once it holds `cap`.

    Where there is more than one bucket, the end, which backward completes last, becomes one that is full at cap / 4:
    nothing is left to compute while the last bucket travels.
    """
    tail, left = len(sizes), cap / 4 if sum(sizes) > cap else 0.0
    while left > 0 and tail > 0:
        tail -= 1
        left -= sizes[tail]
    bounds, held = [0], 0
    for i, size in enumerate(sizes[:tail], start=1):
        held += size
        if held >= cap:
            bounds.append(i)
            held = 0
    return list(itertools.pairwise(dict.fromkeys([*bounds, tail, len(sizes)])))


class Bucket:
    """Parameters whose gradients are summed over one axis in one message: a flat fp32 buffer, and who is missing.

    compression: reduces it, instead of an all-reduce in fp32; parameters then start at multiples of its granule, with
    padding between them and at the end.
    """

    def __init__(self, axis: Axis, named: Sequence[tuple[str, nn.Parameter]], compression: Compression | None = None):
        self.axis = axis
        self.parameters = [parameter for _, parameter in named]
        self.missing: dict[nn.Parameter, int] = {}
        """How many backward passes outside `no_sync` each parameter still waits for in this step."""
        self.launched = False
        self.work: Work | None = None
        granule = 1 if compression is None else compression.granule
        spans, end = [], 0
        for name, parameter in named:
            spans.append(Span(name, parameter.shape, -(-end // granule) * granule))
            end = spans[-1].stop
        size = end if compression is None else compression.padded(end, axis)
        self.buffer = torch.zeros(size, dtype=torch.float32, device=self.parameters[0].device)
        for span, parameter in zip(spans, self.parameters, strict=True):
            parameter.main_grad = self.buffer[span.start : span.stop].view(span.shape)  # type: ignore[attr-defined]
        self._spans, self._compression = spans, compression
        self.reduction: Reduction | None = None if compression is None else compression.add(self.buffer, spans, axis)
        self.rearm()

    def launch(self, compress: bool = False) -> None:
        """Start the sum over the axis, compressed if asked for and possible."""
        self.launched = True
        if compress and self._compression is not None and self.reduction is not None:
            self.work = self._compression.submit(self.reduction)
        else:
            self.work = all_reduce_(self.buffer, self.axis, async_op=True)

    def counted(self, mesh: Mesh) -> list[torch.Tensor]:
        """What this rank counts of the buffer in the norm: neighbours as one view, copies and padding left out."""
        parts: list[torch.Tensor] = []
        start = end = 0  # of the neighbours so far
        for span, parameter in zip(self._spans, self.parameters, strict=True):
            sharding = sharding_of(parameter)
            valid = valid_part(parameter.main_grad, sharding, mesh)  # type: ignore[attr-defined]
            whole = sharding.owned(mesh) and valid.shape == parameter.shape
            if not whole or span.start != end:
                parts.append(self.buffer[start:end])
                start = span.start
            if whole:
                end = span.stop
                continue
            if sharding.owned(mesh):
                parts.append(valid)
            start = end = span.stop
        return [part for part in (*parts, self.buffer[start:end]) if part.numel()]

    def rearm(self) -> None:
        """Ready for the next step."""
        self.work, self.launched = None, False
        self.missing = dict.fromkeys(self.parameters, 1)
