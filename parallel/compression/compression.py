"""Gradient compression of one reducer: which parameters, by which reduction, over which communicators.

Lives here: the composition of options, codecs and transports. Imports `kernels` and `parallel` only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from parallel.comm import Work
from parallel.compression import gather, hops
from parallel.compression.codecs import Codec, codec_of
from parallel.compression.feedback import INT8_BLOCK
from parallel.compression.lanes import Lanes
from parallel.compression.low_rank import LowRankReduction
from parallel.compression.options import CompressionOptions
from parallel.compression.reduction import Reduction, Span
from parallel.mesh import Axis, Mesh


@dataclass(frozen=True)
class CompressionStatistics:
    """What compression did on this rank in the last step.

    bytes_sent: of compressed buckets; ratio: what a ring all-reduce in fp32 would have sent of them, over that; error:
    √(Σ of what codes didn't carry² / Σ of what was encoded²) of the first encodings. Seconds are sums over buckets,
    which overlap: encode (with sums between shots), wire (from launch to arrival), decode.
    """

    bytes_sent: int
    ratio: float
    error: float
    encode_seconds: float
    wire_seconds: float
    decode_seconds: float


class Compression:
    """Makes the reductions of a reducer's buckets and keeps them. Building it is collective over the world."""

    def __init__(self, options: CompressionOptions, mesh: Mesh):
        self.options, self.mesh = options, mesh
        self._reductions: list[tuple[Reduction, int]] = []
        # Of all reducers on this mesh, whose communicators are the same: threads of their own would mix up messages.
        self.lanes: Lanes = mesh.shared.get("gradient lanes") or Lanes(mesh.device)
        mesh.shared["gradient lanes"] = self.lanes
        self._codec: Codec | None = None if options.name == "powersgd" else codec_of(options)
        # Every lane's messages have a communicator of their own; ranks without a bucket on an axis make them too.
        groups = mesh.layout.groups(mesh.world_size)
        names = [name for name in ("dp_cp", "stage", "edp") if name == "dp_cp" or groups[name] != groups["dp_cp"]]
        self._wires = {
            name: [
                mesh.communicators(name, f"compressed gradients {way}", options.inner_size) for way in ("there", "back")
            ]
            for name in names
        }

    @property
    def granule(self) -> int:
        """Parameters start at multiples of it in a bucket: no block holds values of two."""
        granule = 1 if self._codec is None else self._codec.granule
        return math.lcm(granule, INT8_BLOCK) if self.options.residual_dtype == "int8" else granule

    def padded(self, values: int, axis: Axis) -> int:
        """The size of a bucket's buffer."""
        if self._codec is None or self._by_gather:
            return -(-values // self.granule) * self.granule
        row = self.granule * axis.size
        return -(-values // row) * row

    def covers(self, parameter: torch.Tensor, axis: Axis) -> bool:
        """Whether its gradient is compressed: there are replicas, and no rule excludes it."""
        return axis.size > 1 and self.options.covers(parameter)

    def add(self, buffer_n: torch.Tensor, spans: Sequence[Span], axis: Axis) -> Reduction:
        """The reduction of one more bucket over an axis of the mesh."""
        there, back = self._wires[axis.name]
        reduction: Reduction
        if self._codec is None:
            reduction = LowRankReduction(buffer_n, spans, (there[0], back[0]), self.options)
        elif self._by_gather:
            reduction = gather.GatherReduction(buffer_n, spans, there[0], self._codec, self.options)
        else:
            reduction = hops.HopReduction(buffer_n, spans, there, back, self._codec, self.options)
        values = sum(span.shape.numel() for span in spans)
        self._reductions.append((reduction, round(2 * (axis.size - 1) / axis.size * 4 * values)))
        return reduction

    def drop(self, reduction: Reduction) -> None:
        """Its bucket is gone."""
        self._reductions = [(kept, plain) for kept, plain in self._reductions if kept is not reduction]

    def submit(self, reduction: Reduction) -> Work:
        return self.lanes.submit(reduction.phases)

    def commit(self) -> None:
        for reduction, _ in self._reductions:
            reduction.commit()

    def discard(self) -> None:
        for reduction, _ in self._reductions:
            reduction.discard()

    def rescale(self, factor: float) -> None:
        for reduction, _ in self._reductions:
            reduction.rescale(factor)

    def not_finite(self) -> torch.Tensor:
        """fp64 scalar: how many values of this rank's own gradient weren't finite in the last step."""
        counts = [reduction.statistics[2] for reduction, _ in self._reductions]
        return torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.float64, device=self.mesh.device)

    def statistics(self) -> CompressionStatistics | None:
        """Of the last step; None where nothing is compressed on this rank. Waits for a GPU to have come this far."""
        if not self._reductions:
            return None
        sent = sum(reduction.bytes_sent for reduction, _ in self._reductions)
        plain = sum(plain for _, plain in self._reductions)
        inputs, errors, _ = torch.stack([reduction.statistics for reduction, _ in self._reductions]).sum(0).tolist()
        clocks = [reduction.clock.seconds() for reduction, _ in self._reductions]
        return CompressionStatistics(
            bytes_sent=sent,
            ratio=plain / sent,
            error=math.sqrt(errors / inputs) if inputs > 0 else 0.0,
            encode_seconds=sum(clock["encode"] for clock in clocks),
            wire_seconds=sum(clock["wire"] for clock in clocks),
            decode_seconds=sum(clock["decode"] for clock in clocks),
        )

    def kept(self) -> dict[str, torch.Tensor]:
        """What this rank keeps from step to step, by name: to save, or to fill."""
        return {name: part for reduction, _ in self._reductions for name, part in reduction.kept().items()}

    def load(self, saved: Mapping[str, torch.Tensor]) -> list[str]:
        """Fill what is kept from what was saved; names that are missing there, or of another shape, become zero."""
        unfit = []
        for name, part in self.kept().items():
            found = saved.get(name)
            if found is None or found.shape != part.shape or found.dtype != part.dtype:
                unfit.append(name)
                part.zero_()
            else:
                part.copy_(found)
        return unfit

    @property
    def _by_gather(self) -> bool:
        return self.options.name == "topk" and self.options.topk_transport == "gather"
