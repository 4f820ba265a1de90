"""A sequence split over ranks for attention, zig-zag, so that a causal mask gives every rank the same work.

Lives here: which positions a rank holds, the cut, and the gather back. Imports `parallel` only. Source: Llama 3
(2407.21783, section 3.3.2): 2n chunks on n ranks, rank r has chunks r and 2n-1-r; keys are gathered, there's no ring.
Shapes: s the whole sequence, n the axis's ranks; a rank's part is its two chunks in order, s/n long.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallel.comm import gather_sequence
from parallel.mesh import Axis


def chunk_spans(length: int, ranks: int, rank: int) -> list[tuple[int, int]]:
    """(start, end) of what a rank holds of a sequence, in order: everything on one rank, else two chunks of 2·ranks.

    Raises ValueError where the sequence can't be cut into so many chunks of one length.
    """
    if ranks == 1:
        return [(0, length)]
    if length % (2 * ranks):
        raise ValueError(
            f"a sequence of {length} tokens isn't divisible into the {2 * ranks} chunks of context parallel size "
            f"{ranks}: use a multiple of {2 * ranks}, or lower the size"
        )
    size = length // (2 * ranks)
    return [(chunk * size, (chunk + 1) * size) for chunk in (rank, 2 * ranks - 1 - rank)]


def places_of_chunks(ranks: int) -> list[int]:
    """Where chunk 0, 1, … of the sequence stands when all ranks' parts lie one after the other in rank order."""
    return [*range(0, 2 * ranks, 2), *range(2 * ranks - 1, 0, -2)]


def context_part(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This rank's positions of a tensor that is whole along `dim`, the sequence; x itself on one rank."""
    if axis.size == 1:
        return x
    spans = chunk_spans(x.shape[dim], axis.size, axis.rank)
    return torch.cat([x.narrow(dim, start, end - start) for start, end in spans], dim)


def gather_context(parts: Sequence[torch.Tensor], axis: Axis) -> list[torch.Tensor]:
    """Every rank's positions of several tensors in one message, in the order of the sequence: [s/n, ...] -> [s, ...].

    They differ in their last dimension only. All-gather forward; backward, each rank's gradient of the whole sequence,
    which knows only the rank's own queries, is reduce-scattered. For what all queries attend to.
    """
    if axis.size == 1:
        return list(parts)
    chunks = gather_sequence(torch.cat(list(parts), dim=-1), axis).chunk(2 * axis.size)
    whole = torch.cat([chunks[place] for place in places_of_chunks(axis.size)])
    return list(whole.split([part.shape[-1] for part in parts], dim=-1))
