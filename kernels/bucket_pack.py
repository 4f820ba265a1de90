"""Many tensors into one flat buffer: cast, count of values that aren't finite and sum of squares in one pass.

Lives here: one op. Imports torch and `kernels` only. What a bucket of gradients needs before it is sent; on a GPU one
launch for all tensors through a table of their addresses. Shapes: n values of all tensors together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels import backend

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def bucket_pack_reference(tensors: Sequence[torch.Tensor], out_n: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """The same as `bucket_pack`, a tensor at a time."""
    statistics = torch.zeros(2, dtype=torch.float64, device=out_n.device)
    for x, part in zip(tensors, out_n.split([x.numel() for x in tensors]), strict=True):
        scaled = x.reshape(-1).float() * factor
        statistics[0] += scaled.double().square().sum()
        statistics[1] += (~scaled.isfinite()).sum()
        part.copy_(scaled)
    return statistics


def bucket_pack(tensors: Sequence[torch.Tensor], out_n: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """out = the tensors one after the other, times `factor`, cast to out's dtype.

    tensors: contiguous, all of one dtype and device, n values together; out: [n]; dtypes fp32, bf16, fp16. The factor
    is applied in fp32 before the cast: a sum over N ranks that would overflow fp16 is divided first. Returns fp64 [2]:
    Σ of squares of the scaled values before the cast, and how many of them aren't finite. Raises TypeError and
    ValueError, naming what is wrong.
    """
    dtypes = {x.dtype for x in tensors}
    if len(dtypes) > 1 or not dtypes | {out_n.dtype} <= set(DTYPES):
        names = ", ".join(sorted(map(str, dtypes)))
        raise TypeError(f"bucket_pack: tensors are {names}, out is {out_n.dtype}; it takes one of fp32, bf16, fp16")
    if any(x.device != out_n.device for x in tensors):
        raise ValueError(f"bucket_pack: out is on {out_n.device}, a tensor isn't: it takes one device")
    if not out_n.is_contiguous() or not all(x.is_contiguous() for x in tensors):
        raise ValueError("bucket_pack: tensors and out must be contiguous")
    if out_n.shape != (sum(x.numel() for x in tensors),):
        held = sum(x.numel() for x in tensors)
        raise ValueError(
            f"bucket_pack: the tensors hold {held} values, out is {tuple(out_n.shape)}: it takes ({held},)"
        )
    run = backend.pick("bucket_pack", out_n.device.type) or bucket_pack_reference
    return run(tensors, out_n, factor)
