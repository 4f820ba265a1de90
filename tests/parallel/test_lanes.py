"""Lanes: nothing is sent after a failure, which is raised where it happened; reducers of one mesh keep one order."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from parallel.compression.lanes import Lanes
from parallel.compression.options import CompressionOptions
from parallel.gradients import GradientReducer
from parallel.mesh import Layout, Mesh
from parallel.sharding import Sharding

RunRanks = Callable[..., list[Any]]


def test_after_a_failure_a_lane_sends_nothing_and_later_reductions_fail_too() -> None:
    """Another rank would take a later bucket's message for the one that never came."""
    lanes, ran = Lanes(torch.device("cpu")), []

    def fail() -> None:
        raise MemoryError("no room for bucket 1")

    def phases(bucket: int) -> list[Callable[[], None]]:
        first, second = (lambda: ran.append((bucket, 0))), (lambda: ran.append((bucket, 1)))
        return [first, fail if bucket == 1 else second]

    told: list[BaseException] = []
    works = [lanes.submit(phases(bucket), told.append) for bucket in range(4)]
    works[0].wait()
    for work in works[1:]:
        with pytest.raises(MemoryError, match="bucket 1"):
            work.wait()
    assert [lane for bucket, lane in ran if bucket > 0] == [0, 0, 0], "lane 1 has stopped"
    assert len(told) == 3


def model(seed: int, mesh: Mesh, codec: str) -> tuple[nn.Module, GradientReducer]:
    torch.manual_seed(seed)
    made = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    for parameter in made.parameters():
        parameter.sharding = Sharding()  # type: ignore[attr-defined]
    options = CompressionOptions(codec)  # type: ignore[arg-type]
    return made, GradientReducer(made.named_parameters(), mesh, bucket_cap_mb=0.01, compression=options)


def interleaved_and_alone(seed: int) -> bool:
    """Two models whose reductions are under way at once, one of them with a slow rank, against each by itself."""
    mesh = Mesh.create(Layout())
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed + mesh.rank))
    found: list[list[torch.Tensor]] = []
    for together in (True, False):
        pairs = [model(seed, mesh, "int8"), model(seed + 1, mesh, "int4")]
        slow = pairs[mesh.rank % 2][1].buckets[0].reduction
        assert slow is not None
        first = slow.phases[0]
        slow.phases[0] = lambda first=first: (time.sleep(0.1), first())  # type: ignore[assignment,misc]
        for made, reducer in pairs:
            made(x).square().mean().backward()
            if not together:
                reducer.finish()
        for _, reducer in pairs if together else []:
            reducer.finish()
        found.append([p.main_grad.clone() for _, reducer in pairs for p in reducer.parameters])  # type: ignore[attr-defined]
    return all(map(torch.equal, *found))


def test_two_reducers_on_one_mesh_do_not_mix_up_their_messages(run_ranks: RunRanks, seed: int) -> None:
    assert run_ranks(2, interleaved_and_alone, seed) == [True, True]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"residual": "fp16"}, "residual 'fp16'"),
        ({"decay": 1.5}, "decay 1.5"),
        ({"decay": float("nan")}, "decay nan"),
        ({"rank": 0}, "rank 0"),
        ({"inner_size": 0}, "inner size 0"),
        ({"exclude": "vector"}, "tuple"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        CompressionOptions("int8", **options)
