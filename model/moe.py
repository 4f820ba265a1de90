"""Mixture of experts: routed experts behind their router, beside shared ones.

Lives here: expert computation. May import `kernels` and `parallel`; who goes where is decided in `router`.
Shapes: l = s/tp this rank's part of the sequence, b sequences, t = l·b tokens, e experts, k choices a token, r rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from kernels.permute import combine, dispatch, expert_order
from kernels.swiglu import swiglu
from model.balance import NO_EXTRAS, Balance
from model.config import DeepSeekConfig
from model.microbatch import MicroBatch
from model.mlp import SharedExpert
from model.router import Router
from parallel.mesh import Mesh
from parallel.recompute import discard, recomputed
from parallel.sharding import Sharding
from parallel.weight_gradient import grouped_linear, will_add_its_gradient


class RoutedExperts(nn.Module):
    """All experts' SwiGLU layers as two stacks, computed by grouped matrix products over rows sorted by expert.

    discard_inner: the activation's output isn't kept but computed again in backward.
    """

    def __init__(self, config: DeepSeekConfig, discard_inner: bool = False):
        super().__init__()
        self.discard_inner = discard_inner
        experts, hidden, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))
        for parameter in (self.gate_up_proj, self.down_proj):
            sharding = Sharding(split_dim=0, axis="ep", full_size=experts, expert=True)
            parameter.sharding = sharding  # type: ignore[attr-defined]
            will_add_its_gradient(parameter)

    def forward(self, x_rh: torch.Tensor, weight_r: torch.Tensor, ends_e: torch.Tensor) -> torch.Tensor:
        """Each row through its expert, times its weight: [r, h] -> [r, h]; ends_e int32, the end of each expert's rows.

        The weight multiplies the narrow activations: the same by linearity, and the router's gradient then needs those
        kept anyway instead of the wide outputs (V3: 470 MB a layer for 4,096 tokens).
        """
        gate_up = grouped_linear(x_rh, self.gate_up_proj, ends_e)
        inner_ri = swiglu(gate_up, weight_r)
        out_rh = grouped_linear(inner_ri, self.down_proj, ends_e)
        if self.discard_inner:
            discard([inner_ri], lambda: [swiglu(gate_up, weight_r)], consumed=out_rh)
        return out_rh


class MoE(nn.Module):
    """y = Σᵢ wᵢ Eᵢ(x) + Shared(x) for this rank's tokens: [s/tp, b, h] -> [s/tp, b, h].

    recompute: what is computed again in backward: "moe_act" the routed experts' activation, "shared_experts".
    """

    def __init__(
        self,
        config: DeepSeekConfig,
        mesh: Mesh,
        layer: int,
        recompute: tuple[str, ...] = (),
        balance: Balance = NO_EXTRAS,
    ):
        super().__init__()
        self.gate = Router(config, mesh, layer, balance)
        self.experts = RoutedExperts(config, discard_inner="moe_act" in recompute)
        self.recompute_shared = "shared_experts" in recompute
        self.shared_experts = None
        if config.n_shared_experts:
            self.shared_experts = SharedExpert(config.hidden_size, config.shared_intermediate_size)

    def forward(self, x_lbh: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        weights_tk, routing, auxiliary = self.gate(x_lbh, batch)
        if routing.kept_tk is not None:
            weights_tk = weights_tk.masked_fill(~routing.kept_tk, 0)
        order_r, place_tk = expert_order(routing.expert_tk)
        ends_e = routing.counts_be.sum(0).cumsum(0).to(torch.int32)
        x_rh, weight_r = dispatch(x_lbh.flatten(0, 1), weights_tk, order_r, place_tk)
        out_lbh = combine(self.experts(x_rh, weight_r, ends_e), order_r, place_tk).view_as(x_lbh)
        if auxiliary is not None:
            out_lbh = _AttachLoss.apply(out_lbh, auxiliary)
        if self.shared_experts is None:
            return out_lbh
        shared = partial(recomputed, self.shared_experts) if self.recompute_shared else self.shared_experts
        return out_lbh + shared(x_lbh)


class _AttachLoss(torch.autograd.Function):
    """Hands x through and gives `loss` the gradient 1 in backward, so a loss inside a stage needs no way out of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.loss_like = loss.new_ones(loss.shape)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], ctx.loss_like
