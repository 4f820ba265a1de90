"""Grouped matrix product against a loop over groups, forward and backward, at the sizes where grouping goes wrong."""

from __future__ import annotations

import pytest
import torch

from kernels.grouped_matmul import _group_order, _put_back, grouped_matmul, grouped_matmul_reference

# r rows a run; k inner; n outer. Aligned sizes take torch's grouped product, odd ones the reference path.
SIZES = {
    "aligned": ([5, 1, 9, 3], 16, 24),
    "odd inner": ([5, 1, 9, 3], 7, 24),
    "odd outer": ([5, 1, 9, 3], 16, 9),
    "empty groups at both ends and inside": ([0, 7, 0, 0, 4, 0], 8, 16),
    "all rows in the last group": ([0, 0, 11], 8, 8),
    "one group": ([13], 8, 16),
    "one row": ([0, 1], 8, 16),
    "no rows": ([0, 0, 0], 8, 16),
    "no rows, odd": ([0, 0, 0], 5, 3),
}
RUNS = {"two of three groups": [5, 0, 2, 1, 4, 3], "three of two": [0, 0, 7, 2, 0, 5], "empty": [0] * 6}
# Relative to the tensor's norm; against fp64, so that it doesn't matter how the reference rounds.
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def close(found: torch.Tensor, expected: torch.Tensor, bound: float) -> bool:
    return bool((found.double() - expected).norm() <= bound * expected.norm())


def product_and_gradients(
    op: object, x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = op(x, w, ends)  # type: ignore[operator]
    y.backward(grad)
    assert x.grad is not None and w.grad is not None
    return y.detach(), x.grad, w.grad


def loop_in_double(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    group_of_row = torch.searchsorted(ends, torch.arange(x.shape[0]), right=True) % w.shape[0]
    return torch.einsum("rk,rnk->rn", x, w[group_of_row])


@pytest.mark.parametrize("op", [grouped_matmul, grouped_matmul_reference])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_each_row_meets_the_matrix_of_its_group(size: str, dtype: torch.dtype, op: object) -> None:
    rows, k, n = SIZES[size]
    ends = torch.tensor(rows).cumsum(0).to(torch.int32)
    x = torch.randn(sum(rows), k).to(dtype)
    w = torch.randn(len(rows), n, k).to(dtype)
    grad = torch.randn(sum(rows), n).to(dtype)
    found = product_and_gradients(op, x, w, ends, grad)
    expected = product_and_gradients(loop_in_double, x.double(), w.double(), ends, grad.double())
    for name, a, b in zip(("product", "gradient of x", "gradient of w"), found, expected, strict=True):
        assert a.dtype == dtype and a.shape == b.shape, name
        assert close(a, b, BOUNDS[dtype]), f"{name} is off by {(a.double() - b).norm() / b.norm():.1e}"
    for group, count in enumerate(rows):
        if count == 0:
            assert not found[2][group].any(), f"group {group} has no rows, so its matrix has no gradient"


@pytest.mark.parametrize("op", [grouped_matmul, grouped_matmul_reference])
@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("runs", RUNS)
def test_runs_take_their_groups_in_turn(runs: str, groups: int, op: object) -> None:
    rows = RUNS[runs]
    ends = torch.tensor(rows).cumsum(0).to(torch.int32)
    x, w, grad = torch.randn(sum(rows), 5), torch.randn(groups, 3, 5), torch.randn(sum(rows), 3)
    found = product_and_gradients(op, x, w, ends, grad)
    expected = product_and_gradients(loop_in_double, x.double(), w.double(), ends, grad.double())
    assert all(close(a, b, 1e-6) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("groups", [2, 3, 6])
@pytest.mark.parametrize("runs", RUNS)
def test_rows_of_many_runs_are_put_together_by_group_and_back(runs: str, groups: int) -> None:
    """What one kernel for all groups needs, on devices that have one."""
    rows = RUNS[runs]
    ends = torch.tensor(rows).cumsum(0).to(torch.int32)
    group = torch.repeat_interleave(torch.arange(len(rows)) % groups, torch.tensor(rows))
    order, group_ends = _group_order(ends, groups, sum(rows))
    assert group[order].tolist() == sorted(group.tolist())
    assert group_ends.tolist() == [int((group <= g).sum()) for g in range(groups)] and group_ends.dtype == torch.int32
    x = torch.randn(sum(rows), 2)
    assert torch.equal(_put_back(x[order], order), x)


@pytest.mark.parametrize("k, n", [(16, 8), (15, 8)])
def test_inputs_and_gradients_in_any_memory_order_are_taken(k: int, n: int) -> None:
    ends = torch.tensor([4, 4, 10], dtype=torch.int32)
    x, w = torch.randn(k, 10).t(), torch.randn(3, k, n).transpose(1, 2)
    for grad in (torch.randn(1, n).expand(10, n), torch.randn(n, 10).t(), torch.tensor(1.7).expand(10, n)):
        found = product_and_gradients(grouped_matmul, x, w, ends, grad)
        expected = product_and_gradients(loop_in_double, x.double(), w.double(), ends, grad.double())
        assert all(close(a, b, 1e-6) for a, b in zip(found, expected, strict=True)), grad.stride()


@pytest.mark.parametrize("k", [16, 15])
def test_only_the_wanted_gradient_is_computed(k: int) -> None:
    ends = torch.tensor([3, 8], dtype=torch.int32)
    x, w = torch.randn(8, k), torch.randn(2, 8, k)
    grouped_matmul(x, w.requires_grad_(), ends).sum().backward()
    assert x.grad is None and w.grad is not None and w.grad.any()
    w.grad, w.requires_grad = None, False
    grouped_matmul(x.requires_grad_(), w, ends).sum().backward()
    assert w.grad is None and x.grad is not None and x.grad.any()
