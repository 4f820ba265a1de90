"""Grouped matrix product: each run of rows times the matrix of its group, as in a mixture of experts.

Lives here: one op. Imports torch only. Shapes: r rows, k inner size, n outer size, g groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F


def grouped_matmul_reference(x_rk: torch.Tensor, w_gnk: torch.Tensor, ends_g: torch.Tensor) -> torch.Tensor:
    """The same as `grouped_matmul`, a group at a time; any sizes, reads `ends_g` on the host."""
    starts = [0, *ends_g.tolist()]
    return torch.cat([x_rk[a:b] @ w.t() for a, b, w in zip(starts, starts[1:], w_gnk, strict=False)])


def _aligned(x: torch.Tensor, *sizes: int) -> bool:
    """torch's grouped product wants rows of a multiple of 16 bytes."""
    return all(size * x.element_size() % 16 == 0 for size in sizes)


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_rk: torch.Tensor, w_gnk: torch.Tensor, ends_g: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_rk, w_gnk, ends_g)
        return F.grouped_mm(x_rk, w_gnk.transpose(-2, -1), offs=ends_g)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x_rk, w_gnk, ends_g = ctx.saved_tensors
        grad_rn = grads[0].contiguous()
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = F.grouped_mm(grad_rn, w_gnk, offs=ends_g)
        if ctx.needs_input_grad[1]:
            grad_w = F.grouped_mm(grad_rn.t(), x_rk, offs=ends_g)
        return grad_x, grad_w, None


def grouped_matmul(x_rk: torch.Tensor, w_gnk: torch.Tensor, ends_g: torch.Tensor) -> torch.Tensor:
    """y[i] = w[group of i] @ x[i]: [r, k] x [g, n, k] -> [r, n], differentiable in x and w.

    ends_g: int32 [g], the row after each group's last, so ends_g[-1] == r; groups may be empty. x and w share a dtype
    (fp32, bf16, fp16). Sizes that torch's grouped product can't align take the reference path.
    """
    if x_rk.shape[0] and _aligned(x_rk, x_rk.shape[1], w_gnk.shape[1]):
        # Neither may be transposed: its rows would then be misaligned, whatever its sizes.
        return _GroupedMatmul.apply(x_rk.contiguous(), w_gnk.contiguous(), ends_g)
    return grouped_matmul_reference(x_rk, w_gnk, ends_g)
