"""Fixtures of the tests of ranks, groups and schedules."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def seed() -> int:
    """A new seed for every run, shown where the test fails. Ranks draw from it alike: a test hands it to them."""
    seed = torch.seed() % 2**31
    print(f"torch.manual_seed({seed})")
    return seed
