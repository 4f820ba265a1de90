"""The compressed all-reduce in two shots, or two hops: encode, all-to-all, sum and encode, all-gather, decode.

Lives here: one transport. Imports `kernels` and `parallel` only. Two shots as in ZeRO++ (2306.10209); with the codec
topk the regions of Ok-Topk (2201.07598), all of one size. Shapes: N ranks, n values of a bucket, m = n / N of a region.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from kernels.wire import WORD
from parallel.comm import Work, start_all_gather, start_all_to_all
from parallel.compression.codecs import Codec
from parallel.compression.feedback import ErrorFeedback
from parallel.compression.options import CompressionOptions
from parallel.compression.reduction import Span, Stopwatch, kept_region, kept_residual, no_statistics
from parallel.mesh import Axis


def bytes_sent(n: int, sizes: Sequence[int], codec: Codec) -> int:
    """By one rank for a bucket of n values over hops of these sizes: the way there, and twice the regions back."""
    there, held = 0, n
    for size in sizes:
        held //= size
        there += (size - 1) * codec.wire_bytes(held)
    back, carried = 0, codec.wire_bytes(held)
    for size in reversed(sizes):
        back += (size - 1) * carried
        carried *= size
    return there + back


class HopReduction:
    """Sums a bucket over one axis (two shots), or over a chain of axes, the inner one first (two hops).

    buffer: fp32 [n], n a multiple of the codec's granule times N, overwritten by the sum; spans: its parameters; there,
    back: the axes of the chain for the all-to-alls and the all-gathers: communicators that nobody else uses, since
    their messages are launched from other threads. Each rank sums one region, decoded from all ranks, in fp32 and in
    rank order within a hop; each encoding has error feedback of its own.
    """

    def __init__(
        self,
        buffer_n: torch.Tensor,
        spans: Sequence[Span],
        there: Sequence[Axis],
        back: Sequence[Axis],
        codec: Codec,
        options: CompressionOptions,
    ):
        self._buffer, self._spans, self._codec = buffer_n, spans, codec
        self._there, self._back = list(there), list(back)
        sizes = [axis.size for axis in there]
        n, ranks, device = buffer_n.numel(), math.prod(sizes), buffer_n.device
        if n % (ranks * codec.granule):
            raise ValueError(f"a bucket of {n} values can't be cut into {ranks} rows of multiples of {codec.granule}")
        self.bytes_sent = bytes_sent(n, sizes, codec)
        self.statistics, self.clock = no_statistics(device), Stopwatch(device)
        self._m = n // ranks
        held = [n // math.prod(sizes[:hop]) for hop in range(len(sizes) + 1)]  # values that a rank sums before each hop
        self._feedback = [ErrorFeedback(h, options.residual_dtype, device, options.decay) for h in held]

        def wires(row_values: list[int], rows: list[int]) -> list[torch.Tensor]:
            shapes = [(r, codec.wire_bytes(m)) for r, m in zip(rows, row_values, strict=True)]
            return [torch.zeros(shape, dtype=torch.uint8, device=device) for shape in shapes]

        # Zeros in the last word of a parameter: a sign has no zero, and nobody keeps what they would owe.
        torn = ((span.stop, -(-span.stop // WORD) * WORD) for span in spans)
        self._padding = [(start, stop) for start, stop in torn if start < stop]
        self._sent, self._received = wires(held[1:], sizes), wires(held[1:], sizes)
        # What goes back over each hop, from the last one on: this rank's region, then those gathered so far.
        self._region = [wires([self._m], [math.prod(sizes[hop:])])[0] for hop in range(len(sizes), -1, -1)]
        self._work: Work | None = None
        self._hop = 0
        more = len(sizes) - 1
        self.phases: list[Callable[[], None]] = []
        if n:
            passes, gathers = [self._pass_on] * more, [self._gather_more] * more
            self.phases = [self._send, *passes, self._sum_and_gather, *gathers, self._decode]

    def commit(self) -> None:
        for feedback in self._feedback:
            feedback.commit()

    def discard(self) -> None:
        for feedback in self._feedback:
            feedback.discard()

    def rescale(self, factor: float) -> None:
        for feedback in self._feedback:
            feedback.rescale(factor)

    def kept(self) -> dict[str, torch.Tensor]:
        place = tuple(axis.ranks for axis in self._there), tuple(axis.rank for axis in self._there)
        kept = kept_residual(self._feedback[0], self._spans)
        for hop, feedback in enumerate(self._feedback[1:]):
            kept |= kept_region(feedback, self._spans, (*place, hop))
        return kept

    def _send(self) -> None:
        """Phase 1: this rank's gradient, a row to each rank of the first hop."""
        self.clock.reset()
        self._hop = 0
        self.clock.start("encode")
        self.statistics = self._encode(self._buffer)
        self.clock.stop("encode")
        self._launch(start_all_to_all(self._received[0], self._sent[0], self._there[0]))

    def _pass_on(self) -> None:
        """Between two hops: the sum over the ranks of this one, a row to each rank of the next."""
        self._land()
        self.clock.start("encode")
        part = torch.empty(self._feedback[self._hop + 1].n, device=self._buffer.device)
        self._codec.decode_sum(self._received[self._hop], part)
        self._hop += 1
        self._encode(part)
        self.clock.stop("encode")
        self._launch(start_all_to_all(self._received[self._hop], self._sent[self._hop], self._there[self._hop]))

    def _sum_and_gather(self) -> None:
        """After the last hop: this rank's region, to all ranks of that hop."""
        self._land()
        self.clock.start("encode")
        residual, new_residual = self._feedback[-1].open(1)
        flat = [None if x is None else x.view(-1) for x in (residual, new_residual)]
        self._codec.decode_sum_encode(self._received[-1], self._m, self._region[0][0], *flat)
        self._feedback[-1].close()
        self.clock.stop("encode")
        self._gather()

    def _gather_more(self) -> None:
        self._land()
        self._hop -= 1
        self._gather()

    def _gather(self) -> None:
        """Over the current hop: what this rank has of the regions, to all ranks of it."""
        done = len(self._there) - 1 - self._hop
        mine, gathered = self._region[done], self._region[done + 1]
        axis = self._back[self._hop]
        self._launch(start_all_gather(gathered.view(axis.size, -1), mine.view(-1), axis))

    def _decode(self) -> None:
        """The last phase: all regions are here."""
        self._land()
        self.clock.start("decode")
        self._codec.decode(self._region[-1], self._buffer.view(-1, self._m))
        self.clock.stop("decode")

    def _encode(self, values: torch.Tensor) -> torch.Tensor:
        sent, feedback = self._sent[self._hop], self._feedback[self._hop]
        rows = sent.shape[0]
        residual, new_residual = feedback.open(rows)
        statistics = self._codec.encode(values.view(rows, -1), sent, residual, new_residual)
        if new_residual is not None and self._hop == 0:
            for start, stop in self._padding:
                new_residual.view(-1)[start:stop].zero_()
        feedback.close()
        return statistics

    def _launch(self, work: Work) -> None:
        self.clock.start("wire")
        self._work = work

    def _land(self) -> None:
        assert self._work is not None
        self._work.wait()
        self.clock.stop("wire")
        self._work = None
