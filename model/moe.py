"""Mixture of experts: routed experts behind their router, beside shared ones.

Lives here: expert computation. May import `kernels` and `parallel`; who goes where is decided in `router`.
Shapes: l = s/(cp·tp) this rank's part of the sequence, b sequences, t = l·b tokens, e experts, k choices a token, r
rows (those of this rank's tokens, then those that its experts got), u runs of rows of one expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kernels.permute import combine, dispatch, expert_order
from kernels.swiglu import swiglu
from model.config import DeepSeekConfig
from model.microbatch import MicroBatch
from model.mlp import SharedExpert
from model.options import ModelOptions
from model.router import Router
from parallel.comm import finish_exchange, start_exchange
from parallel.mesh import Mesh
from parallel.recompute import discard, recomputed
from parallel.sharding import Sharding
from parallel.weight_gradient import grouped_linear, will_add_its_gradient


class RoutedExperts(nn.Module):
    """All experts' SwiGLU layers as two stacks, computed by grouped matrix products over rows sorted by expert.

    Each rank of ep holds a block of them. discard_inner: the activation's output isn't kept but computed again in
    backward. Raises ValueError where ep doesn't divide the experts.
    """

    def __init__(self, config: DeepSeekConfig, mesh: Mesh, discard_inner: bool = False):
        super().__init__()
        self.discard_inner = discard_inner
        experts, hidden, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        if experts % mesh.ep.size:
            raise ValueError(f"{experts} experts can't be shared by {mesh.ep.size} ranks: give ep a divisor of them")
        self.gate_up_proj = nn.Parameter(torch.empty(experts // mesh.ep.size, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts // mesh.ep.size, hidden, inner))
        for parameter in (self.gate_up_proj, self.down_proj):
            sharding = Sharding(split_dim=0, axis="ep", full_size=experts, expert=True)
            parameter.sharding = sharding  # type: ignore[attr-defined]
            will_add_its_gradient(parameter)

    def forward(self, x_rh: torch.Tensor, weight_r: torch.Tensor, ends_u: torch.Tensor) -> torch.Tensor:
        """Each row through its expert, times its weight: [r, h] -> [r, h]; ends_u int32: where each run of rows ends.

        The weight multiplies the narrow activations: the same by linearity, and the router's gradient then needs those
        kept anyway instead of the wide outputs (V3: 470 MB a layer for 4,096 tokens).
        """
        gate_up = grouped_linear(x_rh, self.gate_up_proj, ends_u)
        inner_ri = swiglu(gate_up, weight_r)
        out_rh = grouped_linear(inner_ri, self.down_proj, ends_u)
        if self.discard_inner:
            discard([inner_ri], lambda: [swiglu(gate_up, weight_r)], consumed=out_rh)
        return out_rh


class MoE(nn.Module):
    """y = Σᵢ wᵢ Eᵢ(x) + Shared(x) for this rank's tokens: [l, b, h] -> [l, b, h].

    Rows travel over ep to the ranks that hold their experts, and back; the shared expert is computed meanwhile.
    Of the options' recomputed parts: "moe_act" the routed experts' activation, "shared_experts", or of those "mlp_act"
    the activation only.
    """

    def __init__(self, config: DeepSeekConfig, mesh: Mesh, layer: int, options: ModelOptions):
        super().__init__()
        recompute = options.recomputed_parts
        if "moe" in recompute:  # by the block, and what is recomputed as a whole has no parts that are
            recompute = ()
        self.gate = Router(config, mesh, layer, options.balance)
        self.experts = RoutedExperts(config, mesh, discard_inner="moe_act" in recompute)
        self.recompute_shared = "shared_experts" in recompute
        self.shared_experts = None
        if config.n_shared_experts:
            discard_inner = "mlp_act" in recompute and not self.recompute_shared
            self.shared_experts = SharedExpert(config.hidden_size, config.shared_intermediate_size, discard_inner)

    def forward(self, x_lbh: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        # 1. who goes where
        weights_tk, routing, auxiliary = self.gate(x_lbh, batch)
        kept_tk = routing.kept_tk
        order_r, place_tk = expert_order(routing.expert_tk, kept_tk)
        x_rh, weight_r = dispatch(x_lbh.flatten(0, 1), weights_tk, order_r, place_tk, kept_tk)
        # 2. to the experts, and the shared expert's first half meanwhile
        there, back = routing.traffic.there(), routing.traffic.back()
        under_way = start_exchange(there, x_rh, weight_r)
        shared = self._shared_first(x_lbh)
        x_rh, weight_r = finish_exchange(there, *under_way)
        # 3. the experts of this rank
        y_rh = self.experts(x_rh, weight_r, routing.traffic.ends_u)
        # 4. back, and the shared expert's second half meanwhile
        under_way = start_exchange(back, y_rh)
        shared = self._shared_second(shared)
        (y_rh,) = finish_exchange(back, *under_way)
        # 5. together
        out_lbh = combine(y_rh, order_r, place_tk, kept_tk).view_as(x_lbh)
        if auxiliary is not None:
            out_lbh = _AttachLoss.apply(out_lbh, auxiliary, batch.loss_gradient)
        return out_lbh if shared is None else out_lbh + shared

    def _shared_first(self, x_lbh: torch.Tensor) -> torch.Tensor | None:
        if self.shared_experts is None:
            return None
        if self.recompute_shared:  # in one piece: its inner values aren't kept
            return recomputed(self.shared_experts, x_lbh)
        return self.shared_experts.first_half(x_lbh)

    def _shared_second(self, shared: torch.Tensor | None) -> torch.Tensor | None:
        if self.shared_experts is None or self.recompute_shared or shared is None:
            return shared
        return self.shared_experts.second_half(shared)


class _AttachLoss(torch.autograd.Function):
    """Hands x through and gives `loss` its gradient in backward, the loss scale: it needs no way out of its stage."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor, gradient: float) -> torch.Tensor:
        ctx.gradient = loss.new_full(loss.shape, gradient)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grads[0], ctx.gradient, None
