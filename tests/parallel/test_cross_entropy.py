"""Vocabulary-parallel cross entropy against torch's over the whole logits, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from parallel.cross_entropy import vocabulary_parallel_cross_entropy
from parallel.mesh import Layout, Mesh
from parallel.sharding import shard_slice

TOKENS = 19
# name -> (vocabulary, size of the logits). 5 over 4 ranks leaves the last without any.
CASES = {"odd": (13, 3.0), "small": (5, 1.0), "extreme": (29, 1e4), "one column": (1, 1.0)}


def losses_and_gradients(seed: int) -> dict[str, tuple[float, float, int]]:
    """By case and dtype: relative difference of the loss, of the logits' gradient, and fp32 values sent a token."""
    mesh = Mesh.create(Layout(tp=torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1))
    torch.manual_seed(seed)
    found = {}
    for name, (vocabulary, size) in CASES.items():
        for dtype in (torch.float32, torch.bfloat16):
            logits = (size * torch.randn(TOKENS, vocabulary)).to(dtype)
            targets = torch.randint(vocabulary, (TOKENS,))
            targets[0] = logits[0].argmax()
            targets[1] = logits[1].argmin()
            grad = torch.randn(TOKENS)
            grad[2] = 0.0  # a masked token
            whole = logits.double().requires_grad_()
            expected = F.cross_entropy(whole, targets, reduction="none")
            expected.backward(grad.double())
            assert whole.grad is not None

            mine = shard_slice(vocabulary, mesh.tp.size, mesh.tp.rank)
            local = logits[:, mine].clone().requires_grad_()
            before = local.detach().clone()
            mesh.ledger.reset()
            loss = vocabulary_parallel_cross_entropy(local, targets, mine.start, mesh.tp)
            loss.backward(grad)
            assert local.grad is not None and local.grad.dtype == dtype and loss.dtype == torch.float32
            assert torch.equal(local.detach(), before), "the logits are the caller's"
            assert not local.grad[2].any()
            loss_off = (loss.double() - expected).abs() / expected.abs().clamp(min=1.0)
            gradient_off = (local.grad.double() - whole.grad[:, mine]).abs()
            scale = grad.abs().max()
            worst = float(gradient_off.max() / scale) if local.numel() else 0.0
            found[f"{name} {dtype}"] = (float(loss_off.detach().max()), worst, mesh.ledger.bytes("tp"))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_loss_and_gradient_equal_those_of_the_whole_logits(
    run_ranks: Callable[..., list[Any]], seed: int, ranks: int
) -> None:
    for rank, found in enumerate(run_ranks(ranks, losses_and_gradients, seed)):
        for name, (loss, gradient, sent) in found.items():
            assert loss < 2e-6, f"loss, {name}, rank {rank}: off by {loss:.1e}"
            bound = 4e-3 if "bfloat16" in name else 2e-6  # only the gradient is rounded to the logits' dtype
            assert gradient < bound, f"gradient, {name}, rank {rank}: off by {gradient:.1e}"
            # One message of a value a token, one of two: the vocabulary's size plays no part.
            assert sent == sum(round(2 * k * 4 * TOKENS * (ranks - 1) / ranks) for k in (1, 2))
