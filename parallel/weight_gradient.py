"""Products with a weight whose gradient is added to `parameter.main_grad` as it is computed.

Lives here: the linear and the grouped linear that layers use for weights that a forward pass uses once. Imports
`kernels` only. With a gradient reducer, which sets `main_grad` (fp32), no gradient tensor is made and added afterwards:
in fp32 the product itself accumulates, as Megatron-LM's fused weight gradient does. Without one they are ordinary
differentiable products. Shapes: n rows, i inputs, o outputs, g groups.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from kernels.grouped_matmul import grouped_matmul


def adds_its_gradient(weight: nn.Parameter) -> bool:
    """Whether `will_add_its_gradient` was said of this weight."""
    return getattr(weight, "_adds_its_gradient", False)


def will_add_its_gradient(weight: nn.Parameter) -> nn.Parameter:
    """Mark a weight that its layer uses once in a forward pass, by this file's products; returns it.

    The gradient reducer then waits for word from here instead of autograd's.
    """
    weight._adds_its_gradient = True  # type: ignore[attr-defined]
    return weight


def linear(x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    """y = x Wᵀ: [..., i] -> [..., o]; weight [o, i], or a stack [m, o, i] whose outputs follow one another."""
    return _Linear.apply(x, weight)


def grouped_linear(x_ni: torch.Tensor, weight: nn.Parameter, ends_g: torch.Tensor) -> torch.Tensor:
    """Each row times the matrix of its group: [n, i] x [g, o, i] -> [n, o]; ends_g int32: each group's end."""
    return grouped_matmul(x_ni, weight, ends_g, partial(_add, weight))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # not saved: recomputation would hand back an alias, which has no main gradient
        return F.linear(x, _matrix(weight))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        grad_no = grads[0].flatten(0, -2)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_no @ _matrix(weight)).view(x.shape)
        if ctx.needs_input_grad[1]:
            x_ni = x.flatten(0, -2)

            def gradient(total: torch.Tensor | None) -> torch.Tensor:
                if total is None:
                    return (grad_no.t() @ x_ni).view(weight.shape)
                return _matrix(total).addmm_(grad_no.t(), x_ni)

            grad_weight = _add(weight, gradient)
        return grad_x, grad_weight


def _matrix(weight: torch.Tensor) -> torch.Tensor:
    """A stack of matrices as one: [m, o, i] -> [m·o, i]."""
    return weight if weight.ndim == 2 else weight.flatten(0, -2)


def _add(weight: nn.Parameter, gradient: Callable[[torch.Tensor | None], torch.Tensor]) -> torch.Tensor | None:
    """Add a gradient to the weight's main gradient and return None, or return it where there is no reducer.

    gradient(total): adds to `total` in place; for None returns the gradient itself.
    """
    total = getattr(weight, "main_grad", None)
    if total is None or not adds_its_gradient(weight):
        return gradient(None)
    if weight.dtype == total.dtype:
        gradient(total)
    else:
        total.add_(gradient(None))
    weight.main_grad_added()  # type: ignore[attr-defined]
    return None
