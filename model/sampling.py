"""The next token from its logits: the likeliest, or one drawn among the likeliest.

Lives here: pure functions of logits, seed and place; no state, no ranks. Imports torch only. Sources: top-k
(1805.04833), top-p, the nucleus (1904.09751). Shapes: b sequences, v vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    temperature: divides the logits; 0 takes the likeliest token. top_k: only the k likeliest (0: all); top_p: of these
    the fewest that have this probability together. seed: one draw for each sequence and step, from these three alone,
    so no layout and no other sequence changes it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature {self.temperature} must be a number of at least 0, which is greedy")
        if self.top_k < 0:
            raise ValueError(f"top-k {self.top_k} must be at least 1, or 0 for no limit")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p {self.top_p} must be above 0 and at most 1, which is no limit")

    def choose(self, logits_bv: torch.Tensor, sequences: Sequence[int], step: int) -> list[int]:
        """One id for each row; sequences: the number of each row's sequence among all; step: tokens it got before."""
        logits_bv = logits_bv.float()
        if self.temperature == 0:
            return logits_bv.argmax(-1).tolist()
        sorted_bk, ids_bk = logits_bv.sort(dim=-1, descending=True, stable=True)
        if self.top_k:
            sorted_bk = sorted_bk[:, : self.top_k]
        # In fp64, where a sum over a whole vocabulary is exact enough not to depend on its order.
        upto_bk = (sorted_bk.double() / self.temperature).softmax(-1).cumsum(-1)
        before_bk = torch.cat([torch.zeros_like(upto_bk[:, :1]), upto_bk[:, :-1]], dim=-1)
        inside_bk = before_bk < self.top_p  # the first is always inside
        mass_b = torch.where(inside_bk, upto_bk, 0.0).amax(-1)
        # Seeded by a text: Python promises the same numbers in every version and on every machine.
        draws = [random.Random(f"{self.seed}/{sequence}/{step}").random() for sequence in sequences]
        drawn_b = torch.tensor(draws, dtype=torch.float64).to(mass_b.device) * mass_b
        place_b = (upto_bk <= drawn_b.unsqueeze(-1)).sum(-1).minimum(inside_bk.sum(-1) - 1)
        return ids_bk.gather(-1, place_b.unsqueeze(-1)).squeeze(-1).tolist()
