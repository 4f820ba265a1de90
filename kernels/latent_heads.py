"""From MLA's projections to queries, keys and values a head: rotation of the positional parts, shared keys copied out.

Lives here: one op. Imports torch only. Source: DeepSeek-V2 (2405.04434, section 2.1). Shapes: q queries and s keys of
a sequence, b batch, n heads, d width without position, r rotated width, x = d + r, v value width.
"""

from __future__ import annotations

from typing import Any

import torch

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def latent_heads_reference(
    q_qby: torch.Tensor,
    kv_sbz: torch.Tensor,
    k_pe_sbr: torch.Tensor,
    q_rotation: torch.Tensor,
    k_rotation: torch.Tensor,
    heads: int,
) -> Heads:
    """The same as `latent_heads`, by autograd and concatenation."""
    q_qbnx, kv_sbnz = q_qby.unflatten(-1, (heads, -1)), kv_sbz.unflatten(-1, (heads, -1))
    nope = q_qbnx.shape[-1] - k_pe_sbr.shape[-1]
    q = torch.cat([q_qbnx[..., :nope], rotate(q_qbnx[..., nope:], q_rotation)], dim=-1)
    k_pe_sbnr = rotate(k_pe_sbr.unsqueeze(2), k_rotation).expand(-1, -1, heads, -1)
    return q, torch.cat([kv_sbnz[..., :nope], k_pe_sbnr], dim=-1), kv_sbnz[..., nope:]


def rotate(x_sbnr: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Turns each pair (2i, 2i+1) of the last dimension by its angle; the order of the values stays.

    x_sbnr: [s, b, n, r] of any float dtype; rotation: complex64 [s, b, 1, r/2]. Computed in fp32, returned contiguous
    in the dtype of x. Differentiable in x.
    """
    # One complex product reads and writes every value once: forward and backward of [512, 2, 16, 64] in fp32 took
    # 4.6 ms on one CPU core, against 37 ms over strided even and odd halves and 27 ms with flipped pairs.
    pairs = x_sbnr.float().unflatten(-1, (-1, 2)).contiguous()
    if pairs.storage_offset() % 2:  # one token's view behind an odd latent is contiguous, and yet no row of complexes
        pairs = pairs.clone()
    return torch.view_as_real(torch.view_as_complex(pairs) * rotation).flatten(-2).to(x_sbnr.dtype)


class _LatentHeads(torch.autograd.Function):
    """Queries are rotated where they lie; keys and values are written once, gradients too."""

    @staticmethod
    def forward(
        ctx: Any,
        q_qby: torch.Tensor,
        kv_sbz: torch.Tensor,
        k_pe_sbr: torch.Tensor,
        q_rotation: torch.Tensor,
        k_rotation: torch.Tensor,
        heads: int,
    ) -> Heads:
        q_qbnx, kv_sbnz = q_qby.unflatten(-1, (heads, -1)), kv_sbz.unflatten(-1, (heads, -1))
        nope = q_qbnx.shape[-1] - k_pe_sbr.shape[-1]
        q_qbnx[..., nope:] = rotate(q_qbnx[..., nope:], q_rotation)
        k_sbnx = q_qbnx.new_empty((*kv_sbnz.shape[:-1], q_qbnx.shape[-1]))
        k_sbnx[..., :nope] = kv_sbnz[..., :nope]
        k_sbnx[..., nope:] = rotate(k_pe_sbr.unsqueeze(2), k_rotation)
        ctx.mark_dirty(q_qby)
        ctx.save_for_backward(q_rotation, k_rotation)
        ctx.nope, ctx.kv_shape = nope, kv_sbnz.shape
        return q_qby, k_sbnx, kv_sbnz[..., nope:].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None, None]:
        grad_q_qby, grad_k_sbnx, grad_v_sbnv = grads
        q_back, k_back = (rotation.conj() for rotation in ctx.saved_tensors)
        nope, heads = ctx.nope, ctx.kv_shape[2]
        # A copy, as the gradient may belong to others.
        grad_q_qbnx = grad_q_qby.unflatten(-1, (heads, -1)).clone(memory_format=torch.contiguous_format)
        grad_q_qbnx[..., nope:] = rotate(grad_q_qbnx[..., nope:], q_back)
        grad_kv_sbnz = grad_v_sbnv.new_empty(ctx.kv_shape)
        grad_kv_sbnz[..., :nope] = grad_k_sbnx[..., :nope]
        grad_kv_sbnz[..., nope:] = grad_v_sbnv
        grad_k_pe_sbr = rotate(grad_k_sbnx[..., nope:].sum(2, keepdim=True), k_back).squeeze(2)
        return grad_q_qbnx.flatten(-2), grad_kv_sbnz.flatten(-2), grad_k_pe_sbr, None, None, None


def latent_heads(
    q_qby: torch.Tensor,
    kv_sbz: torch.Tensor,
    k_pe_sbr: torch.Tensor,
    q_rotation: torch.Tensor,
    k_rotation: torch.Tensor,
    heads: int,
) -> Heads:
    """Queries [q, b, n, x], keys [s, b, n, x], values [s, b, n, v]; differentiable in the first three arguments.

    q_qby: [q, b, n·x], a head's d plain values before its r rotated ones; contiguous, changed in place, so it must be a
    fresh result that nothing else reads; kv_sbz: [s, b, n·(d + v)]; k_pe_sbr: the rotated key that heads share;
    q_rotation, k_rotation: of the queries' positions and of the keys', see `rotate`.
    """
    q_qby, k_sbnx, v_sbnv = _LatentHeads.apply(q_qby, kv_sbz, k_pe_sbr, q_rotation, k_rotation, heads)
    return q_qby.unflatten(-1, (heads, -1)), k_sbnx, v_sbnv
