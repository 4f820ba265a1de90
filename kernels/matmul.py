"""Products of matrices whose numbers have 16 bits, on CPUs that have no instructions for those too.

Lives here: the question in which numbers a product is computed, and two products that ask it. Imports torch only. Sums
are fp32 either way and the result is rounded once, as by a GPU's tensor cores.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional as F


@functools.cache
def _cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN, by which torch multiplies on a CPU, takes this 16-bit dtype here."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """In which products of x are computed: x's own dtype, or fp32 for bf16 and fp16 on a CPU without instructions.

    torch then loops over values: [512, 1024] x [1024, 256] took 225 ms in bf16 or fp16 and 4 ms in fp32, copies
    included, on a CPU with AVX2.
    """
    if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) and not _cpu_multiplies(x.dtype):
        return torch.float32
    return x.dtype


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b in their dtype: [n, k] x [k, m] -> [n, m]; differentiable."""
    dtype = product_dtype(a)
    return (a.to(dtype) @ b.to(dtype)).to(a.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x Wᵀ in their dtype: [..., i] x [o, i] -> [..., o]; differentiable."""
    dtype = product_dtype(x)
    return F.linear(x.to(dtype), weight.to(dtype)).to(x.dtype)
