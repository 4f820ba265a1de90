"""Fixtures of the kernels' tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_seed() -> int:
    """A new seed for every run, shown where the test fails."""
    seed = torch.seed()
    print(f"torch.manual_seed({seed})")
    return seed
