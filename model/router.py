"""The router: which experts each token visits, with which weight, and how their loads are kept in balance.

Lives here: routing (DeepSeek-V3 2412.19437 eq. 13–16, V2 2405.04434 section 2.2), counting, the bias update; losses and
dropping are in `balance`. May import `parallel`.
Shapes: l = s/(cp·tp) this rank's part of the sequence, b sequences, t = l·b tokens, e experts, k choices a token, g
groups.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional as F

from model.balance import Balance, auxiliary_losses, visits
from model.config import DeepSeekConfig
from model.microbatch import MicroBatch, Routing
from parallel.comm import all_reduce_
from parallel.expert import plan_traffic
from parallel.mesh import Mesh
from parallel.sharding import Sharding


class Router(nn.Module):
    """Scores every expert for every token in fp32 and keeps k of them.

    The router is whole on every tp rank and sees this rank's tokens. `load_e` (int64) counts the choices of training
    micro-batches since `reset_counts`, at the start of a step, `dropped` (int64 [1]) those of them that were dropped.
    """

    e_score_correction_bias: torch.Tensor
    load_e: torch.Tensor
    dropped: torch.Tensor

    def __init__(self, config: DeepSeekConfig, mesh: Mesh, layer: int, balance: Balance):
        super().__init__()
        self.config, self.balance = config, balance
        self.losses = balance.loss_names(config)
        self.sequence, self.ep = mesh.sequence, mesh.ep
        self.layer = layer
        experts = config.n_routed_experts
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size))
        self.weight.sharding = Sharding(sequence_fed=True, role="router")  # type: ignore[attr-defined]
        self.register_buffer("load_e", torch.zeros(experts, dtype=torch.int64), persistent=False)
        self.register_buffer("dropped", torch.zeros(1, dtype=torch.int64), persistent=False)
        if config.has_router_bias:
            self.register_buffer("e_score_correction_bias", torch.zeros(experts))

    def forward(self, x_lbh: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Routing, torch.Tensor | None]:
        """Weights [t, k] in x's dtype, the choice, and the auxiliary losses' sum (a scalar to differentiate, or None).

        The losses are recorded in the batch, by name; not again when this is computed again for backward.
        """
        config = self.config
        logits_te = F.linear(x_lbh.flatten(0, 1).float(), self.weight.float())
        scores_te = logits_te.sigmoid() if config.scoring_func == "sigmoid" else logits_te.softmax(-1)
        routing, recomputed = batch.routing.get(self.layer), self.layer in batch.routing
        if routing is None:
            routing = batch.routing[self.layer] = self._choose(scores_te.detach(), batches=x_lbh.shape[1])
        weights_tk = self._weights(scores_te, routing.expert_tk).to(x_lbh.dtype)
        if not self.losses or batch.denominators is None:
            return weights_tk, routing, None

        length = x_lbh.shape[0] * self.sequence.size
        losses = auxiliary_losses(
            config, self.balance, logits_te, scores_te, routing, length, batch.denominators.sequences
        )
        if not recomputed:
            for name, loss in losses.items():
                batch.record(name, loss)
        return weights_tk, routing, torch.stack(list(losses.values())).sum()

    def reset_counts(self) -> None:
        """A step begins."""
        self.load_e.zero_()
        self.dropped.zero_()

    def _weights(self, scores_te: torch.Tensor, expert_tk: torch.Tensor) -> torch.Tensor:
        config = self.config
        weights_tk = scores_te.gather(-1, expert_tk)
        if config.norm_topk_prob:
            weights_tk = weights_tk / (weights_tk.sum(-1, keepdim=True) + 1e-20)
        if config.scoring_func == "sigmoid" or not config.norm_topk_prob:  # V2 either normalises or scales
            weights_tk = weights_tk * config.routed_scaling_factor
        return weights_tk

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
        load_e = rows_e = counts_be.sum(0).long()
        kept_tk = None
        if self.training:
            self.load_e += load_e
            if self.balance.capacity_factor is not None:
                kept_tk = self.balance.kept(config, expert_tk, self._weights(scores_te, expert_tk))
                rows_e = torch.zeros_like(load_e).scatter_add_(0, expert_tk.flatten(), kept_tk.flatten().long())
                self.dropped += (load_e - rows_e).sum()
        traffic = plan_traffic(rows_e, self.ep)
        return Routing(expert_tk, kept_tk, traffic, *self._over_the_sequence(expert_tk, counts_be))

    def _over_the_sequence(
        self, expert_tk: torch.Tensor, counts_be: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Choices, and visits of groups, of whole sequences, where a loss needs them: one message to their ranks."""
        if not {"aux", "device", "communication"}.intersection(self.losses):
            return None, None
        if "communication" not in self.losses:
            counts_be = counts_be.clone()
            all_reduce_(counts_be, self.sequence)
            return counts_be, None
        both = torch.cat([counts_be, visits(expert_tk, len(counts_be), self.config).to(counts_be.dtype)], dim=-1)
        all_reduce_(both, self.sequence)
        return both[:, : -self.config.n_group], both[:, -self.config.n_group :]


def routers(stages: Iterable[nn.Module]) -> list[Router]:
    """Every router of these stages, MTP layers included, in order."""
    return [module for stage in stages for module in stage.modules() if isinstance(module, Router)]


@torch.no_grad()
def sum_counts(gates: list[Router], mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch's loads, int64 [routers, e], and how many of these choices were dropped, int64 [routers].

    Call once a step on every rank of the stage: the counts are summed over it by one message.
    """
    if not gates:
        empty = torch.zeros((0, 0), dtype=torch.int64, device=mesh.device)
        return empty, empty.sum(-1)
    counts = torch.stack([torch.cat([gate.load_e, gate.dropped]) for gate in gates])
    all_reduce_(counts, mesh.stage)
    return counts[:, :-1], counts[:, -1]


@torch.no_grad()
def update_router_bias(gates: list[Router], loads: torch.Tensor, rate: float) -> None:
    """b += rate · sign(mean load − load) over the global batch (2408.15664), whose loads `sum_counts` gives.

    Call once after each optimizer step on every rank of the stage. Routers without a bias (V2) stay as they are.
    """
    for gate, load_e in zip(gates, loads, strict=True):
        if gate.config.has_router_bias:
            load = load_e.float()
            gate.e_score_correction_bias += rate * (load.mean() - load).sign()
