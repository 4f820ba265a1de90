"""One seed for all generators, their state, and ranks that must agree. Ranks are real gloo processes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import training.rng
from parallel.mesh import Axis, Layout, Ledger, Mesh
from training.arguments import Arguments
from training.failures import ConfigurationError
from training.rng import check_agreement, rng_state, set_rng_state, set_seed


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_seed_fixes_every_generator() -> None:
    seen = []
    for seed in (7, 8, 7):
        set_seed(seed)
        seen.append(draws())
    assert seen[0] == seen[2]
    assert all(a != b for a, b in zip(seen[0], seen[1], strict=True))


def test_a_restored_state_goes_on_where_it_was() -> None:
    set_seed(3)
    draws()
    state = rng_state()
    expected = [draws(), draws()]
    set_seed(99)
    set_rng_state(state)
    assert [draws(), draws()] == expected


def test_negative_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="-1 is negative"):
        set_seed(-1)


def seed_after_a_pause(delays: list[float]) -> tuple[float, float]:
    """When each rank's set_seed began and ended, on the host's one monotonic clock."""
    import time

    world = Mesh.create(Layout()).world
    time.sleep(delays[world.rank])
    before = time.monotonic()
    set_seed(5, world)
    return before, time.monotonic()


def test_no_rank_goes_on_before_all_are_seeded(run_ranks: Callable[..., list[Any]]) -> None:
    times = run_ranks(3, seed_after_a_pause, [0.0, 0.3, 0.1])
    assert min(end for _, end in times) >= max(begin for begin, _ in times)


def agree(changes: dict[int, dict[str, Any]]) -> str:
    world = Mesh.create(Layout()).world
    arguments = Arguments().replace(**changes.get(world.rank, {}))
    try:
        check_agreement(arguments, world)
    except ConfigurationError as error:
        return str(error)
    return "agreed"


def test_ranks_with_equal_arguments_agree(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(3, agree, {}) == ["agreed"] * 3


def test_a_disagreement_is_told_on_every_rank_with_ranks_and_values(run_ranks: Callable[..., list[Any]]) -> None:
    told = run_ranks(4, agree, {2: {"seed": 1}, 3: {"seed": 1, "lr": 0.5}})
    assert len(set(told)) == 1
    host = os.uname().nodename
    assert f"ranks disagree on --seed: 1234 on ranks 0-1 ({host}); 1 on ranks 2-3 ({host})" in told[0]
    assert f"ranks disagree on --lr: 0.00022 on ranks 0-2 ({host}); 0.5 on rank 3 ({host})" in told[0]
    assert told[0].count("ranks disagree") == 2


def test_four_thousand_ranks_are_told_in_a_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Axis("world", tuple(range(4096)), 0, None, Ledger())
    facts = {True: {"--seed": "1", "torch": "2.13"}, False: {"--seed": "2", "torch": "2.13"}}
    calls = []

    def gather(value: Any, axis: Axis) -> list[Any]:
        calls.append(value)
        if len(calls) == 1:  # every 1000th rank has another seed, 8 ranks a host
            return [("odd" if rank % 1000 == 999 else value[0], f"node{rank // 8:03d}") for rank in axis.ranks]
        return [value if rank == 0 else facts[False] if rank == 999 else None for rank in axis.ranks]

    monkeypatch.setattr(training.rng, "gather_objects", gather)
    monkeypatch.setattr(training.rng, "_facts", lambda arguments: facts[True])
    with pytest.raises(ConfigurationError) as caught:
        check_agreement(Arguments(), world)
    text = str(caught.value)
    assert "2 on ranks 999, 1999, 2999, 3999 (node124, node249, node374, node499)" in text
    assert "1 on ranks 0-998, 1000-1998" in text and "more hosts" in text
    assert len(text) < 400 and "torch" not in text
