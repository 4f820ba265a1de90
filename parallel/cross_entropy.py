"""Cross entropy over logits whose vocabulary is split over tp; the whole logits are never gathered.

Lives here: one autograd function. Imports `parallel` only. Follows Megatron-LM (1909.08053, section 3): two small
all-reduces, of each token's maximum and of its sum of exponentials together with its target's logit.
Shapes: n tokens, v this rank's part of the vocabulary (maybe 0 on the last ranks).
"""

from __future__ import annotations

from typing import Any

import torch

from parallel.comm import all_reduce_
from parallel.mesh import Axis


class _VocabularyParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_nv: torch.Tensor, targets_n: torch.Tensor, first: int, axis: Axis) -> torch.Tensor:
        n, v = logits_nv.shape
        work_nv = logits_nv.float()
        if v:
            maximum_n = work_nv.amax(-1)
        else:
            maximum_n = work_nv.new_full((n,), -torch.inf)
        all_reduce_(maximum_n, axis, op="max")
        shifted_nv = work_nv - maximum_n.unsqueeze(-1)
        here_n = (targets_n >= first) & (targets_n < first + v)
        local_n = (targets_n - first).clamp(0, max(v - 1, 0))
        # One message for both sums: row 0 the exponentials, row 1 the target's shifted logit (0 from other ranks).
        sums_2n = work_nv.new_zeros((2, n))
        if v:
            target_n = shifted_nv.gather(-1, local_n.unsqueeze(-1)).squeeze(-1)
            sums_2n[1] = target_n.masked_fill(~here_n, 0.0)
            shifted_nv.exp_()
            sums_2n[0] = shifted_nv.sum(-1)
        all_reduce_(sums_2n, axis)
        ctx.save_for_backward(shifted_nv, sums_2n[0], local_n, here_n)
        ctx.dtype = logits_nv.dtype
        return sums_2n[0].log() - sums_2n[1]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        exponential_nv, sum_n, local_n, here_n = ctx.saved_tensors
        grad_n = grads[0]
        grad_nv = exponential_nv * (grad_n / sum_n).unsqueeze(-1)
        if grad_nv.shape[1]:
            grad_nv.scatter_add_(-1, local_n.unsqueeze(-1), -(grad_n * here_n).unsqueeze(-1))
        return grad_nv.to(ctx.dtype), None, None, None


def vocabulary_parallel_cross_entropy(
    logits_nv: torch.Tensor, targets_n: torch.Tensor, first: int, axis: Axis
) -> torch.Tensor:
    """Negative log likelihood of each target in nats, fp32 [n], the same on every rank of `axis`.

    logits_nv: this rank's columns, global ids `first` … `first + v - 1`, any float dtype; targets_n: int64 global ids.
    Communicates 3 n fp32 values over `axis`. A target outside the vocabulary is the caller's error, not looked for.
    """
    return _VocabularyParallelCrossEntropy.apply(logits_nv, targets_n, first, axis)
