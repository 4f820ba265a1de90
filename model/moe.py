"""Mixture of experts: the V2 and V3 routers, the routed experts, their balance.

Lives here: routing (DeepSeek-V3 2412.19437 eq. 13–20, V2 2405.04434 section 2.2), expert computation, the sequence-wise
auxiliary loss, the bias update. May import `kernels` and `parallel`.
Shapes: l = s/tp this rank's part of the sequence, b sequences, t = l·b tokens, e experts, k choices a token, g groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from kernels.permute import combine, dispatch, expert_order
from kernels.swiglu import swiglu
from model.config import DeepSeekConfig
from model.microbatch import MicroBatch, Routing
from model.mlp import SharedExpert
from parallel.comm import all_reduce_
from parallel.mesh import Mesh
from parallel.recompute import discard, recomputed
from parallel.sharding import Sharding
from parallel.weight_gradient import grouped_linear, will_add_its_gradient


class Router(nn.Module):
    """Scores every expert for every token in fp32 and keeps k of them.

    The router is whole on every tp rank and sees this rank's tokens. `load_e` (int64) counts the choices of training
    micro-batches since it was last zeroed, at the start of a step.
    """

    e_score_correction_bias: torch.Tensor
    load_e: torch.Tensor

    def __init__(self, config: DeepSeekConfig, mesh: Mesh, layer: int):
        super().__init__()
        self.config = config
        self.sequence = mesh.sequence
        self.layer = layer
        experts = config.n_routed_experts
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size))
        self.weight.sharding = Sharding(sequence_fed=True)  # type: ignore[attr-defined]
        self.register_buffer("load_e", torch.zeros(experts, dtype=torch.int64), persistent=False)
        if config.has_router_bias:
            self.register_buffer("e_score_correction_bias", torch.zeros(experts))

    def forward(self, x_lbh: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Routing, torch.Tensor | None]:
        """Weights [t, k] in x's dtype, the choice, and the auxiliary loss (a scalar to differentiate, or None)."""
        config = self.config
        logits_te = F.linear(x_lbh.flatten(0, 1).float(), self.weight.float())
        scores_te = logits_te.sigmoid() if config.scoring_func == "sigmoid" else logits_te.softmax(-1)
        routing = batch.routing.get(self.layer)
        if routing is None:
            routing = batch.routing[self.layer] = self._choose(scores_te.detach(), batches=x_lbh.shape[1])

        weights_tk = scores_te.gather(-1, routing.expert_tk)
        if config.norm_topk_prob:
            weights_tk = weights_tk / (weights_tk.sum(-1, keepdim=True) + 1e-20)
        if config.scoring_func == "sigmoid" or not config.norm_topk_prob:  # V2 either normalises or scales
            weights_tk = weights_tk * config.routed_scaling_factor
        return weights_tk.to(x_lbh.dtype), routing, self._auxiliary_loss(scores_te, routing, x_lbh.shape, batch)

    @torch.no_grad()
    def _choose(self, scores_te: torch.Tensor, batches: int) -> Routing:
        config = self.config
        choice_te = scores_te + self.e_score_correction_bias if config.has_router_bias else scores_te
        if config.topk_method != "greedy" and config.n_group > 1:
            grouped_tgx = choice_te.unflatten(-1, (config.n_group, -1))
            if config.has_router_bias:  # V3: a group is worth its two best
                group_tg = grouped_tgx.topk(2, dim=-1).values.sum(-1)
            else:  # V2: its best
                group_tg = grouped_tgx.amax(-1)
            kept = group_tg.topk(config.topk_group, dim=-1).indices
            dropped_tg = torch.ones_like(group_tg, dtype=torch.bool).scatter_(-1, kept, False)
            choice_te = grouped_tgx.masked_fill(dropped_tg.unsqueeze(-1), -torch.inf).flatten(-2)
        expert_tk = choice_te.topk(config.num_experts_per_tok, dim=-1).indices

        by_sequence = expert_tk.unflatten(0, (-1, batches)).movedim(1, 0).flatten(1)
        counts_be = scores_te.new_zeros((batches, config.n_routed_experts))
        counts_be.scatter_add_(-1, by_sequence, torch.ones_like(by_sequence, dtype=counts_be.dtype))
        if self.training:
            self.load_e += counts_be.sum(0).long()
        sequence_counts_be = None
        if config.aux_loss_kind != "none":
            sequence_counts_be = counts_be.clone()
            all_reduce_(sequence_counts_be, self.sequence)
        return Routing(expert_tk, counts_be, sequence_counts_be)

    def _auxiliary_loss(
        self, scores_te: torch.Tensor, routing: Routing, shape: torch.Size, batch: MicroBatch
    ) -> torch.Tensor | None:
        """α Σᵢ fᵢ Pᵢ of each sequence, averaged over the sequences of the global batch; this rank's tokens' part of it.

        fᵢ = E/(K·S)·countᵢ over the whole sequence, without gradient; Pᵢ = mean over the sequence of sᵢ (V2) or
        sᵢ/Σⱼsⱼ (V3).
        """
        config = self.config
        if config.aux_loss_kind == "none" or batch.denominators is None:
            return None
        assert routing.sequence_counts_be is not None
        share_te = scores_te / scores_te.sum(-1, keepdim=True) if config.scoring_func == "sigmoid" else scores_te
        length = shape[0] * self.sequence.size
        frequency_be = routing.sequence_counts_be * (config.n_routed_experts / (config.num_experts_per_tok * length))
        share_be = share_te.unflatten(0, (-1, shape[1])).sum(0) / length
        return config.aux_loss_alpha * (frequency_be * share_be).sum() / batch.denominators.sequences


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

    def __init__(self, config: DeepSeekConfig, mesh: Mesh, layer: int, recompute: tuple[str, ...] = ()):
        super().__init__()
        self.gate = Router(config, mesh, layer)
        self.experts = RoutedExperts(config, discard_inner="moe_act" in recompute)
        self.recompute_shared = "shared_experts" in recompute
        self.shared_experts = None
        if config.n_shared_experts:
            self.shared_experts = SharedExpert(config.hidden_size, config.shared_intermediate_size)

    def forward(self, x_lbh: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        recorded = self.gate.layer in batch.routing
        weights_tk, routing, auxiliary = self.gate(x_lbh, batch)
        order_r, place_tk = expert_order(routing.expert_tk)
        ends_e = routing.counts_be.sum(0).cumsum(0).to(torch.int32)
        x_rh, weight_r = dispatch(x_lbh.flatten(0, 1), weights_tk, order_r, place_tk)
        out_lbh = combine(self.experts(x_rh, weight_r, ends_e), order_r, place_tk).view_as(x_lbh)
        if auxiliary is not None:
            out_lbh = _AttachLoss.apply(out_lbh, auxiliary)
            if not recorded:
                batch.record("aux", auxiliary)
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


def routers(stages: Iterable[nn.Module]) -> list[Router]:
    """Every router of these stages, MTP layers included, in order."""
    return [module for stage in stages for module in stage.modules() if isinstance(module, Router)]


@torch.no_grad()
def update_router_bias(gates: list[Router], mesh: Mesh, rate: float) -> torch.Tensor:
    """b += rate · sign(mean load − load) over the global batch (2408.15664).

    Call once after each optimizer step on every rank of the stage: the loads are summed over it by one message.
    Returns the loads int64 [routers, e]. Routers without a bias (V2) are only counted.
    """
    if not gates:
        return torch.zeros((0, 0), dtype=torch.int64, device=mesh.device)
    loads = torch.stack([gate.load_e for gate in gates])
    all_reduce_(loads, mesh.stage)
    for gate, load_e in zip(gates, loads, strict=True):
        if gate.config.has_router_bias:
            load = load_e.float()
            gate.e_score_correction_bias += rate * (load.mean() - load).sign()
    return loads
