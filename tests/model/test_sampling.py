"""Choosing a token: limits, probabilities, and draws that depend on seed, sequence and step alone."""

from __future__ import annotations

import random

import pytest
import torch

from model.sampling import Sampling

VOCABULARY = 17


def logits_of(rows: int) -> torch.Tensor:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    return 2 * torch.randn((rows, VOCABULARY), generator=torch.Generator().manual_seed(seed))


def drawn(sampling: Sampling, logits: torch.Tensor, draws: int = 6000) -> torch.Tensor:
    """Shares of each id among draws of many steps from the same row."""
    ids = sampling.choose(logits.expand(draws, -1), range(draws), 3)
    return torch.bincount(torch.tensor(ids), minlength=VOCABULARY) / draws


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = logits_of(5)
    assert Sampling().choose(logits, range(5), 0) == logits.argmax(-1).tolist()
    assert Sampling(temperature=1.7, top_k=1).choose(logits, range(5), 0) == logits.argmax(-1).tolist()


def test_ids_are_drawn_with_their_probability() -> None:
    logits = logits_of(1)
    expected = (logits[0] / 0.8).softmax(-1)
    # Six standard deviations of a share of 6,000 draws are at most 0.039.
    torch.testing.assert_close(drawn(Sampling(temperature=0.8), logits), expected, atol=0.04, rtol=0)


def test_top_k_and_top_p_keep_the_likeliest_and_their_proportions() -> None:
    logits = logits_of(1)
    probabilities, order = logits[0].softmax(-1).sort(descending=True)
    for sampling, kept in (
        (Sampling(temperature=1, top_k=5), 5),
        (Sampling(temperature=1, top_p=float(probabilities[:3].sum()) - 1e-4), 3),
        (Sampling(temperature=1, top_p=float(probabilities[:3].sum()) + 1e-4), 4),
        # Of the four likeliest, those that hold half of what these four have.
        (Sampling(temperature=1, top_k=4, top_p=float(probabilities[:2].sum() / probabilities[:4].sum()) - 1e-4), 2),
        (Sampling(temperature=1, top_p=1e-9), 1),
    ):
        expected = torch.zeros(VOCABULARY)
        expected[order[:kept]] = probabilities[:kept] / probabilities[:kept].sum()
        found = drawn(sampling, logits)
        assert set(found.nonzero().flatten().tolist()) <= set(order[:kept].tolist())
        torch.testing.assert_close(found, expected, atol=0.04, rtol=0)


def test_a_draw_depends_on_seed_sequence_and_step_alone() -> None:
    logits = torch.zeros((40, VOCABULARY))
    sampling = Sampling(temperature=1, seed=5)
    ids = sampling.choose(logits, range(40), 2)
    assert sampling.choose(logits[:3], [30, 7, 12], 2) == [ids[30], ids[7], ids[12]]
    assert ids != sampling.choose(logits, range(40), 3)
    assert ids != Sampling(temperature=1, seed=6).choose(logits, range(40), 2)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": -1}, "temperature -1 must be"),
        ({"temperature": float("inf")}, "temperature inf must be"),
        ({"top_k": -2}, "top-k -2 must be"),
        ({"top_p": 0.0}, "top-p 0.0 must be"),
        ({"top_p": 1.5}, "top-p 1.5 must be"),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Sampling(**values)
