"""Grouped matrix product: each run of rows times the matrix of its group, as in a mixture of experts.

Lives here: one op and its gradients. Imports torch only. Shapes: r rows, k inner size, n outer size, g groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F


def grouped_matmul_reference(x_rk: torch.Tensor, w_gnk: torch.Tensor, ends_g: torch.Tensor) -> torch.Tensor:
    """The same as `grouped_matmul`, by autograd, a group at a time."""
    return torch.cat([x @ w.t() for x, w in zip(_split(x_rk, ends_g), w_gnk, strict=True)])


def grouped_product(x_rk: torch.Tensor, w_gkn: torch.Tensor, ends_g: torch.Tensor) -> torch.Tensor:
    """y[i] = x[i] @ w[group of i]: [r, k] x [g, k, n] -> [r, n]; w may be transposed. Not differentiable.

    ends_g: int32 [g], the row after each group's last, so ends_g[-1] == r; groups may be empty. x and w share a dtype.
    On CUDA one kernel (fp32, bf16, fp16) where torch can align the sizes; else a product for each group.
    """
    if x_rk.device.type == "cuda" and x_rk.shape[0] and _aligned(x_rk, x_rk.shape[1], w_gkn.shape[2]):
        return F.grouped_mm(x_rk, w_gkn, offs=ends_g)
    y_rn = x_rk.new_empty((x_rk.shape[0], w_gkn.shape[2]))
    for y, x, w in zip(_split(y_rn, ends_g), _split(x_rk, ends_g), w_gkn.unbind(), strict=True):
        torch.mm(x, w, out=y)
    return y_rn


def grouped_weight_gradient(
    grad_rn: torch.Tensor, x_rk: torch.Tensor, ends_g: torch.Tensor, total_gnk: torch.Tensor | None = None
) -> torch.Tensor:
    """Σ over a group's rows of grad ⊗ x: [r, n] x [r, k] -> [g, n, k], added to `total_gnk` in place where given."""
    if grad_rn.device.type == "cuda" and x_rk.shape[0] and _aligned(x_rk, x_rk.shape[1], grad_rn.shape[1]):
        gradient_gnk = F.grouped_mm(grad_rn.t(), x_rk, offs=ends_g)
        return gradient_gnk if total_gnk is None else total_gnk.add_(gradient_gnk)
    if total_gnk is None:
        total_gnk = x_rk.new_zeros((ends_g.shape[0], grad_rn.shape[1], x_rk.shape[1]))
    for total, grad, x in zip(total_gnk.unbind(), _split(grad_rn, ends_g), _split(x_rk, ends_g), strict=True):
        total.addmm_(grad.t(), x)
    return total_gnk


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_rk: torch.Tensor, w_gnk: torch.Tensor, ends_g: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_rk, w_gnk, ends_g)
        return grouped_product(x_rk, w_gnk.transpose(-2, -1), ends_g)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x_rk, w_gnk, ends_g = ctx.saved_tensors
        grad_rn = grads[0].contiguous()
        grad_x = grouped_product(grad_rn, w_gnk, ends_g) if ctx.needs_input_grad[0] else None
        grad_w = grouped_weight_gradient(grad_rn, x_rk, ends_g) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, None


def grouped_matmul(x_rk: torch.Tensor, w_gnk: torch.Tensor, ends_g: torch.Tensor) -> torch.Tensor:
    """y[i] = w[group of i] @ x[i]: [r, k] x [g, n, k] -> [r, n], differentiable in x and w. See `grouped_product`."""
    return _GroupedMatmul.apply(x_rk.contiguous(), w_gnk.contiguous(), ends_g)


def _split(x: torch.Tensor, ends_g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A view of each group's rows. Reads `ends_g` on the host."""
    ends = ends_g.tolist()
    return x.split([end - start for start, end in zip([0, *ends], ends, strict=False)])


def _aligned(x: torch.Tensor, *sizes: int) -> bool:
    """torch's grouped product wants rows of a multiple of 16 bytes."""
    return all(size * x.element_size() % 16 == 0 for size in sizes)
