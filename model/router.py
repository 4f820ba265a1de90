"""The router: which experts each token visits, with which weight, and how their loads are kept in balance.

Lives here: routing (DeepSeek-V3 2412.19437 eq. 13–20, V2 2405.04434 section 2.2), the sequence-wise auxiliary loss, the
bias update. May import `parallel`.
Shapes: l = s/tp this rank's part of the sequence, b sequences, t = l·b tokens, e experts, k choices a token, g groups.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional as F

from model.config import DeepSeekConfig
from model.microbatch import MicroBatch, Routing
from parallel.comm import all_reduce_
from parallel.expert import plan_traffic
from parallel.mesh import Mesh
from parallel.sharding import Sharding


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
        self.sequence, self.ep = mesh.sequence, mesh.ep
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
        return Routing(expert_tk, counts_be, sequence_counts_be, plan_traffic(counts_be.sum(0).long(), self.ep))

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
