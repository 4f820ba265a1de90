"""What MLA keeps of the tokens before: one latent and one rotated key a token and layer, which all heads share.

Lives here: the cache, and which of a step's rows belong to which sequence. Imports torch only. Source: DeepSeek-V2
(2405.04434, section 2.1.2). Shapes: b sequences, s places, c latent of keys and values, r rotated width, R rows of a
step: the new tokens of all sequences, one sequence after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


class LatentCache:
    """Of b sequences, in each of this rank's layers: [b, s, c + r], the same on every tp rank.

    A step begins with `begin`; each layer then stores its rows with `append`. In the first step a sequence has all
    tokens of its prompt, however many, in each later one a single token. What isn't written yet is zero. One of c + r
    values a token, V3 needs 576 where heads would keep 128 · 320.
    """

    def __init__(
        self,
        layers: Iterable[int],
        sequences: int,
        places: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.kept = {
            layer: torch.zeros((sequences, places, width), dtype=dtype, device=device) for layer in sorted(layers)
        }
        self.places, self.device = places, device
        self.lengths = [0] * sequences
        """Tokens of each sequence, those of the step that has begun included."""
        self.is_prefill = True
        """Whether the step that has begun is the first."""
        self.spans: list[tuple[int, int]] = []
        """First row and end of each sequence's rows in this step."""
        self.positions = torch.zeros(0, dtype=torch.int64, device=device)
        """Of each row in its sequence, int64 [R]."""
        self.mask = torch.zeros((sequences, 0), dtype=torch.bool, device=device)
        """bool [b, longest]: where a sequence has a token."""
        self._sequences = self.positions

    @property
    def rows(self) -> int:
        """Of the step that has begun."""
        return self.spans[-1][1] if self.spans else 0

    @property
    def nbytes(self) -> int:
        """What this rank keeps."""
        return sum(kept.nbytes for kept in self.kept.values())

    def begin(self, counts: Sequence[int]) -> None:
        """A step in which sequence i gets counts[i] tokens. Raises ValueError where they don't suit the cache."""
        before = self.lengths
        if len(counts) != len(before):
            raise ValueError(f"the cache holds {len(before)} sequences, the step brings tokens of {len(counts)}")
        self.is_prefill = not any(before)
        if not self.is_prefill and any(count != 1 for count in counts):
            raise ValueError(f"after the prompts a step brings one token a sequence, not {list(counts)}")
        lengths = [had + count for had, count in zip(before, counts, strict=True)]
        if max(lengths, default=0) > self.places:
            raise ValueError(f"a sequence of {max(lengths)} tokens is beyond the cache's {self.places} places")
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        self.spans = [(end - count, end) for end, count in zip(ends, counts, strict=True)]
        self.lengths = lengths
        owners = [i for i, count in enumerate(counts) for _ in range(count)]
        places = [had + step for had, count in zip(before, counts, strict=True) for step in range(count)]
        self._sequences, self.positions, lengths_b = (
            torch.tensor(x, dtype=torch.int64).to(self.device) for x in (owners, places, lengths)
        )
        self.mask = torch.arange(max(lengths, default=0), device=self.device) < lengths_b.unsqueeze(1)

    def append(self, layer: int, rows_rx: torch.Tensor) -> None:
        """Store the step's rows, [R, c + r], in their places."""
        self.kept[layer][self._sequences, self.positions] = rows_rx.to(self.kept[layer].dtype)

    def read(self, layer: int) -> torch.Tensor:
        """[b, longest, c + r]: all tokens so far; zeros behind a shorter sequence's last."""
        return self.kept[layer][:, : self.mask.shape[1]]

    def keep(self, sequences: Sequence[int]) -> None:
        """Go on with these sequences alone, in this order; the others' memory is freed."""
        chosen = torch.tensor(list(sequences), dtype=torch.int64, device=self.device)
        for layer, kept in self.kept.items():  # one at a time: never two copies of the whole cache
            self.kept[layer] = kept.index_select(0, chosen)
        self.lengths = [self.lengths[i] for i in sequences]
