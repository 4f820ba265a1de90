"""PowerSGD: what it keeps of a gradient, what it never touches, and that nothing ends in NaN or in zero for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from parallel.compression.lanes import run_inline
from parallel.compression.low_rank import LowRankReduction, bytes_sent, matrices, orthogonalise
from parallel.compression.options import CompressionOptions, ResidualName
from parallel.compression.reduction import Span
from parallel.mesh import Axis, Layout, Mesh

RunRanks = Callable[..., list[Any]]
SHAPES = ((64, 48), (3, 40, 100), (7,), (5, 5), (30, 10, 3, 3))
"""A matrix, experts, a vector, a matrix too small to be worth it, a convolution."""


def reduction_of(
    shapes: Sequence[Sequence[int]], rank: int, axes: tuple[Axis, Axis] | None = None, residual: ResidualName = "fp32"
) -> tuple[torch.Tensor, list[Span], LowRankReduction]:
    """A bucket of these parameters, its buffer padded as an int8 residual wants it."""
    spans, start = [], 0
    for i, shape in enumerate(shapes):
        spans.append(Span(f"parameter {i}", torch.Size(shape), start))
        start = -(-spans[-1].stop // 256) * 256
    alone = Axis("alone", (0,), 0)
    buffer = torch.zeros(start)
    options = CompressionOptions("powersgd", rank=rank, residual=residual)
    return buffer, spans, LowRankReduction(buffer, spans, axes or (alone, alone), options)


def fill(buffer: torch.Tensor, spans: Sequence[Span], rank: int | None = None) -> torch.Tensor:
    """Fresh gradients; matrices of this rank. Returns a copy."""
    buffer.zero_()
    for span in spans:
        cut = matrices(span.shape, 4)
        if rank is None or cut is None:
            x = torch.randn(span.shape)
        else:
            x = torch.randn(cut[0], cut[1], rank) @ torch.randn(cut[0], rank, cut[2])
        buffer[span.start : span.stop] = x.reshape(-1)
    return buffer.clone()


@pytest.mark.parametrize(
    ("shape", "rank", "cut"),
    [
        ((64, 48), 4, (1, 64, 48)),
        ((3, 40, 100), 4, (3, 40, 100)),
        ((30, 10, 3, 3), 4, (1, 30, 90)),
        ((100,), 1, None),
        ((), 1, None),
        ((32, 32), 8, (1, 32, 32)),  # 2 · 8 · (32 + 32) = 32 · 32
        ((32, 31), 8, None),
        ((2, 1000), 1, None),
        ((4, 1000), 1, None),  # 2 · 1004 of 4000 would do, were it not for P
        ((0, 8), 1, None),
    ],
)
def test_what_is_sent_as_factors(shape: tuple[int, ...], rank: int, cut: tuple[int, int, int] | None) -> None:
    expected = cut if shape != (4, 1000) else (1, 4, 1000)
    assert matrices(shape, rank) == expected


def test_bytes_on_the_wire_are_those_of_the_formula() -> None:
    assert bytes_sent([(1000, 2000)], 8, 4) == 2 * 3 / 4 * 8 * (1000 + 2000) * 4
    assert bytes_sent([(6, 100, 200)], 4, 2) == 6 * 4 * (100 + 200) * 4
    assert bytes_sent([(100, 200), (77,)], 4, 2) == 4 * (100 + 200) * 4 + 77 * 4
    assert bytes_sent([(100, 200)], 4, 1) == 0 == bytes_sent([], 4, 2)


@pytest.mark.parametrize(("k", "r", "p"), [(1, 1, 1), (2, 3, 17), (5, 8, 300), (1, 8, 8)])
def test_rows_become_orthonormal(k: int, r: int, p: int, seed: int) -> None:
    torch.manual_seed(seed)
    rows = torch.randn(k, r, p) * torch.logspace(-12, 12, r).unsqueeze(-1)  # of very different length, as P's are
    basis = torch.linalg.qr((rows / rows.norm(dim=-1, keepdim=True)).double().mT).Q
    orthogonalise([rows])
    torch.testing.assert_close(rows @ rows.mT, torch.eye(r).expand(k, r, r), rtol=0, atol=1e-5)
    wide = rows.double()
    torch.testing.assert_close(wide @ basis @ basis.mT, wide, rtol=0, atol=1e-5)  # they span what they spanned


def test_zero_and_dependent_rows_stay_short(seed: int) -> None:
    torch.manual_seed(seed)
    rows = torch.randn(3, 4, 50)
    rows[0] = 0.0
    rows[1, 2] = 0.0
    rows[1, 3] = 2 * rows[1, 0] - rows[1, 1]
    other = torch.randn(1, 4, 9)
    orthogonalise([rows, other])
    length = rows.norm(dim=-1)
    assert (rows[0] == 0).all() and (rows[1, 2] == 0).all() and length[1, 3] < 0.5
    torch.testing.assert_close(length[2], torch.ones(4))
    torch.testing.assert_close(length[1, :2], torch.ones(2))
    torch.testing.assert_close(other[0] @ other[0].mT, torch.eye(4), rtol=0, atol=1e-5)


@pytest.mark.parametrize("residual", ["none", "fp32", "bf16", "int8"])
def test_zero_gradients_give_zeros_and_are_left_again(residual: ResidualName, seed: int) -> None:
    torch.manual_seed(seed)
    buffer, spans, reduction = reduction_of(SHAPES, 4, residual=residual)
    for _ in range(3):
        buffer.zero_()
        run_inline(reduction.phases)
        reduction.commit()
        assert (buffer == 0).all() and all((kept == 0).all() for kept in reduction.kept().values())
    gradient = fill(buffer, spans, rank=3)
    run_inline(reduction.phases)
    assert (buffer - gradient).norm() < 1e-4 * gradient.norm()


@pytest.mark.parametrize("residual", ["none", "fp32", "bf16", "int8"])
def test_a_gradient_of_no_more_than_its_rank_is_exact(residual: ResidualName, seed: int) -> None:
    torch.manual_seed(seed)
    buffer, spans, reduction = reduction_of(SHAPES, 4, residual=residual)
    for true_rank in (1, 3):  # the second has directions that the first has lost
        gradient = fill(buffer, spans, true_rank)
        run_inline(reduction.phases)
        reduction.commit()
        assert (buffer - gradient).norm() < 1e-3 * gradient.norm()
        squares, errors, not_finite = reduction.statistics.tolist()
        assert squares == pytest.approx(float(gradient.double().square().sum()), rel=1e-3)
        assert errors < 1e-6 * squares and not_finite == 0
    gradient = fill(buffer, spans, 4)
    for _ in range(5):
        buffer.copy_(gradient)
        run_inline(reduction.phases)
        reduction.commit()
    assert (buffer - gradient).norm() < (1e-4 if residual in ("fp32", "none") else 1e-2) * gradient.norm()


def test_vectors_and_small_matrices_are_left_alone(seed: int) -> None:
    torch.manual_seed(seed)
    buffer, spans, reduction = reduction_of(SHAPES, 4)
    for _ in range(3):
        gradient = fill(buffer, spans)
        run_inline(reduction.phases)
        reduction.commit()
        for span in spans[2:4]:
            assert torch.equal(buffer[span.start : span.stop], gradient[span.start : span.stop])
            assert (reduction.kept()[span.name] == 0).all()


def test_the_warm_start_finds_the_best_approximation(seed: int) -> None:
    """Of one gradient again and again: the error ends at that of the SVD, which the first step's is far from."""
    torch.manual_seed(seed)
    buffer, spans, reduction = reduction_of([(80, 60)], 4, residual="none")
    left, right = torch.linalg.qr(torch.randn(80, 60)).Q, torch.linalg.qr(torch.randn(60, 60)).Q
    singular = 0.7 ** torch.arange(60.0)
    gradient = (left * singular) @ right
    best = float(singular[4:].norm())
    errors = []
    for _ in range(12):
        buffer[: gradient.numel()] = gradient.view(-1)
        run_inline(reduction.phases)
        reduction.commit()
        errors.append(float((buffer[: gradient.numel()].view_as(gradient) - gradient).norm()))
        assert reduction.statistics[1].sqrt() == pytest.approx(errors[-1], rel=1e-4)
    assert best * 0.999 < errors[-1] < best * 1.01 < errors[0]


def test_values_that_are_not_finite_are_counted_and_leave_with_their_step(seed: int) -> None:
    torch.manual_seed(seed)
    buffer, spans, reduction = reduction_of(SHAPES, 4)
    fill(buffer, spans)
    run_inline(reduction.phases)
    reduction.commit()
    before = {name: kept.clone() for name, kept in reduction.kept().items()}
    fill(buffer, spans)
    buffer[3], buffer[70], buffer[spans[2].start] = torch.nan, torch.inf, -torch.inf
    run_inline(reduction.phases)
    assert reduction.statistics[2] == 3 and not buffer[: spans[0].stop].isfinite().all()
    reduction.discard()
    reduction.commit()  # there is nothing to commit
    assert all(torch.equal(kept, before[name]) for name, kept in reduction.kept().items())
    fill(buffer, spans)
    run_inline(reduction.phases)
    reduction.commit()
    assert buffer.isfinite().all() and reduction.statistics[2] == 0
    fill(buffer, spans)
    buffer.mul_(1e25)  # finite, though its square isn't in fp32
    run_inline(reduction.phases)
    assert reduction.statistics[2] == 0


def on_ranks(seed: int, residual: ResidualName) -> dict[str, Any]:
    """Some steps; this rank's results, and what it is off by in the sum over steps."""
    mesh = Mesh.create(Layout())
    axes = (mesh.communicators("dp_cp", "there")[0], mesh.communicators("dp_cp", "back")[0])
    buffer, spans, reduction = reduction_of(SHAPES, 4, axes, residual)
    torch.manual_seed(seed + mesh.rank)
    results, gradients = [], torch.zeros_like(buffer)
    for _ in range(4):
        gradients += fill(buffer, spans)
        run_inline(reduction.phases)
        reduction.commit()
        results.append(buffer.clone())
    sent = sum(mesh.ledger.bytes(axis.name) for axis in axes[:1])
    kept = {name: x.clone() for name, x in reduction.kept().items()}

    # What was kept is all that a new reduction needs to go on alike.
    other_buffer, _, other = reduction_of(SHAPES, 4, axes, residual)
    for name, part in other.kept().items():
        part.copy_(kept[name])
    again = fill(buffer, spans)
    run_inline(reduction.phases)
    other_buffer.copy_(again)
    run_inline(other.phases)
    residual_n = torch.zeros_like(buffer)
    for span in spans:
        residual_n[span.start : span.stop] = reduction_residual(kept, span)
    return {
        "results": results,
        "gradients": gradients,
        "residual": residual_n,
        "sent": sent,
        "formula": 4 * reduction.bytes_sent,
        "resumed": torch.equal(buffer, other_buffer),
    }


def reduction_residual(kept: dict[str, torch.Tensor], span: Span) -> torch.Tensor:
    """fp32, of one parameter; of int8 its codes times their blocks' scales."""
    codes = kept[span.name].float()
    if f"{span.name}/scale" in kept:
        scale = kept[f"{span.name}/scale"].repeat_interleave(256)[: codes.numel()]
        return kept[span.name].view(torch.int8).float() * scale
    return codes


@pytest.mark.parametrize(("ranks", "residual"), [(2, "fp32"), (3, "fp32"), (2, "int8")])
def test_ranks_agree_and_nothing_is_lost(run_ranks: RunRanks, seed: int, ranks: int, residual: ResidualName) -> None:
    found = run_ranks(ranks, on_ranks, seed, residual)
    for one in found:
        assert all(torch.equal(a, b) for a, b in zip(one["results"], found[0]["results"], strict=True))
        assert one["sent"] == one["formula"] and one["resumed"]
    gradients, left = (sum(one[what].double() for one in found) for what in ("gradients", "residual"))
    decoded = sum(result.double() for result in found[0]["results"])
    off = (decoded + left - gradients).norm() / gradients.norm()
    assert off < (1e-6 if residual == "fp32" else 2e-2)
    assert left.norm() > 0.1 * gradients.norm()  # the codec isn't exact here, so feedback has something to do
