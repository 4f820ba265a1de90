"""Softmax attention of every token to those before it: torch's fused kernels, or blocks of products on a CPU.

Lives here: one op. Imports torch only. Source: FlashAttention-2 (2307.08691) for skipping blocks above the diagonal.
Shapes: s sequence, b batch, n heads, x width of queries and keys, v of values (v may be narrower).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

_BLOCK = 64
_LONGEST = 1024
"""Up to here the CPU path keeps the probabilities, half of s² for each head, as others than flash attention do."""


def attention_reference(
    q_sbnx: torch.Tensor, k_sbnx: torch.Tensor, v_sbnv: torch.Tensor, scale: float, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The same as `attention`, by torch's fused kernels."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_sbnx, k_sbnx, v_sbnv))
    # They want one width: zero columns of v cost less than the slow path (1.3x in fp32 at 192/128).
    width = v.shape[-1]
    v = F.pad(v, (0, q.shape[-1] - width)) if width < q.shape[-1] else v
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out[..., :width].permute(2, 0, 1, 3).flatten(-2)


class _BlockedAttention(torch.autograd.Function):
    """A block of queries at a time, against the keys up to its last: nearly half of the products are never made."""

    @staticmethod
    def forward(
        ctx: Any, q_sbnx: torch.Tensor, k_sbnx: torch.Tensor, v_sbnv: torch.Tensor, scale: float
    ) -> torch.Tensor:
        q, k, v = (_heads_first(x) for x in (q_sbnx, k_sbnx, v_sbnv))
        length = q.shape[1]
        out_sbnv = torch.empty_like(v_sbnv, memory_format=torch.contiguous_format)
        out = _heads_first(out_sbnv)
        future = q.new_full((_BLOCK, _BLOCK), -torch.inf).triu_(1)
        probabilities = []
        for start, end in _blocks(length):
            scores = _scaled_product(q[:, start:end], k[:, :end].transpose(1, 2), scale)
            scores[:, :, start:] += future[: end - start, : end - start]  # adding is faster than filling
            p = scores.softmax(-1)
            out[:, start:end] = torch.bmm(p, v[:, :end])
            probabilities.append(p)
        ctx.save_for_backward(q_sbnx, k_sbnx, v_sbnv, *probabilities)
        ctx.scale = scale
        return out_sbnv

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        q_sbnx, k_sbnx, v_sbnv, *probabilities = ctx.saved_tensors
        results = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q_sbnx, k_sbnx, v_sbnv)]
        q, k, v, grad_q, grad_k, grad_v, grad_out = (
            _heads_first(x) for x in (q_sbnx, k_sbnx, v_sbnv, *results, grads[0].contiguous())
        )
        for (start, end), p in zip(_blocks(q.shape[1]), probabilities, strict=True):
            grad = grad_out[:, start:end]
            grad_v[:, :end] += torch.bmm(p.transpose(1, 2), grad)
            grad_p = torch.bmm(grad, v[:, :end].transpose(1, 2))
            grad_scores = torch._softmax_backward_data(grad_p, p, -1, p.dtype)
            grad_q[:, start:end] = _scaled_product(grad_scores, k[:, :end], ctx.scale)
            grad_k[:, :end] += _scaled_product(grad_scores.transpose(1, 2), q[:, start:end], ctx.scale)
        return results[0], results[1], results[2], None


def _scaled_product(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """scale · a b for a batch, without a pass for the scale."""
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=scale)


def _heads_first(x_sbnx: torch.Tensor) -> torch.Tensor:
    """[s, b, n, x] as a view [b·n, s, x], which batched products read without a copy."""
    return x_sbnx.flatten(1, 2).transpose(0, 1)


def _blocks(length: int) -> list[tuple[int, int]]:
    return [(start, min(start + _BLOCK, length)) for start in range(0, length, _BLOCK)]


def attention(
    q_sbnx: torch.Tensor, k_sbnx: torch.Tensor, v_sbnv: torch.Tensor, scale: float, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """softmax(scale · q kᵀ) v, causal or within `mask`: [s, b, n·v], differentiable in q, k and v.

    mask: bool [b, 1, s, s], True where a query (row) may see a key (column). Without one, sequences of up to 1,024
    tokens in fp32 or fp64 on a CPU go block by block, in 0.55 to 0.9 of the time of torch's CPU flash attention.
    """
    precise = q_sbnx.dtype in (torch.float32, torch.float64)
    if mask is None and q_sbnx.device.type == "cpu" and precise and q_sbnx.shape[0] <= _LONGEST:
        return _BlockedAttention.apply(q_sbnx, k_sbnx, v_sbnv, scale).flatten(-2)
    return attention_reference(q_sbnx, k_sbnx, v_sbnv, scale, mask)
