"""One micro-batch on its way through the stages: tokens, labels, denominators, and what layers leave behind for later.

Lives here: plain state, no computation of the model. May import `parallel`. Every loss is a sum over this micro-batch
divided by a count over the whole global batch, so all later reductions are sums (the same loss in any layout).
Shapes: b sequences of this micro-batch, s the whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from model.latent_cache import LatentCache
from parallel.comm import all_reduce_
from parallel.expert import Traffic
from parallel.mesh import Mesh


@dataclass(frozen=True)
class Denominators:
    """Counts over the global batch: valid tokens of the main loss, of each MTP depth, and sequences. fp64 scalars: fp32
    counts no further than 16,777,216."""

    tokens: torch.Tensor
    mtp_tokens: tuple[torch.Tensor, ...]
    sequences: torch.Tensor


@dataclass(frozen=True)
class Routing:
    """A layer's choice for one micro-batch, kept so that recomputation neither chooses, counts nor communicates again.

    expert_tk: int64 [tokens here, k]; kept_tk: bool, which of these weren't dropped (None: all); traffic: which rows
    travel to which rank; sequence_counts_be: [b, experts] choices of whole sequences, dropped ones too (None without a
    loss that needs it); sequence_visits_bg: [b, groups] their tokens that chose an expert of the group, however many of
    them (None without communication loss).
    """

    expert_tk: torch.Tensor
    kept_tk: torch.Tensor | None
    traffic: Traffic
    sequence_counts_be: torch.Tensor | None = None
    sequence_visits_bg: torch.Tensor | None = None


@dataclass(eq=False)
class MicroBatch:
    """tokens, labels, positions int64 [b, s]; loss_mask fp32 [b, s]; documents int64 [b, s] or None (no borders).

    labels[:, i] is the token after tokens[:, i]. All are of the whole sequence on every context rank, which cuts its
    part where it uses them: what MTP shifts is then right at the borders. denominators: set by `set_denominators`
    before the first forward; q_rotation, k_rotation: of this rank's queries, of all keys; loss_gradient: what backward
    begins with at a loss that is added inside a stage (the loss scale). cache: where text is generated, the tokens
    before; the "sequence" of tokens and positions, [1, s], is then a step's rows, whatever sequence each belongs to.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    positions: torch.Tensor
    documents: torch.Tensor | None = None
    denominators: Denominators | None = None
    q_rotation: torch.Tensor | None = None
    k_rotation: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    routing: dict[int, Routing] = field(default_factory=dict)
    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    loss_gradient: float = 1.0
    cache: LatentCache | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """The same batch with its data on `device`."""

        def move(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x.to(device)

        moved = [move(x) for x in (self.tokens, self.labels, self.loss_mask, self.positions, self.documents)]
        return MicroBatch(*moved)  # type: ignore[arg-type]

    def record(self, name: str, value: torch.Tensor) -> None:
        """Add to a loss that is reported; the sum over all ranks and micro-batches is the loss of the global batch."""
        value = value.detach()
        self.losses[name] = self.losses[name] + value if name in self.losses else value

    def finished(self) -> None:
        """Its last forward and backward on this rank are over: free what the layers left behind for later."""
        self.q_rotation = self.k_rotation = self.attention_mask = None
        self.routing.clear()

    def mtp_tokens(self, depth: int) -> torch.Tensor:
        """Input tokens of MTP depth 1, 2, …: t_{i+depth} at i. What lies beyond the sample repeats its last."""
        return _shift(self.labels, depth - 1)

    def mtp_labels(self, depth: int) -> torch.Tensor:
        """Labels of MTP depth 1, 2, …: t_{i+depth+1} at position i (the last `depth` positions are masked)."""
        return _shift(self.labels, depth)

    def mtp_mask(self, depth: int) -> torch.Tensor:
        """fp32 [b, s]: 1 where every token from i to i+depth has a label that counts and lies in this sample."""
        mask = self.loss_mask
        length = mask.shape[1]
        for step in range(1, depth + 1):
            shifted = torch.zeros_like(mask)
            shifted[:, : max(length - step, 0)] = self.loss_mask[:, step:]
            mask = mask * shifted
        return mask


def _shift(x_bs: torch.Tensor, steps: int) -> torch.Tensor:
    """x moved `steps` to the left along the sequence; the last value fills up."""
    if steps == 0:
        return x_bs
    length = x_bs.shape[1]
    index = (torch.arange(length, device=x_bs.device) + steps).clamp(max=length - 1)
    return x_bs[:, index]


def set_denominators(batches: Sequence[MicroBatch], mtp_depths: int, mesh: Mesh) -> None:
    """Count the global batch by one small all-reduce over dp and give every micro-batch the counts. Collective over dp.

    Every rank of the same dp index holds the same micro-batches, whatever its pipeline, tensor or context rank.
    """
    counts = torch.zeros(2 + mtp_depths, dtype=torch.float64, device=mesh.device)
    for batch in batches:
        counts[0] += batch.loss_mask.sum()
        counts[1] += batch.tokens.shape[0]
        for depth in range(1, mtp_depths + 1):
            counts[1 + depth] += batch.mtp_mask(depth).sum()
    all_reduce_(counts, mesh.dp)
    # A depth may have no valid token at all (short samples): its loss is then 0, not 0/0.
    counts = counts.clamp(min=1)
    denominators = Denominators(counts[0], tuple(counts[2:]), counts[1])
    for batch in batches:
        batch.denominators = denominators
