"""The compressed all-reduce in one shot: everyone gets everyone's code and sums it.

Lives here: one transport, for topk on few ranks (its bytes grow with the number of ranks). Imports `kernels` and
`parallel` only. Sparse all-gather as in Deep Gradient Compression (1712.01887).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from parallel.comm import Work, start_all_gather
from parallel.compression.codecs import Codec
from parallel.compression.feedback import ErrorFeedback
from parallel.compression.options import CompressionOptions
from parallel.compression.reduction import Span, Stopwatch, kept_residual, no_statistics
from parallel.mesh import Axis


def bytes_sent(n: int, ranks: int, codec: Codec) -> int:
    """By one rank for a bucket of n values."""
    return (ranks - 1) * codec.wire_bytes(n)


class GatherReduction:
    """Sums a bucket's fp32 buffer [n] over an axis, decoded from all ranks, in fp32 and in rank order.

    n: a multiple of the codec's granule; axis: a communicator that nobody else uses.
    """

    def __init__(
        self, buffer_n: torch.Tensor, spans: Sequence[Span], axis: Axis, codec: Codec, options: CompressionOptions
    ):
        self._buffer, self._spans, self._axis, self._codec = buffer_n, spans, axis, codec
        n, device = buffer_n.numel(), buffer_n.device
        self.bytes_sent = bytes_sent(n, axis.size, codec)
        self.statistics, self.clock = no_statistics(device), Stopwatch(device)
        self._feedback = ErrorFeedback(n, options.residual_dtype, device, options.decay)
        self._mine = torch.zeros((1, codec.wire_bytes(n)), dtype=torch.uint8, device=device)
        self._everyone = self._mine.repeat(axis.size, 1)
        self._work: Work | None = None
        self.phases: list[Callable[[], None]] = [self._send, self._sum] if n else []

    def commit(self) -> None:
        self._feedback.commit()

    def discard(self) -> None:
        self._feedback.discard()

    def rescale(self, factor: float) -> None:
        self._feedback.rescale(factor)

    def kept(self) -> dict[str, torch.Tensor]:
        return kept_residual(self._feedback, self._spans)

    def _send(self) -> None:
        self.clock.reset()
        self.clock.start("encode")
        self.statistics = self._codec.encode(self._buffer.unsqueeze(0), self._mine, *self._feedback.open(1))
        self._feedback.close()
        self.clock.stop("encode")
        self.clock.start("wire")
        self._work = start_all_gather(self._everyone, self._mine[0], self._axis)

    def _sum(self) -> None:
        assert self._work is not None
        self._work.wait()
        self._work = None
        self.clock.stop("wire")
        self.clock.start("decode")
        self._codec.decode_sum(self._everyone, self._buffer)
        self.clock.stop("decode")
