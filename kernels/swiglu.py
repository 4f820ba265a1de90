"""SwiGLU's activation (2002.05202): silu(gate) · up, and for routed experts times the row's weight.

Lives here: one op. Imports torch only. Shapes: … leading dimensions (r rows where there is a weight), i inner width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F


def swiglu_reference(gate_up: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """The same as `swiglu` by autograd, which keeps silu(gate) and the product before the weight too."""
    gate, up = gate_up.chunk(2, dim=-1)
    inner = F.silu(gate) * up
    return inner if weight is None else inner * weight.unsqueeze(-1)


class _SwiGLU(torch.autograd.Function):
    """Keeps its inputs only; silu(gate) is computed again in backward."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(gate_up, weight)
        gate, up = gate_up.chunk(2, dim=-1)
        inner = F.silu(gate).mul_(up)
        return inner if weight is None else inner.mul_(weight.unsqueeze(-1))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        gate_up, weight = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        silu = F.silu(gate)
        grad, grad_weight = grads[0], None
        if weight is not None:
            grad_weight = torch.linalg.vecdot(grad, silu * up)
            grad = grad * weight.unsqueeze(-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(grad, silu, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_gate_up, grad_weight


def swiglu(gate_up: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) · up [· weight]: [..., 2i] -> [..., i], where the last dimension holds gate, then up.

    weight: one factor for each row, shaped like gate_up without its last dimension, of the same dtype; differentiable
    in both.
    """
    return _SwiGLU.apply(gate_up, weight)
