"""Grouped matrix product: each run of rows times the matrix of its group, as in a mixture of experts.

Lives here: one op. Imports torch and `matmul`. Shapes: r rows, k inner size, n outer size, g groups, u runs of rows.
Run i is of group i % g, so rows that come from several ranks, sorted by group within each, needn't be sorted again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

from kernels.matmul import product_dtype

AddGradient = Callable[[Callable[[torch.Tensor | None], torch.Tensor]], torch.Tensor | None]
"""Takes a weight's gradient as a function: called with None it returns the gradient, with a tensor it adds to that."""


def grouped_matmul_reference(x_rk: torch.Tensor, w_gnk: torch.Tensor, ends_u: torch.Tensor) -> torch.Tensor:
    """The same as `grouped_matmul`, by autograd, a run at a time."""
    return torch.cat([x @ w.t() for x, w in _by_run(ends_u, w_gnk, x_rk)])


def grouped_matmul(
    x_rk: torch.Tensor, w_gnk: torch.Tensor, ends_u: torch.Tensor, add_gradient: AddGradient | None = None
) -> torch.Tensor:
    """y[i] = w[group of i] @ x[i]: [r, k] x [g, n, k] -> [r, n], differentiable in x and w.

    ends_u: int32 [u], the row after each run's last, so ends_u[-1] == r; u is g or a multiple of it; runs may be empty.
    x and w share a dtype. On CUDA one kernel (fp32, bf16, fp16) where torch can align the sizes, for which rows in more
    runs than groups are put together and back; else a product for each run.
    add_gradient: gets the gradient of w, and what it returns goes to autograd in its place.
    """
    return _GroupedMatmul.apply(x_rk.contiguous(), w_gnk.contiguous(), ends_u, add_gradient)


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_rk: torch.Tensor, w_gnk: torch.Tensor, ends_u: torch.Tensor, add_gradient: AddGradient | None
    ) -> torch.Tensor:
        ctx.order_r = None
        if ends_u.shape[0] > w_gnk.shape[0] and _one_kernel(x_rk, *w_gnk.shape[1:]):
            ctx.order_r, ends_u = _group_order(ends_u, w_gnk.shape[0], x_rk.shape[0])
            x_rk = x_rk[ctx.order_r]
        ctx.save_for_backward(x_rk, w_gnk, ends_u)
        ctx.add_gradient = add_gradient
        return _put_back(_product(x_rk, w_gnk.transpose(-2, -1), ends_u), ctx.order_r)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        x_rk, w_gnk, ends_u = ctx.saved_tensors
        grad_rn = grads[0].contiguous() if ctx.order_r is None else grads[0][ctx.order_r]
        grad_x = _put_back(_product(grad_rn, w_gnk, ends_u), ctx.order_r) if ctx.needs_input_grad[0] else None
        grad_w = None
        if ctx.needs_input_grad[1]:
            x_rk = x_rk.detach()  # a gradient that is computed later must not keep the graph that x came from
            shape = w_gnk.shape

            def gradient(total_gnk: torch.Tensor | None) -> torch.Tensor:
                return _weight_gradient(grad_rn, x_rk, ends_u, total_gnk, shape)

            grad_w = gradient(None) if ctx.add_gradient is None else ctx.add_gradient(gradient)
        return grad_x, grad_w, None, None


def _group_order(ends_u: torch.Tensor, groups: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The order in which rows of many runs lie by group, int64 [r], and the groups' ends, int32 [g]."""
    run_r = torch.searchsorted(ends_u, torch.arange(rows, device=ends_u.device, dtype=ends_u.dtype), right=True)
    sizes_u = ends_u.diff(prepend=ends_u.new_zeros(1))
    ends_g = sizes_u.view(-1, groups).sum(0).cumsum(0).to(torch.int32)
    return (run_r % groups).argsort(stable=True), ends_g


def _put_back(x: torch.Tensor, order_r: torch.Tensor | None) -> torch.Tensor:
    """Rows that were taken in this order, where they were."""
    return x if order_r is None else torch.empty_like(x).index_copy_(0, order_r, x)


def _product(x_rk: torch.Tensor, w_gkn: torch.Tensor, ends_u: torch.Tensor) -> torch.Tensor:
    """y[i] = x[i] @ w[group of i]; w may be transposed."""
    if _one_kernel(x_rk, *w_gkn.shape[1:]):
        return F.grouped_mm(x_rk, w_gkn, offs=ends_u)
    dtype = product_dtype(x_rk)
    y_rn = x_rk.new_empty((x_rk.shape[0], w_gkn.shape[2]), dtype=dtype)
    for y, x, w in _by_run(ends_u, w_gkn.to(dtype), y_rn, x_rk.to(dtype)):
        torch.mm(x, w, out=y)
    return y_rn.to(x_rk.dtype)


def _weight_gradient(
    grad_rn: torch.Tensor,
    x_rk: torch.Tensor,
    ends_u: torch.Tensor,
    total_gnk: torch.Tensor | None,
    shape: torch.Size,
) -> torch.Tensor:
    """Σ over a group's rows of grad ⊗ x: [g, n, k], added to `total_gnk` in place where given."""
    if _one_kernel(x_rk, *shape[1:]):
        gradient_gnk = F.grouped_mm(grad_rn.t(), x_rk, offs=ends_u)
        return gradient_gnk if total_gnk is None else total_gnk.add_(gradient_gnk)
    dtype = product_dtype(x_rk)
    if total_gnk is None:
        total_gnk = x_rk.new_zeros(shape, dtype=dtype)
    for grad, x, total in _by_run(ends_u, total_gnk, grad_rn.to(dtype), x_rk.to(dtype)):
        total.addmm_(grad.t(), x)
    return total_gnk.to(x_rk.dtype)


def _by_run(ends_u: torch.Tensor, matrices: torch.Tensor, *rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """For each run its rows of every tensor, and then its group's matrix; all are views. Reads `ends_u` on the host."""
    ends = ends_u.tolist()
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return zip(*(x.split(sizes) for x in rows), itertools.cycle(matrices.unbind()), strict=False)


def _one_kernel(x: torch.Tensor, *sizes: int) -> bool:
    """Whether torch's grouped product takes these: it wants rows of a multiple of 16 bytes. On a CPU it only loops."""
    return x.device.type == "cuda" and x.shape[0] > 0 and all(n * x.element_size() % 16 == 0 for n in sizes)
