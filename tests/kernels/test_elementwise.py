"""RMSNorm and SwiGLU against their references, forward and backward, at odd sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.rms_norm import rms_norm, rms_norm_reference
from kernels.swiglu import swiglu, swiglu_reference

Tensors = tuple[torch.Tensor, ...]
BOUNDS = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def output_and_gradients(op: Callable[..., torch.Tensor], inputs: Tensors, grad: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = op(*leaves)
    y.backward(grad)
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def assert_like_reference(
    op: Callable[..., torch.Tensor], reference: Callable[..., torch.Tensor], inputs: Tensors, bound: float
) -> None:
    """`op` in the inputs' dtype is as close to the reference in fp64 as `bound`, relative to each tensor's norm.

    Or to the incoming gradient's, where that is larger: RMSNorm's input gradient is a difference of terms of that size.
    """
    grad = torch.randn_like(reference(*inputs))
    found = output_and_gradients(op, inputs, grad)
    expected = output_and_gradients(reference, tuple(x.double() for x in inputs), grad.double())
    assert len(found) == len(expected) == 1 + len(inputs)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == inputs[0].dtype and a.shape == b.shape
        size = max(float(b.norm()), float(grad.double().norm()))
        assert (a.double() - b).norm() <= bound * size, f"off by {(a.double() - b).norm() / size:.1e}"


@pytest.mark.parametrize("shape", [(7, 3, 33), (1, 3), (2, 1, 1, 64), (5, 257)], ids=str)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_rms_norm_equals_its_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    eps = 1e-2  # large, so that a wrong place of it shows
    assert_like_reference(
        lambda x, w: rms_norm(x, w, eps), lambda x, w: rms_norm_reference(x, w, eps), (x, weight), BOUNDS[dtype]
    )


@pytest.mark.parametrize("size", [1e-4, 1.0, 2e3])
def test_rms_norm_in_fp16_squares_in_fp32(size: float) -> None:
    # Squares are 1e-8 and 4e6, beyond fp16; the gradient of the smallest x is about weight / size and has to fit.
    x, weight = (size * torch.randn(5, 257)).half(), (0.1 * torch.randn(257)).half()
    assert_like_reference(
        lambda x, w: rms_norm(x, w, 1e-12), lambda x, w: rms_norm_reference(x, w, 1e-12), (x, weight), 3e-3
    )


def test_rms_norm_takes_what_is_not_contiguous() -> None:
    x, weight = torch.randn(9, 2, 5).transpose(0, 1), torch.randn(5)
    assert_like_reference(
        lambda x, w: rms_norm(x, w, 1e-6), lambda x, w: rms_norm_reference(x, w, 1e-6), (x, weight), 1e-6
    )
    y = rms_norm(x.requires_grad_(), weight, 1e-6)
    y.backward(torch.ones(2, 9, 1).expand(2, 9, 5))  # no strides of its own


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("rows, inner", [(13, 7), (1, 1), (0, 4), (29, 64)])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_swiglu_equals_its_reference(rows: int, inner: int, weighted: bool, dtype: torch.dtype) -> None:
    inputs = [torch.randn(rows, 2 * inner).to(dtype)]
    if weighted:
        inputs.append(torch.randn(rows).to(dtype))
    assert_like_reference(swiglu, swiglu_reference, tuple(inputs), BOUNDS[dtype])


def test_only_wanted_gradients_are_computed_and_only_inputs_are_kept() -> None:
    gate_up, weight = torch.randn(6, 10, requires_grad=True), torch.rand(6)
    out = swiglu(gate_up, weight)
    kept = [tensor for tensor in out.grad_fn.saved_tensors]  # type: ignore[union-attr]
    assert sum(tensor.numel() for tensor in kept) == gate_up.numel() + weight.numel()
    out.sum().backward()
    assert gate_up.grad is not None and weight.grad is None
