"""What keeps experts in balance beside the router's bias: losses that a router adds, and the choices that it drops.

Lives here: DeepSeek-V2's three balance losses and its dropping (2405.04434, sections 2.2.3 and 2.2.4), V3's loss
(2412.19437, eq. 17–20), the router z-loss (ST-MoE, 2202.08906). No communication; may import `parallel`.
Shapes: t tokens here, b sequences, e experts, k choices a token, g groups of experts, r = t·k choices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from model.config import DeepSeekConfig
from model.microbatch import Routing


@dataclass(frozen=True)
class Balance:
    """How loads are balanced, as far as the model's own configuration doesn't say.

    device_alpha, communication_alpha: α2 and α3 of V2's losses (α1 is the configuration's aux_loss_alpha);
    z_coefficient: of the router z-loss. capacity_factor C: in training an expert takes at most ⌈C·t·k/e⌉ of a rank's
    choices in a micro-batch, or a device, which is one of the configuration's n_group groups, ⌈C·t·k/g⌉ (drop_level).
    Those of lowest weight are dropped, or the last ones (drop_policy). None: no choice is dropped.
    """

    device_alpha: float = 0.0
    communication_alpha: float = 0.0
    z_coefficient: float = 0.0
    capacity_factor: float | None = None
    drop_policy: Literal["probs", "position"] = "probs"
    drop_level: Literal["expert", "device"] = "expert"

    def loss_names(self, config: DeepSeekConfig) -> list[str]:
        """The losses that are added, in the order they are reported: of "aux", "device", "communication" and "z"."""
        weights = {
            "aux": config.aux_loss_alpha,
            "device": self.device_alpha,
            "communication": self.communication_alpha,
            "z": self.z_coefficient,
        }
        has_experts = any(map(config.is_moe_layer, range(config.num_layers_with_mtp)))
        return [name for name, weight in weights.items() if weight and has_experts]

    def kept(self, config: DeepSeekConfig, expert_tk: torch.Tensor, weights_tk: torch.Tensor) -> torch.Tensor:
        """Which choices are within the capacity, where there is one: bool [t, k]."""
        assert self.capacity_factor is not None
        bins = config.n_group if self.drop_level == "device" else config.n_routed_experts
        # Rounded, so that 1.1 times 100 isn't a hair above 110; whatever the factor, nobody can get more than all.
        budget = math.ceil(round(min(self.capacity_factor / bins, 1.0) * expert_tk.numel(), 6))
        bin_tk = expert_tk // (config.n_routed_experts // bins)
        return within_budget(bin_tk, weights_tk if self.drop_policy == "probs" else None, bins, budget)


def within_budget(bin_tk: torch.Tensor, weights_tk: torch.Tensor | None, bins: int, budget: int) -> torch.Tensor:
    """Bool [t, k]: whether a choice is among the first `budget` of its bin: by weight, then (or only) by position.

    bin_tk: int64, from 0 to bins - 1; weights_tk: None where only the position counts. No value travels to the host.
    """
    bin_r = bin_tk.flatten()
    position_r = torch.arange(bin_r.numel(), device=bin_r.device)
    order_r = position_r if weights_tk is None else weights_tk.flatten().argsort(descending=True, stable=True)
    order_r = order_r[bin_r[order_r].argsort(stable=True)]
    counts = bin_r.new_zeros(bins).scatter_add_(0, bin_r, torch.ones_like(bin_r))
    start = counts.cumsum(0) - counts
    kept_r = torch.empty_like(bin_r, dtype=torch.bool)
    kept_r[order_r] = position_r - start[bin_r[order_r]] < budget
    return kept_r.view(bin_tk.shape)


def visits(expert_tk: torch.Tensor, batches: int, config: DeepSeekConfig) -> torch.Tensor:
    """Int64 [b, g]: how many of each sequence's tokens here are sent to each group, whatever number of its experts."""
    group_tk = expert_tk // (config.n_routed_experts // config.n_group)
    sent_tg = group_tk.new_zeros((len(group_tk), config.n_group)).scatter_(-1, group_tk, 1)
    return sent_tg.unflatten(0, (-1, batches)).sum(0)


def auxiliary_losses(
    config: DeepSeekConfig,
    balance: Balance,
    logits_te: torch.Tensor,
    scores_te: torch.Tensor,
    routing: Routing,
    length: int,
    sequences: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """By name the losses of this rank's tokens: their part of the mean over the global batch's sequences.

    length: S, tokens of a sequence over all its ranks; sequences: of the global batch. With E experts, K choices, D
    groups of which a token visits at most M (n_group and topk_group, whatever the ranks are), of each sequence

    - aux: α1 Σᵢ fᵢ Pᵢ, fᵢ = E/(K·S)·countᵢ, without gradient; Pᵢ the mean of sᵢ (V2), or of sᵢ/Σⱼsⱼ (V3)
    - device: α2 Σ_d f'_d P'_d, f'_d the mean of f in group d, P'_d the sum of P
    - communication: α3 Σ_d f''_d P'_d, f''_d = D/(M·S)·(tokens sent to group d)

    and of all tokens z: c · mean of (log Σⱼ exp zⱼ)².
    """
    losses: dict[str, torch.Tensor] = {}

    def by_group(x_be: torch.Tensor) -> torch.Tensor:
        return x_be.unflatten(-1, (config.n_group, -1))

    if routing.sequence_counts_be is not None:
        share_te = scores_te / scores_te.sum(-1, keepdim=True) if config.scoring_func == "sigmoid" else scores_te
        share_be = share_te.unflatten(0, (-1, len(routing.sequence_counts_be))).sum(0) / length
        frequency_be = routing.sequence_counts_be * (config.n_routed_experts / (config.num_experts_per_tok * length))
        if config.aux_loss_alpha:
            losses["aux"] = config.aux_loss_alpha * (frequency_be * share_be).sum() / sequences
        if balance.device_alpha:
            products_bg = by_group(frequency_be).mean(-1) * by_group(share_be).sum(-1)
            losses["device"] = balance.device_alpha * products_bg.sum() / sequences
        if balance.communication_alpha:
            assert routing.sequence_visits_bg is not None
            frequency_bg = routing.sequence_visits_bg * (config.n_group / (config.topk_group * length))
            products_bg = frequency_bg * by_group(share_be).sum(-1)
            losses["communication"] = balance.communication_alpha * products_bg.sum() / sequences
    if balance.z_coefficient:
        square_t = logits_te.logsumexp(-1).square()
        losses["z"] = balance.z_coefficient * square_t.sum() / (sequences * length)
    return losses
