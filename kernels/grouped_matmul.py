"""Grouped matrix product: each run of rows times the matrix of its group, as in a mixture of experts.

Lives here: one op. Imports torch only. Shapes: r rows, k inner size, n outer size, g groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

AddGradient = Callable[[Callable[[torch.Tensor | None], torch.Tensor]], torch.Tensor | None]
"""Takes a weight's gradient as a function: called with None it returns the gradient, with a tensor it adds to that."""


def grouped_matmul_reference(x_rk: torch.Tensor, w_gnk: torch.Tensor, ends_g: torch.Tensor) -> torch.Tensor:
    """The same as `grouped_matmul`, by autograd, a group at a time."""
    return torch.cat([x @ w.t() for x, w in _by_group(ends_g, w_gnk, x_rk)])


def grouped_matmul(
    x_rk: torch.Tensor, w_gnk: torch.Tensor, ends_g: torch.Tensor, add_gradient: AddGradient | None = None
) -> torch.Tensor:
    """y[i] = w[group of i] @ x[i]: [r, k] x [g, n, k] -> [r, n], differentiable in x and w.

    ends_g: int32 [g], the row after each group's last, so ends_g[-1] == r; groups may be empty. x and w share a dtype.
    On CUDA one kernel (fp32, bf16, fp16) where torch can align the sizes; else a product for each group.
    add_gradient: gets the gradient of w, and what it returns goes to autograd in its place.
    """
    return _GroupedMatmul.apply(x_rk.contiguous(), w_gnk.contiguous(), ends_g, add_gradient)


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_rk: torch.Tensor, w_gnk: torch.Tensor, ends_g: torch.Tensor, add_gradient: AddGradient | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x_rk, w_gnk, ends_g)
        ctx.add_gradient = add_gradient
        return _product(x_rk, w_gnk.transpose(-2, -1), ends_g)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        x_rk, w_gnk, ends_g = ctx.saved_tensors
        grad_rn = grads[0].contiguous()
        grad_x = _product(grad_rn, w_gnk, ends_g) if ctx.needs_input_grad[0] else None
        grad_w = None
        if ctx.needs_input_grad[1]:
            x_rk = x_rk.detach()  # a gradient that is computed later must not keep the graph that x came from

            def gradient(total_gnk: torch.Tensor | None) -> torch.Tensor:
                return _weight_gradient(grad_rn, x_rk, ends_g, total_gnk)

            grad_w = gradient(None) if ctx.add_gradient is None else ctx.add_gradient(gradient)
        return grad_x, grad_w, None, None


def _product(x_rk: torch.Tensor, w_gkn: torch.Tensor, ends_g: torch.Tensor) -> torch.Tensor:
    """y[i] = x[i] @ w[group of i]; w may be transposed."""
    if _one_kernel(x_rk, x_rk.shape[1], w_gkn.shape[2]):
        return F.grouped_mm(x_rk, w_gkn, offs=ends_g)
    y_rn = x_rk.new_empty((x_rk.shape[0], w_gkn.shape[2]))
    for y, x, w in _by_group(ends_g, w_gkn, y_rn, x_rk):
        torch.mm(x, w, out=y)
    return y_rn


def _weight_gradient(
    grad_rn: torch.Tensor, x_rk: torch.Tensor, ends_g: torch.Tensor, total_gnk: torch.Tensor | None
) -> torch.Tensor:
    """Σ over a group's rows of grad ⊗ x: [g, n, k], added to `total_gnk` in place where given."""
    if _one_kernel(x_rk, x_rk.shape[1], grad_rn.shape[1]):
        gradient_gnk = F.grouped_mm(grad_rn.t(), x_rk, offs=ends_g)
        return gradient_gnk if total_gnk is None else total_gnk.add_(gradient_gnk)
    if total_gnk is None:
        total_gnk = x_rk.new_zeros((ends_g.shape[0], grad_rn.shape[1], x_rk.shape[1]))
    for grad, x, total in _by_group(ends_g, total_gnk, grad_rn, x_rk):
        total.addmm_(grad.t(), x)
    return total_gnk


def _by_group(ends_g: torch.Tensor, matrices: torch.Tensor, *rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """For each group its rows of every tensor, and then its matrix; all are views. Reads `ends_g` on the host."""
    ends = ends_g.tolist()
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return zip(*(x.split(sizes) for x in rows), matrices.unbind(), strict=True)


def _one_kernel(x: torch.Tensor, *sizes: int) -> bool:
    """Whether torch's grouped product takes these: it wants rows of a multiple of 16 bytes. On a CPU it only loops."""
    return x.device.type == "cuda" and x.shape[0] > 0 and all(n * x.element_size() % 16 == 0 for n in sizes)
