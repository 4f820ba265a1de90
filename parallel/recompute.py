"""Activations that are computed again in backward rather than kept: of a whole submodule, or of its outputs alone.

Lives here: two functions, each one line where it is used. Imports torch only. Source: selective recomputation
(2205.05198); discarded outputs as in Megatron-core's `recompute_modules`. Both compute a thing exactly twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), of which only `args` are kept: it runs again when the backward pass arrives at it.

    The second run ends with the last tensor that backward needs, so a collective after it isn't repeated. Without
    gradients this is the plain call. Must not be nested, and nothing inside may `discard`: the inner one would run a
    third time, or fill tensors that the outer one has dropped.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def discard(
    outputs: Sequence[torch.Tensor], make: Callable[[], Sequence[torch.Tensor]], consumed: torch.Tensor
) -> None:
    """Free the memory of `outputs`, which `make` has computed, until the gradient of `consumed` arrives.

    consumed: computed from `outputs`, and the only way by which a gradient can reach what has used them. make: returns
    the same tensors again; it runs without gradients, since the graph of the first run stays: worth it where that graph
    keeps inputs rather than outputs. The outputs' memory must be their own, and nothing may read them in forward any
    more. The same storage is filled, so every tensor that shares it, saved by autograd or held by a weight gradient
    that is computed later, has its values again; it is freed with the last of these. Does nothing without gradients.
    """
    if not (torch.is_grad_enabled() and consumed.requires_grad):
        return
    pending = [(make, [output.untyped_storage() for output in outputs])]
    for storage in pending[0][1]:
        storage.resize_(0)

    def refill(_: torch.Tensor) -> None:
        if not pending:  # a second backward pass over a graph that was retained
            return
        make, storages = pending.pop()
        with torch.no_grad():
            # Storages have no version: autograd would take an assignment to the tensors for a change of saved values.
            for storage, output in zip(storages, make(), strict=True):
                made = output.untyped_storage()
                storage.resize_(made.nbytes())
                storage.copy_(made)

    consumed.register_hook(refill)
