"""Products with a weight whose gradient is added to `parameter.main_grad` as it is computed, at once or later.

Lives here: the linear and the grouped linear that layers use for weights that a forward pass uses once, and the queue
in which a pipeline's weight gradients wait for their action. Imports `kernels` only. With a gradient reducer, which
sets `main_grad` (fp32), no gradient tensor is made and added afterwards: in fp32 the product itself accumulates, as
Megatron-LM's fused weight gradient does. Without one they are ordinary differentiable products. Deferring them is the
split of Zero Bubble (2401.10241). Shapes: n rows, i inputs, o outputs, g groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from kernels import matmul
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


Gradient = Callable[[torch.Tensor | None], torch.Tensor]
"""Of a weight, as a function: called with a tensor it adds to that in place, with None it returns the gradient."""


class WeightGradientQueue:
    """Where the weights of one pipeline rank leave their gradients to be computed later.

    parameters: all of the rank's; those that add their gradient themselves know of the queue from then on. The others'
    gradients (norms, router, embedding, head) come with the input's, at once: they are small, or need values (logits)
    that are too large to keep.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._open: list[Callable[[], None]] | None = None
        for parameter in parameters:
            if adds_its_gradient(parameter):
                parameter.gradient_queue = self  # type: ignore[attr-defined]

    @contextmanager
    def collect(self) -> Iterator[list[Callable[[], None]]]:
        """Inside, backward puts weight gradients into the list that is handed out, rather than computing them."""
        assert self._open is None, "one input gradient at a time"
        collected: list[Callable[[], None]] = []
        self._open = collected
        try:
            yield collected
        finally:
            self._open = None

    def put(self, weight: nn.Parameter, gradient: Gradient) -> bool:
        """Keep a gradient for later; False when it is to be computed now."""
        if self._open is None:
            return False
        self._open.append(partial(_add_to_main, weight, gradient))
        return True

    @staticmethod
    @torch.no_grad()
    def run(collected: list[Callable[[], None]]) -> None:
        """Compute what was collected and add it up. Each frees what it has kept before the next one runs."""
        collected.reverse()
        while collected:
            collected.pop()()


def linear(x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    """y = x Wᵀ: [..., i] -> [..., o]; weight [o, i], or a stack [m, o, i] whose outputs follow one another."""
    return _Linear.apply(x, weight)


def grouped_linear(x_ni: torch.Tensor, weight: nn.Parameter, ends_u: torch.Tensor) -> torch.Tensor:
    """Each row times the matrix of its group: [n, i] x [g, o, i] -> [n, o]; ends_u int32: the end of each run of rows.

    Run i is of group i % g.
    """
    return grouped_matmul(x_ni, weight, ends_u, partial(add_gradient, weight))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # not saved: recomputation would hand back an alias, which has no main gradient
        return matmul.linear(x, _matrix(weight))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        grad_no = grads[0].flatten(0, -2)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = matmul.product(grad_no, _matrix(weight)).view(x.shape)
        if ctx.needs_input_grad[1]:
            x_ni = x.detach().flatten(0, -2)  # what waits must not keep the graph that x came from

            def gradient(total: torch.Tensor | None) -> torch.Tensor:
                if total is None:
                    return matmul.product(grad_no.t(), x_ni).view(weight.shape)
                return _matrix(total).addmm_(grad_no.t(), x_ni)

            grad_weight = add_gradient(weight, gradient)
        return grad_x, grad_weight


def _matrix(weight: torch.Tensor) -> torch.Tensor:
    """A stack of matrices as one: [m, o, i] -> [m·o, i]."""
    return weight if weight.ndim == 2 else weight.flatten(0, -2)


def add_gradient(weight: nn.Parameter, gradient: Gradient) -> torch.Tensor | None:
    """From a weight's backward: add its gradient to the main gradient, now or later, and return None for autograd.

    Where there is no reducer the gradient itself is returned.
    """
    if getattr(weight, "main_grad", None) is None or not adds_its_gradient(weight):
        return gradient(None)
    queue = getattr(weight, "gradient_queue", None)
    if queue is None or not queue.put(weight, gradient):
        _add_to_main(weight, gradient)
    return None


def _add_to_main(weight: nn.Parameter, gradient: Gradient) -> None:
    total: torch.Tensor = weight.main_grad  # type: ignore[attr-defined]
    if weight.dtype == total.dtype:
        gradient(total)
    else:
        total.add_(gradient(None), alpha=weight.main_grad_factor)  # type: ignore[attr-defined]
    weight.main_grad_added()  # type: ignore[attr-defined]
