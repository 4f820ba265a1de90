"""What benchmarks/train_step.py makes of its measurements. The times themselves aren't tested."""

from __future__ import annotations

import pytest

from benchmarks.train_step import CHECKED_STEPS, Contender, ratio_to_ours, table, verdicts


def contender(peer: str, layout: str, *seconds: float) -> Contender:
    return Contender(peer, layout, [], seconds=[9.0] * CHECKED_STEPS + list(seconds), losses=[])


def test_ratios_are_medians_over_rounds_of_measured_steps() -> None:
    ours, theirs = contender("ours", "EP2", 1.0, 2.0, 1.0), contender("megatron_core", "EP2", 1.5, 2.0, 1.4)
    assert ratio_to_ours(theirs, ours) == pytest.approx(1.4)
    assert "1500 ms (1.40×)" in table([theirs, ours])[-2] and "1000 ms" in table([theirs, ours])[-1]


@pytest.mark.parametrize(("seconds", "holds"), [(1.31, True), (1.29, False)])
def test_what_must_hold_is_said(seconds: float, holds: bool) -> None:
    ours, theirs = contender("ours", "EP2", 1.0), contender("megatron_core", "EP2", seconds)
    ((found, text),) = verdicts([theirs, ours])
    assert found == holds and f"{seconds:.2f}" in text
    assert verdicts([contender("ours", "TP2", 1.0), contender("megatron_core", "TP2", 9.0)]) == []
