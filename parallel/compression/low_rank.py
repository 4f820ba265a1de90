"""PowerSGD: the sum of matrices over ranks as a product of two thin ones, found by one step of a power iteration.

Lives here: one bucket's low-rank all-reduce. Imports `parallel` only. Source: 1905.13727, algorithms 1 and 2. Shapes: k
matrices of one parameter, p rows, q columns, r rank; thin matrices lie as rows, P as [k, r, p], Q as [k, r, q]: a CPU
multiplies p x q by those eleven times faster than by columns (8 MiB, rank 8, one core: 1.2 ms instead of 13).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from parallel.comm import Work, all_reduce_
from parallel.compression.feedback import ErrorFeedback
from parallel.compression.options import CompressionOptions
from parallel.compression.reduction import Span, Stopwatch, kept_residual, no_statistics
from parallel.mesh import Axis

_WORTH = 2
"""A matrix is sent as factors where these hold at most 1/2 of its values."""
_FLOOR = 1e-100
"""Added to squares of rows in fp64, where the smallest square of an fp32 value is 1e-90: a zero row stays zero."""
_RIDGE = 1e-12
"""Added to the Gram matrix of unit rows: a row that is what fp32 rounding (6e-8) left of a combination of the others is
shrunk rather than blown up. It shortens a good row by 5e-13."""
_LOST = 1e-3
"""Of the longest row of Q; a shorter one is mostly rounding along the others, and tells no direction of its own."""


def matrices(shape: Sequence[int], rank: int) -> tuple[int, int, int] | None:
    """(k, p, q) of a parameter sent as factors: 2 dimensions are one matrix, 3 a batch (experts), 4 and more one matrix
    of their first against the rest. None where it is no matrix or factors of this rank aren't worth it.
    """
    if len(shape) < 2:
        return None
    k, p = (shape[0], shape[1]) if len(shape) == 3 else (1, shape[0])
    q = torch.Size(shape[2:] if len(shape) == 3 else shape[1:]).numel()
    return (k, p, q) if 0 < _WORTH * rank * (p + q) <= p * q else None


def message_values(shapes: Sequence[Sequence[int]], rank: int) -> tuple[int, int]:
    """fp32 values in a bucket's two messages: all P and what isn't sent as factors; all Q."""
    first = second = 0
    for shape in shapes:
        cut = matrices(shape, rank)
        first += torch.Size(shape).numel() if cut is None else cut[0] * rank * cut[1]
        second += 0 if cut is None else cut[0] * rank * cut[2]
    return first, second


def bytes_sent(shapes: Sequence[Sequence[int]], rank: int, ranks: int) -> int:
    """By one of `ranks` ranks for a bucket of parameters: 2 (N − 1) / N · r (p + q) · 4 for each matrix."""
    return sum(round(2 * 4 * values * (ranks - 1) / ranks) for values in message_values(shapes, rank))


def orthogonalise(rows: Sequence[torch.Tensor]) -> None:
    """Make the r rows of every matrix [k, r, p] orthonormal in place, by Cholesky's factor of their Gram matrices.

    A row that depends on those before it becomes short, a zero row stays zero: never NaN for finite input. All matrices
    share the steps on [r, r], so that many small ones cost few launches. The same bits wherever input, machine and
    number of threads are the same.
    """
    wide = [x.double() for x in rows]  # a Gram matrix squares what is ill-conditioned: fp32 would lose half the digits
    gram = torch.cat([torch.bmm(x, x.mT) for x in wide])
    scale = (gram.diagonal(dim1=-2, dim2=-1) + _FLOOR).rsqrt()
    gram = gram * scale.unsqueeze(-1) * scale.unsqueeze(-2)
    gram.diagonal(dim1=-2, dim2=-1).add_(_RIDGE)
    lower = torch.linalg.cholesky_ex(gram).L  # "ex": NaN in a gradient that isn't finite, rather than an error
    inverse = torch.linalg.solve_triangular(lower, torch.diag_embed(scale), upper=False)
    for x, x_wide, factor in zip(rows, wide, inverse.split([x.shape[0] for x in rows]), strict=True):
        x.copy_(torch.bmm(factor, x_wide))


def first_directions(name: str, k: int, r: int, q: int) -> torch.Tensor:
    """Q before a parameter's first step, fp32 [k, r, q] on the CPU: random by its name, the same on every rank."""
    digest = hashlib.blake2b(f"low rank/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn((k, r, q), generator=generator)


@dataclass(frozen=True)
class _Matrices:
    """One parameter that is sent as factors: views of the buffers that its numbers lie in."""

    span: Span
    gradient: torch.Tensor  # [k, p, q], in the bucket
    p: torch.Tensor  # [k, r, p], in the first message
    q: torch.Tensor  # [k, r, q], in the second
    own_q: torch.Tensor  # this rank's, before the sum
    last_q: torch.Tensor  # the sum of the last step that was taken: what the power iteration goes on from
    first: torch.Tensor  # directions where there is none

    def directions(self) -> torch.Tensor:
        """Unit rows, [k, r, q]. Those that a gradient of zero or of lower rank has lost start again."""
        length = torch.linalg.vector_norm(self.last_q, dim=2, keepdim=True)
        return torch.where(length > _LOST * length.amax(1, keepdim=True), self.last_q / length, self.first)


class LowRankReduction:
    """Sums a bucket's fp32 buffer [n] over an axis, of low rank where that is worth it: a `Reduction`.

    What isn't sent as factors travels exactly, in the first message. axes: of the same ranks, one for each of the two
    messages: communicators that nobody else uses. n: for an int8 residual a multiple of 256. The residual is what this
    rank's own factors miss of its own gradient; so it is known while the second message travels, and smaller than what
    the mean misses.

    Every rank does the same operations on the same sums: results are bit-identical on machines of one kind. Sums run in
    the backend's order.
    """

    def __init__(
        self, buffer_n: torch.Tensor, spans: Sequence[Span], axes: tuple[Axis, Axis], options: CompressionOptions
    ):
        self._buffer, self._spans, self._axes, self._rank = buffer_n, spans, axes, options.rank
        n, device = buffer_n.numel(), buffer_n.device
        shapes = [span.shape for span in spans]
        self.bytes_sent = bytes_sent(shapes, options.rank, axes[0].size)
        self.statistics, self.clock = no_statistics(device), Stopwatch(device)
        self._feedback = ErrorFeedback(n, options.residual_dtype, device, options.decay)
        self._first, self._second = (torch.zeros(m, device=device) for m in message_values(shapes, options.rank))
        self._own_q, self._last_q = torch.zeros_like(self._second), torch.zeros_like(self._second)
        self._matrices = self._lay_out()
        self._exact = [span for span in spans if matrices(span.shape, options.rank) is None]
        exact = sum(span.shape.numel() for span in self._exact)
        self._exact_message = self._first[self._first.numel() - exact :]
        self._total: torch.Tensor | None = None  # M of all parameters, from phase 1 to 3; then the residual
        self._next_residual: torch.Tensor | None = None
        self._work: Work | None = None
        self._summed = False
        self.phases: list[Callable[[], None]] = [self._send_p, self._send_q, self._decode] if n else []

    def commit(self) -> None:
        self._feedback.commit()
        if self._summed:
            self._last_q.copy_(self._second)
        self._summed = False

    def discard(self) -> None:
        self._feedback.discard()
        self._summed = False

    def rescale(self, factor: float) -> None:
        self._feedback.rescale(factor)

    def kept(self) -> dict[str, torch.Tensor]:
        """The residual, and as "low_rank/<name>" the last Q, [k, r, q]; zeros there start afresh."""
        kept = kept_residual(self._feedback, self._spans)
        return kept | {f"low_rank/{m.span.name}": m.last_q for m in self._matrices.values()}

    def _lay_out(self) -> dict[str, _Matrices]:
        laid, start_p, start_q = {}, 0, 0
        for span in self._spans:
            cut = matrices(span.shape, self._rank)
            if cut is None:
                continue
            k, p, q = cut
            stop_p, stop_q = start_p + k * self._rank * p, start_q + k * self._rank * q
            second, own, last = (
                x[start_q:stop_q].view(k, self._rank, q) for x in (self._second, self._own_q, self._last_q)
            )
            laid[span.name] = _Matrices(
                span,
                gradient=self._buffer[span.start : span.stop].view(cut),
                p=self._first[start_p:stop_p].view(k, self._rank, p),
                q=second,
                own_q=own,
                last_q=last,
                first=first_directions(span.name, k, self._rank, q).to(self._buffer.device),
            )
            start_p, start_q = stop_p, stop_q
        return laid

    def _send_p(self) -> None:
        """Phase 1: M = gradient + residual; P = M Q."""
        self.clock.reset()
        self.clock.start("encode")
        residual, self._next_residual = (None if x is None else x.view(-1) for x in self._feedback.open(1))
        kept_as_it_is = self._next_residual is not None and self._next_residual.dtype == torch.float32
        self._total = whole = self._next_residual if kept_as_it_is else torch.zeros_like(self._buffer)
        assert whole is not None
        squares = []
        for span in self._spans:  # each in a CPU's cache for all passes: 32 matrices of 1 MiB take 14 ms instead of 20
            gradient, total = self._buffer[span.start : span.stop], whole[span.start : span.stop]
            if residual is None:
                total.copy_(gradient)
            else:
                torch.add(gradient, residual[span.start : span.stop], out=total)
            squares.append(torch.dot(total, total))
            if span.name in self._matrices:
                m = self._matrices[span.name]
                torch.bmm(m.directions(), total.view(m.gradient.shape).mT, out=m.p)
        if self._exact:
            exact = [whole[span.start : span.stop] for span in self._exact]
            torch.cat(exact, out=self._exact_message)
            torch._foreach_zero_(exact)  # nothing of them is left for the next step
        square = torch.stack(squares).sum()
        # A sum of squares that is finite has no summand that isn't: a pass less. A GPU would have to be waited for.
        if self._buffer.is_cuda or not square.isfinite():
            not_finite = (~self._buffer.isfinite()).sum()
        else:
            not_finite = torch.zeros_like(square)
        self.statistics = torch.stack([square.double(), square.double(), not_finite.double()])
        self.clock.stop("encode")
        self._launch(self._first, self._axes[0])

    def _send_q(self) -> None:
        """Phase 2: P orthonormal; Q = Mᵀ P."""
        self._land()
        self.clock.start("encode")
        if self._matrices:
            orthogonalise([m.p for m in self._matrices.values()])
        for m in self._matrices.values():
            torch.bmm(m.p, self._whole(m), out=m.q)
        self._own_q.copy_(self._second)
        self.clock.stop("encode")
        self._launch(self._second, self._axes[1])

    def _decode(self) -> None:
        """Phase 3: residual = M − P Qᵀ of this rank, while Q travels; then the sum, P Qᵀ of all."""
        assert self._total is not None
        squares = [torch.zeros((), device=self._buffer.device)]
        for m in self._matrices.values():
            total = self._whole(m)
            total.baddbmm_(m.p.mT, m.own_q, alpha=-1)
            squares.append(torch.dot(total.view(-1), total.view(-1)))
        self.statistics[1] = torch.stack(squares).sum()
        if self._next_residual is not None and self._next_residual is not self._total:
            self._next_residual.copy_(self._total)
        self._feedback.close()
        self._total = self._next_residual = None
        self._land()
        self.clock.start("decode")
        for m in self._matrices.values():
            torch.bmm(m.p.mT, m.q, out=m.gradient)
        if self._exact:
            summed = self._exact_message.split([span.shape.numel() for span in self._exact])
            torch._foreach_copy_([self._buffer[span.start : span.stop] for span in self._exact], summed)
        self._summed = True
        self.clock.stop("decode")

    def _whole(self, m: _Matrices) -> torch.Tensor:
        """M of one parameter, [k, p, q]; after phase 3 its residual."""
        assert self._total is not None
        return self._total[m.span.start : m.span.stop].view(m.gradient.shape)

    def _launch(self, message: torch.Tensor, axis: Axis) -> None:
        self.clock.start("wire")
        if message.numel():
            self._work = all_reduce_(message, axis, async_op=True)

    def _land(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
        self.clock.stop("wire")
