"""Softmax attention of every token to those before it: torch's fused kernels, or blocks of products on a CPU.

Lives here: one op. Source: FlashAttention-2 (2307.08691) for skipping blocks above the diagonal.
Shapes: q queries and s keys of a sequence, b batch, n heads, x width of queries and keys, v of values (v may be
narrower). Queries are all tokens, or pieces of the sequence: `ends` says where each piece ends among the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from kernels.matmul import product_dtype

_BLOCK = 64
_LONGEST = 1024
"""Up to here the CPU path keeps the probabilities, half of s² for each head, as others than flash attention do."""


def attention_reference(
    q_qbnx: torch.Tensor,
    k_sbnx: torch.Tensor,
    v_sbnv: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    ends: Sequence[int] = (),
) -> torch.Tensor:
    """The same as `attention`, by torch's fused kernels."""
    if len(ends) > 1:
        size = q_qbnx.shape[0] // len(ends)
        outs = []
        for i, end in enumerate(ends):
            rows = slice(i * size, (i + 1) * size)
            seen = None if mask is None else mask[:, :, rows, :end]
            outs.append(attention_reference(q_qbnx[rows], k_sbnx[:end], v_sbnv[:end], scale, seen))
        return torch.cat(outs)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_qbnx, k_sbnx, v_sbnv))
    # They want one width: zero columns of v cost less than the slow path (1.3x in fp32 at 192/128).
    width = v.shape[-1]
    v = F.pad(v, (0, q.shape[-1] - width)) if width < q.shape[-1] else v
    aligned = q.shape[2] == k.shape[2]
    visible = _last_queries(q, k) if mask is None and not aligned else mask
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=visible is None, scale=scale)
    return out[..., :width].permute(2, 0, 1, 3).flatten(-2)


def _last_queries(q_bnqx: torch.Tensor, k_bnsx: torch.Tensor) -> torch.Tensor:
    """Causal, the queries being the last of the keys: on a GPU in words that flash kernels understand, else [q, s]."""
    shape = q_bnqx.shape[2], k_bnsx.shape[2]
    if q_bnqx.device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right  # imports torch._dynamo: seconds of a rank's start

        return causal_lower_right(*shape)
    return torch.ones(shape, dtype=torch.bool, device=q_bnqx.device).tril(shape[1] - shape[0])


class _BlockedAttention(torch.autograd.Function):
    """A block of queries at a time, against the keys up to its last: nearly half of the products are never made."""

    @staticmethod
    def forward(
        ctx: Any,
        q_qbnx: torch.Tensor,
        k_sbnx: torch.Tensor,
        v_sbnv: torch.Tensor,
        scale: float,
        ends: Sequence[int],
    ) -> torch.Tensor:
        q, k, v = (_heads_first(x) for x in (q_qbnx, k_sbnx, v_sbnv))
        out_qbnv = v_sbnv.new_empty((q_qbnx.shape[0], *v_sbnv.shape[1:]))
        out = _heads_first(out_qbnv)
        future = q.new_full((_BLOCK, _BLOCK), -torch.inf).triu_(1)
        probabilities = []
        ctx.blocks = _blocks(q.shape[1], ends)
        for start, end, seen in ctx.blocks:
            size = end - start
            scores = _scaled_product(q[:, start:end], k[:, :seen].transpose(1, 2), scale)
            scores[:, :, seen - size :] += future[:size, :size]  # adding is faster than filling
            p = scores.softmax(-1)
            out[:, start:end] = torch.bmm(p, v[:, :seen])
            probabilities.append(p)
        ctx.save_for_backward(q_qbnx, k_sbnx, v_sbnv, *probabilities)
        ctx.scale = scale
        return out_qbnv

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        q_qbnx, k_sbnx, v_sbnv, *probabilities = ctx.saved_tensors
        results = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q_qbnx, k_sbnx, v_sbnv)]
        q, k, v, grad_q, grad_k, grad_v, grad_out = (
            _heads_first(x) for x in (q_qbnx, k_sbnx, v_sbnv, *results, grads[0].contiguous())
        )
        for (start, end, seen), p in zip(ctx.blocks, probabilities, strict=True):
            grad = grad_out[:, start:end]
            grad_v[:, :seen] += torch.bmm(p.transpose(1, 2), grad)
            grad_p = torch.bmm(grad, v[:, :seen].transpose(1, 2))
            grad_scores = torch._softmax_backward_data(grad_p, p, -1, p.dtype)
            grad_q[:, start:end] = _scaled_product(grad_scores, k[:, :seen], ctx.scale)
            grad_k[:, :seen] += _scaled_product(grad_scores.transpose(1, 2), q[:, start:end], ctx.scale)
        return results[0], results[1], results[2], None, None


def _scaled_product(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """scale · a b for a batch, without a pass for the scale."""
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=scale)


def _heads_first(x_sbnx: torch.Tensor) -> torch.Tensor:
    """[s, b, n, x] as a view [b·n, s, x], which batched products read without a copy."""
    return x_sbnx.flatten(1, 2).transpose(0, 1)


def _blocks(queries: int, ends: Sequence[int]) -> list[tuple[int, int, int]]:
    """(start, end) of each block of queries, none across the border of two pieces, and how many keys its last sees."""
    size = queries // len(ends)
    blocks = []
    for piece, keys in enumerate(ends):
        last = (piece + 1) * size
        for start in range(piece * size, last, _BLOCK):
            end = min(start + _BLOCK, last)
            blocks.append((start, end, keys - (last - end)))
    return blocks


def attention(
    q_qbnx: torch.Tensor,
    k_sbnx: torch.Tensor,
    v_sbnv: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    ends: Sequence[int] = (),
) -> torch.Tensor:
    """softmax(scale · q kᵀ) v, causal or within `mask`: [q, b, n·v], differentiable in q, k and v.

    mask: bool [b, 1, q, s], True where a query (row) may see a key (column). ends: queries are as many pieces of one
    length, and piece i stands for the last of the first ends[i] keys, and sees no key behind these; by default all
    queries are one piece, the last of all keys. Without a mask, sequences of up to 1,024 keys in fp32 or fp64 on a CPU
    go block by block, in 0.55 to 0.9 of the time of torch's CPU flash attention; 16-bit numbers do so as fp32 where
    the CPU has no instructions for them.
    """
    dtype = q_qbnx.dtype
    q_qbnx, k_sbnx, v_sbnv = (x.to(product_dtype(x)) for x in (q_qbnx, k_sbnx, v_sbnv))
    precise = q_qbnx.dtype in (torch.float32, torch.float64)
    if mask is None and q_qbnx.device.type == "cpu" and precise and k_sbnx.shape[0] <= _LONGEST:
        out = _BlockedAttention.apply(q_qbnx, k_sbnx, v_sbnv, scale, ends or (k_sbnx.shape[0],)).flatten(-2)
    else:
        out = attention_reference(q_qbnx, k_sbnx, v_sbnv, scale, mask, ends)
    return out.to(dtype)
