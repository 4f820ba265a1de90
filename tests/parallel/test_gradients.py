"""The gradient reducer on toy parameters: buckets, fp32 accumulation, overlap, clipping, and torch's DDP as a judge."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import parallel.buckets as buckets_module
from parallel.buckets import cut
from parallel.comm import barrier
from parallel.gradients import GradientReducer
from parallel.mesh import Axis, Layout, Mesh
from parallel.sharding import Sharding
from parallel.weight_gradient import will_add_its_gradient

RunRanks = Callable[..., list[Any]]
DENSE, REPLICATED, EXPERT = Sharding(0, "tp", 10), Sharding(sequence_fed=True), Sharding(0, "ep", 10, expert=True)


def parameter(sharding: Sharding, *shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    made = nn.Parameter(torch.randn(shape).to(dtype))
    made.sharding = sharding  # type: ignore[attr-defined]
    return made


def test_a_reducer_goes_with_its_parameters() -> None:
    """Autograd keeps its hooks where Python's collector doesn't look: they must not keep the buffers."""
    parameters = [will_add_its_gradient(parameter(DENSE, 10)), parameter(REPLICATED, 2)]
    reducer = GradientReducer([(str(i), p) for i, p in enumerate(parameters)], Mesh.create(Layout()))
    gone = [weakref.ref(x) for x in (reducer, reducer.mesh, reducer.buckets[0].buffer, *parameters)]
    parameters[1].sum().backward()
    del parameters, reducer
    gc.collect()
    assert [x() for x in gone] == [None] * len(gone)


@pytest.mark.parametrize(
    ("sizes", "cap", "buckets"),
    [
        ([], 4, []),
        ([3], 4, [(0, 1)]),
        ([1, 2, 1], 4, [(0, 3)]),  # all in one
        ([3, 3, 3, 3, 3], 4, [(0, 2), (2, 4), (4, 5)]),  # full once the cap is reached
        ([9, 1, 1, 9, 1], 4, [(0, 1), (1, 4), (4, 5)]),  # small ones travel with the large one after them
        ([2, 2, 2, 2, 1, 1], 8, [(0, 4), (4, 6)]),  # the end is full at a quarter
        ([2, 2, 2, 9], 8, [(0, 3), (3, 4)]),
        ([1, 9], 4, [(0, 1), (1, 2)]),
        ([5, 6], 0, [(0, 1), (1, 2)]),
    ],
)
def test_cutting_into_buckets(sizes: list[int], cap: float, buckets: list[tuple[int, int]]) -> None:
    assert cut(sizes, cap) == buckets


def test_buckets_hold_parameters_from_last_to_first_one_axis_each() -> None:
    mesh = Mesh.create(Layout())
    mesh.stage, mesh.edp = Axis("stage", (0, 1), 0), Axis("edp", (0, 2), 0)  # as if they had other ranks than dp_cp
    sizes = [(DENSE, 100), (REPLICATED, 7), (DENSE, 300), (EXPERT, 200), (DENSE, 50), (DENSE, 900), (DENSE, 60)]
    sizes += [(REPLICATED, 9), (EXPERT, 190), (DENSE, 101)]
    named = [(str(i), parameter(sharding, size, 1)) for i, (sharding, size) in enumerate(sizes)]
    number = {id(p): int(name) for name, p in named}
    reducer = GradientReducer(named, mesh, bucket_cap_mb=400 * 4 / 2**20)
    filled = [(bucket.axis.name, [number[id(p)] for p in bucket.parameters]) for bucket in reducer.buckets]
    # In the order in which backward completes them.
    assert filled == [
        ("dp_cp", [9, 6, 5]),
        ("edp", [8, 3]),
        ("dp_cp", [4, 2]),
        ("stage", [7, 1]),
        ("dp_cp", [0]),
    ]
    for bucket in reducer.buckets:
        assert bucket.buffer.numel() == sum(p.numel() for p in bucket.parameters)
        for p in bucket.parameters:
            assert p.main_grad.untyped_storage().data_ptr() == bucket.buffer.untyped_storage().data_ptr()
            assert p.main_grad.shape == p.shape
    assert len(GradientReducer(named, mesh, bucket_cap_mb=25).buckets) == 3
    # Axes of the same ranks need no messages of their own.
    assert len(GradientReducer(named, Mesh.create(Layout()), bucket_cap_mb=25).buckets) == 1
    assert len(GradientReducer(named, mesh, bucket_cap_mb=0).buckets) == len(named)


def test_frozen_parameters_are_left_out() -> None:
    frozen, trained = parameter(REPLICATED, 3, 5), parameter(REPLICATED, 5, 2)
    frozen.requires_grad = False
    reducer = GradientReducer([("frozen", frozen), ("trained", trained)], Mesh.create(Layout()))
    (torch.randn(4, 3) @ frozen @ trained).sum().backward()
    reducer.finish()
    assert reducer.parameters == [trained] and frozen.grad is None and not hasattr(frozen, "main_grad")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_micro_batches_add_up_in_fp32(dtype: torch.dtype) -> None:
    """In bf16 the sum of 300 gradients of about 1 would stop growing at 256."""
    weight = parameter(REPLICATED, 7, 3, dtype=dtype)
    reducer = GradientReducer([("w", weight)], Mesh.create(Layout()))
    for _ in range(2):  # the second step starts from zero again
        reducer.zero()
        expected = torch.zeros(7, 3, dtype=torch.float64)
        for number in range(300):
            factor = (1 + 0.1 * torch.randn(7, 3)).to(dtype)
            if number < 299:
                with reducer.no_sync():
                    (weight * factor).sum().backward()
            else:
                (weight * factor).sum().backward()
            expected += factor.double()
        reducer.finish()
        assert weight.main_grad.dtype == torch.float32
        torch.testing.assert_close(weight.main_grad.double(), expected, rtol=1e-5, atol=0.0)
        if dtype == torch.bfloat16:
            assert weight.grad is None, "a gradient in bf16 is dropped once it is added"
        else:
            assert weight.grad is not None and weight.grad.data_ptr() == weight.main_grad.data_ptr()


def test_clipping_scales_to_the_largest_norm_and_reports_the_norm_before() -> None:
    mesh = Mesh.create(Layout())
    # 2 x 5000 values: more than one row of the norm's fp32 sums, and a remainder.
    named = [("a", parameter(REPLICATED, 5000, 2)), ("b", parameter(DENSE, 10, 1)), ("c", parameter(EXPERT, 10, 3))]
    reducer = GradientReducer(named, mesh)
    for p in reducer.parameters:
        p.main_grad.normal_()
    before = [p.main_grad.clone() for p in reducer.parameters]
    norm = float(torch.cat([g.flatten() for g in before]).double().norm())

    for large in (0.0, 2 * norm):
        assert float(reducer.clip(large)) == pytest.approx(norm, rel=1e-6)
        assert all(torch.equal(p.main_grad, g) for p, g in zip(reducer.parameters, before, strict=True))
    assert float(reducer.clip(0.25 * norm)) == pytest.approx(norm, rel=1e-6)
    for p, g in zip(reducer.parameters, before, strict=True):
        torch.testing.assert_close(p.main_grad, 0.25 * g, rtol=1e-5, atol=0.0)
    assert float(reducer.norm()) == pytest.approx(0.25 * norm, rel=1e-5)


class Toy(nn.Module):
    """Three layers; the middle one may be left out of a forward, as an expert without tokens is."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in ((7, 11), (11, 11), (11, 3)))
        for p in self.parameters():
            p.sharding = REPLICATED  # type: ignore[attr-defined]
        self.layers[1].weight.sharding = EXPERT

    def forward(self, x: torch.Tensor, middle: bool = True) -> torch.Tensor:
        x = self.layers[0](x).tanh()
        x = self.layers[1](x).tanh() if middle else x
        return self.layers[2](x).square().sum()


def toy_on_two_ranks(seed: int) -> dict[str, Any]:
    mesh = Mesh.create(Layout())
    data = torch.randn(3, 2, 5, 7, generator=torch.Generator().manual_seed(seed + 1))  # [micro-batch, rank, rows, in]
    found: dict[str, Any] = {}

    ddp_model = Toy(seed)
    ddp = DistributedDataParallel(ddp_model)
    for m in range(3):
        if m < 2:
            with ddp.no_sync():
                ddp(data[m, mesh.rank]).backward()
        else:
            ddp(data[m, mesh.rank]).backward()
    found["ddp"] = [p.grad * 2 for p in ddp_model.parameters()]  # type: ignore[operator]  # DDP's is the mean

    all_reduce, launched = buckets_module.all_reduce_, list[int]()

    def watched(x: torch.Tensor, *args: Any, **options: Any) -> Any:
        launched.append(x.numel())
        return all_reduce(x, *args, **options)

    buckets_module.all_reduce_ = watched
    for overlap in (True, False):
        model = Toy(seed)
        reducer = GradientReducer(model.named_parameters(), mesh, bucket_cap_mb=0, overlap=overlap)
        for name in ("whole", "middle left out on rank 1", "middle left out of the last on rank 0"):
            reducer.zero()
            launched.clear()
            mesh.ledger.reset()
            for m in range(3):
                middle = {"whole": True, "middle left out on rank 1": mesh.rank == 0}.get(name, mesh.rank == 1 or m < 2)
                if m < 2:
                    with reducer.no_sync():
                        model(data[m, mesh.rank], middle).backward()
                    assert mesh.ledger.calls() == 0, "no_sync communicates nothing"
                else:
                    model(data[m, mesh.rank], middle).backward()
            early = list(launched)
            reducer.finish()
            found[name, overlap] = ([g.main_grad.clone() for g in reducer.parameters], early, list(launched))
    buckets_module.all_reduce_ = all_reduce
    return found


def toy_gradients(seed: int, middle: Callable[[int, int], bool]) -> list[torch.Tensor]:
    """On one rank, in fp64: the sum over both ranks' micro-batches."""
    data = torch.randn(3, 2, 5, 7, generator=torch.Generator().manual_seed(seed + 1)).double()
    model = Toy(seed).double()
    for m in range(3):
        for rank in range(2):
            model(data[m, rank], middle(rank, m)).backward()
    return [p.grad for p in model.parameters()]  # type: ignore[misc]


def test_sums_equal_ddp_with_and_without_overlap_also_where_a_rank_has_no_gradient(
    run_ranks: RunRanks, seed: int
) -> None:
    cases: dict[str, Callable[[int, int], bool]] = {
        "whole": lambda rank, m: True,
        "middle left out on rank 1": lambda rank, m: rank == 0,
        "middle left out of the last on rank 0": lambda rank, m: rank == 1 or m < 2,
    }
    order = [33, 121, 77]  # values in a bucket, last layer first
    for rank, found in enumerate(run_ranks(2, toy_on_two_ranks, seed)):
        for name, middle in cases.items():
            expected = toy_gradients(seed, middle)
            with_overlap, without = found[name, True], found[name, False]
            for a, b, c in zip(with_overlap[0], without[0], expected, strict=True):
                assert torch.equal(a, b), f"{name}: overlap changes bits"
                assert (a - c).norm() <= 1e-6 * c.norm(), name
            # Every rank launches the same buckets in the same order, however early.
            assert with_overlap[2] == without[2] == order, (rank, name)
            assert without[1] == []
            late = (name, rank) in {("middle left out on rank 1", 1), ("middle left out of the last on rank 0", 0)}
            assert with_overlap[1] == (order[:1] if late else order), (rank, name)
        for ours, theirs in zip(found["whole", True][0], found["ddp"], strict=True):
            assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


def exposed(seed: int) -> tuple[float, float]:
    """Rank 1 comes to `finish` a second late, then both come at once."""
    mesh = Mesh.create(Layout())
    reducer = GradientReducer(Toy(seed).named_parameters(), mesh)
    barrier(mesh.world)
    time.sleep(mesh.rank)
    reducer.finish()
    late = reducer.exposed_seconds
    barrier(mesh.world)
    reducer.finish()
    return late, reducer.exposed_seconds


def test_exposed_time_is_that_of_the_last_steps_waiting(run_ranks: RunRanks, seed: int) -> None:
    (waited, then), (came_late, _) = run_ranks(2, exposed, seed)
    assert waited > 0.5 and came_late < waited and 0 < then < waited
