"""Products of 16-bit matrices: fp32 sums, rounded once, whether or not the CPU has instructions for them."""

from __future__ import annotations

import pytest
import torch

from kernels import matmul

BOUNDS = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 6e-3, torch.float16: 8e-4}


@pytest.fixture(params=[True, False], ids=["instructions", "none"])
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A CPU that has instructions for 16-bit products, or says so, and one that hasn't."""
    monkeypatch.setattr(matmul, "_cpu_multiplies", lambda dtype: request.param)
    return request.param


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("n, k, m", [(13, 37, 5), (1, 1, 1), (0, 3, 2)])
def test_products_and_their_gradients(cpu: bool, n: int, k: int, m: int, dtype: torch.dtype) -> None:
    x, weight, grad = (torch.randn(shape).to(dtype) for shape in ((n, 1, k), (m, k), (n, 1, m)))

    def results(dtype: torch.dtype) -> list[torch.Tensor]:
        a, b = (tensor.to(dtype).detach().requires_grad_() for tensor in (x, weight))
        y = matmul.linear(a, b)
        y.backward(grad.to(dtype))
        assert a.grad is not None and b.grad is not None
        return [y.detach(), matmul.product(a.detach().flatten(0, 1), b.detach().t()), a.grad, b.grad]

    for found, expected in zip(results(dtype), results(torch.float64), strict=True):
        assert found.dtype == dtype
        assert (found.double() - expected).norm() <= BOUNDS[dtype] * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_are_fp32(cpu: bool, dtype: torch.dtype) -> None:
    """In 16 bits a sum of ones stops at 256 or 2048."""
    ones = torch.ones(1, 4096, dtype=dtype)
    assert matmul.linear(ones, ones).item() == matmul.product(ones, ones.t()).item() == 4096


def test_only_16_bits_on_a_cpu_are_computed_in_another_dtype(cpu: bool) -> None:
    for dtype in BOUNDS:
        narrow = dtype in (torch.bfloat16, torch.float16)
        assert matmul.product_dtype(torch.empty(0, dtype=dtype)) == (torch.float32 if narrow and not cpu else dtype)
        assert matmul.product_dtype(torch.empty(0, dtype=dtype, device="meta")) == dtype
