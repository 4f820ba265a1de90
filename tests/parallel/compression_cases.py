"""One bucket through some steps of a compressed reduction, on ranks and on paper; what properties and processes share.

`run_case` runs on a rank; `simulate` computes what all ranks should end with, in one process, from gradients alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch

from parallel.compression.codecs import Codec, codec_of
from parallel.compression.compression import Compression
from parallel.compression.feedback import ErrorFeedback
from parallel.compression.lanes import run_inline
from parallel.compression.options import CompressionOptions
from parallel.compression.reduction import Span
from parallel.mesh import Layout, Mesh

Kind = Literal["normal", "heavy", "zero", "rows", "tiny", "huge"]
Ending = Literal["commit", "discard", "not finite"]


@dataclass(frozen=True)
class Case:
    """options; ranks; shapes and kinds of the bucket's parameters; how each step ends; seed of the data.

    "rows": half of the rows are never touched. "not finite": the last rank's gradient has a NaN or an Inf in each
    parameter. reverse: rank i has what rank N − 1 − i would have.
    """

    options: CompressionOptions
    ranks: int
    shapes: tuple[tuple[int, ...], ...]
    kinds: tuple[Kind, ...]
    endings: tuple[Ending, ...]
    seed: int
    reverse: bool = False


@dataclass
class Outcome:
    """spans: the bucket's parameters. Of each step: the sum, what is kept afterwards, how many values weren't finite.
    Bytes of all steps.
    """

    spans: list[Span]
    sums: list[torch.Tensor] = field(default_factory=list)
    kept: list[dict[str, torch.Tensor]] = field(default_factory=list)
    not_finite: list[int] = field(default_factory=list)
    bytes_counted: int = 0
    bytes_promised: int = 0


def padded(values: int, granule: int) -> int:
    return -(-values // granule) * granule


def spans_of(case: Case, granule: int) -> list[Span]:
    spans: list[Span] = []
    for i, shape in enumerate(case.shapes):
        spans.append(Span(f"layer {i}", torch.Size(shape), padded(spans[-1].stop if spans else 0, granule)))
    return spans


def gradients(case: Case, spans: list[Span], n: int) -> torch.Tensor:
    """[steps, ranks, n]; padding 0."""
    made = torch.zeros(len(case.endings), case.ranks, n)
    generator = torch.Generator().manual_seed(case.seed)
    for span, kind in zip(spans, case.kinds, strict=True):
        x = torch.randn((len(case.endings), case.ranks, span.shape.numel()), generator=generator)
        if kind == "heavy":
            x = x / (torch.rand(x.shape, generator=generator) + 1e-3)
        if kind == "rows" and len(span.shape) > 1:
            x.view(*x.shape[:2], span.shape[0], -1)[:, :, ::2] = 0.0
        x *= {"zero": 0.0, "tiny": 1e-20, "huge": 1e12}.get(kind, 1.0)
        made[:, :, span.start : span.stop] = x
    for step, ending in enumerate(case.endings):
        if ending == "not finite":
            for i, span in enumerate(span for span in spans if span.shape.numel()):
                made[step, -1, span.start] = torch.nan if i % 2 else torch.inf
    return made.flip(1) if case.reverse else made


def run_case(case: Case, mesh: Mesh | None = None) -> Outcome:
    """On each rank."""
    mesh = mesh or Mesh.create(Layout())
    compression = Compression(case.options, mesh)
    spans = spans_of(case, compression.granule)
    buffer = torch.zeros(compression.padded(spans[-1].stop if spans else 0, mesh.dp_cp))
    reduction = compression.add(buffer, spans, mesh.dp_cp)
    outcome = Outcome(spans)
    for gradient, ending in zip(gradients(case, spans, buffer.numel()), case.endings, strict=True):
        buffer.copy_(gradient[mesh.rank])
        before = mesh.ledger.bytes()
        run_inline(reduction.phases)
        outcome.bytes_counted += mesh.ledger.bytes() - before
        outcome.bytes_promised += reduction.bytes_sent
        outcome.sums.append(buffer.clone())
        outcome.not_finite.append(int(reduction.statistics[2]))
        if ending == "commit":
            reduction.commit()
        else:
            reduction.discard()
        outcome.kept.append({name: x.clone() for name, x in reduction.kept().items()})
    return outcome


class Shot:
    """One encoding of a simulated rank, with its residual."""

    def __init__(self, case: Case, codec: Codec, n: int, padding: list[slice] | None = None):
        options = case.options
        self.codec, self.padding = codec, padding or []
        self.feedback = ErrorFeedback(n, options.residual_dtype, torch.device("cpu"), options.decay)

    def __call__(self, values: torch.Tensor, rows: int) -> torch.Tensor:
        """The wire, [rows, w]."""
        x_rm = values.reshape(rows, -1).clone()
        wire_rw = torch.zeros((rows, self.codec.wire_bytes(x_rm.shape[1])), dtype=torch.uint8)
        residual, new_residual = self.feedback.open(rows)
        self.codec.encode(x_rm, wire_rw, residual, new_residual)
        for part in self.padding if new_residual is not None else ():
            new_residual.view(-1)[part] = 0
        self.feedback.close()
        return wire_rw


def simulate(case: Case) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Of each step: the sum on every rank, and all residuals: of each rank's gradient, of each part, of each region.

    Nobody owns anything here: sums run over ranks in order, within a block of `inner_size` ranks, then over blocks.
    """
    codec = codec_of(case.options)
    whole = case.options.name == "topk" and case.options.topk_transport == "gather"
    int8 = case.options.residual_dtype == "int8"
    granule = math.lcm(codec.granule, 256) if int8 else codec.granule
    spans = spans_of(case, granule)
    n = padded(spans[-1].stop if spans else 0, granule * (1 if whole else case.ranks))
    inner = case.options.inner_size if case.options.inner_size < case.ranks else 1
    blocks = case.ranks // inner
    one_hop = whole or inner == 1
    words = [slice(span.stop, padded(span.stop, 32)) for span in spans]  # where padding shares one with values
    first = [Shot(case, codec, n, words) for _ in range(case.ranks)]
    part = [[Shot(case, codec, n // inner) for _ in range(inner)] for _ in range(0 if one_hop else blocks)]
    region = [Shot(case, codec, n // case.ranks) for _ in range(0 if whole else case.ranks)]
    shots = [*first, *(shot for row in part for shot in row), *region]

    def added(wires: list[torch.Tensor], m: int) -> torch.Tensor:
        """In fp32, one after the other."""
        total, row = torch.zeros(m), torch.zeros((1, m))
        for wire in wires:
            codec.decode(wire.view(1, -1), row)
            total = total + row[0]
        return total

    def reduced(gradient: torch.Tensor) -> torch.Tensor:
        if whole:
            return added([shot(x, 1)[0] for shot, x in zip(first, gradient, strict=True)], n)
        if one_hop:
            wires = [shot(x, case.ranks) for shot, x in zip(first, gradient, strict=True)]
            sums = [added([wire[i] for wire in wires], n // case.ranks) for i in range(case.ranks)]
        else:
            wires = [shot(x, inner) for shot, x in zip(first, gradient, strict=True)]
            parts = [
                [added([wires[x * inner + k][i] for k in range(inner)], n // inner) for i in range(inner)]
                for x in range(blocks)
            ]
            again = [[part[x][i](parts[x][i], blocks) for i in range(inner)] for x in range(blocks)]
            sums = [
                added([again[x][i][j] for x in range(blocks)], n // case.ranks)
                for i in range(inner)
                for j in range(blocks)
            ]
        out = torch.zeros((case.ranks, n // case.ranks))
        codec.decode(torch.cat([shot(x, 1) for shot, x in zip(region, sums, strict=True)]), out)
        return out.view(-1)

    results: list[torch.Tensor] = []
    residuals: list[list[torch.Tensor]] = []
    for gradient, ending in zip(gradients(case, spans, n), case.endings, strict=True):
        results.append(reduced(gradient))
        for shot in shots:
            if ending == "commit":
                shot.feedback.commit()
            else:
                shot.feedback.discard()
        residuals.append([shot.feedback.value() for shot in shots])
    return results, residuals


def residual_sum(kept: dict[str, torch.Tensor], spans: list[Span], n: int) -> torch.Tensor:
    """A rank's first residual as a buffer [n], fp32 or bf16 ones."""
    whole = torch.zeros(n)
    for span in spans:
        whole[span.start : span.stop] = kept.get(span.name, torch.zeros(span.shape.numel())).float()
    return whole
