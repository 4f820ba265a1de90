"""The communication hook for torch's DDP, against DDP without one: means, residuals, rebuilt buckets, NaN, resume."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parallel.compression.ddp_hook import HookState, hook
from parallel.compression.options import CompressionOptions

RunRanks = Callable[..., list[Any]]


class Model(nn.Module):
    """Used in another order than made, so that DDP's second step has other buckets than its first."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(60, 9), nn.Linear(30, 60)
        self.middle = nn.Linear(60, 60)
        self.norm = nn.LayerNorm(60)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.middle(self.norm(torch.relu(self.first(x))))))


def ddp_of(seed: int, group: dist.ProcessGroup | None = None, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    return DistributedDataParallel(Model().to(dtype), bucket_cap_mb=0.01, process_group=group)


def gradients(ddp: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of one backward pass whose loss is linear in the outputs."""
    ddp.zero_grad()
    ddp(x).square().sum().backward()
    return {name: p.grad.detach().clone() for name, p in ddp.module.named_parameters()}


def off(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).norm() / (b[name].norm() + 1e-20)) for name in b)


@contextlib.contextmanager
def pair_group() -> Iterator[dist.ProcessGroup]:
    """This rank's half of the world."""
    half = dist.get_world_size() // 2
    start = dist.get_rank() // half * half
    group = dist.new_group(list(range(start, start + half)), use_local_synchronization=True)
    yield group


def means_and_feedback(seed: int, options: CompressionOptions, warmup_steps: int) -> dict[str, Any]:
    """Five steps of one model with the hook beside one without, on the same data."""
    plain, hooked = ddp_of(seed), ddp_of(seed)
    state = HookState(hooked, options, warmup_steps)
    hooked.register_comm_hook(state, hook)
    torch.manual_seed(seed + 1 + dist.get_rank())
    steps, sums = [], [{}, {}]
    for _ in range(5):
        x = torch.randn(7, 30)
        both = gradients(hooked, x), gradients(plain, x)
        steps.append(both)
        if len(steps) > warmup_steps:
            for total, found in zip(sums, both, strict=True):
                for name, value in found.items():
                    total[name] = total.get(name, 0) + value
    kept = state.state_dict()["kept"]
    worlds = {name: kept[name].float() for name in kept if name in sums[0]}
    for value in worlds.values():
        dist.all_reduce(value)
    with_residual = {name: sums[0][name] + worlds[name].view(sums[0][name].shape) for name in worlds}
    statistics = state.statistics()
    assert statistics is not None
    return {
        "warm-up": [off(*step) for step in steps[:warmup_steps]],
        "each": [off(*step) for step in steps[warmup_steps:]],
        "vectors": max(off({"": h[name]}, {"": p[name]}) for h, p in steps for name in h if h[name].ndim == 1),
        "with residual": off(with_residual, {name: sums[1][name] for name in worlds}),
        "compressed": sorted(worlds),
        "hooked": [h for h, _ in steps],
        "ratio": statistics.ratio,
        "buckets": len(state._buckets),
    }


@pytest.mark.parametrize(
    ("options", "error", "residual"),
    [
        (CompressionOptions("int8"), 0.03, 0.03),
        (CompressionOptions("topk", density=0.1, topk_transport="gather"), 1.5, 1e-5),
        (CompressionOptions("powersgd", rank=4, residual="bf16"), 1.5, 0.02),
    ],
    ids=lambda x: x.name if isinstance(x, CompressionOptions) else "",
)
def test_the_hook_gives_ddps_mean(
    run_ranks: RunRanks, seed: int, options: CompressionOptions, error: float, residual: float
) -> None:
    """With two steps of warm-up or none: then residuals of the first step go with their parameters to other buckets."""
    found = run_ranks(2, means_and_feedback, seed, options, 2 if options.name == "int8" else 0)
    for one in found:
        assert all(x < 1e-6 for x in (*one["warm-up"], one["vectors"]))
        assert 1e-4 < max(one["each"]) < error, "compressed, but not wrong"
        assert one["ratio"] > 1.5 and one["buckets"] > 1
        assert "first.weight" in one["compressed"] and "norm.weight" not in one["compressed"]
        # The first shot's residuals are here; the second shot has its own where there is one.
        assert one["with residual"] < residual
        for mine, theirs in zip(one["hooked"], found[0]["hooked"], strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def not_finite_and_resume(seed: int) -> dict[str, Any]:
    """What a step with an Inf on the last rank leaves behind; going on from a state; accumulation; a group of two."""
    options = CompressionOptions("int4")
    last = dist.get_rank() == dist.get_world_size() - 1
    result: dict[str, Any] = {}
    with pair_group() as group:
        ddp = ddp_of(seed, group)
        state = HookState(ddp, options)
        ddp.register_comm_hook(state, hook)
        torch.manual_seed(seed + 1 + dist.get_rank())
        xs = torch.randn(6, 7, 30)
        for x in xs[:3]:
            gradients(ddp, x)
        before = state.state_dict()["kept"]
        spoilt = gradients(ddp, xs[3] * (torch.inf if last else 1.0))
        result["spoilt"] = [bool(g.isnan().all()) for g in spoilt.values()]
        after = state.state_dict()["kept"]
        result["kept"] = all(torch.equal(before[name], after[name]) for name in after)
        gradients(ddp, xs[4])
        state.discard()  # by hand, for a reason of the loop's own
        result["discarded"] = all(torch.equal(before[name], x) for name, x in state.state_dict()["kept"].items())
        saved = state.state_dict()
        expected = gradients(ddp, xs[5])

        other = ddp_of(seed, group)
        resumed = HookState(other, options)
        other.register_comm_hook(resumed, hook)
        gradients(other, xs[0])  # DDP makes its buckets anew after the first step
        gradients(other, xs[0])
        resumed.load_state_dict(saved)
        found = gradients(other, xs[5])
        result["resumed"] = all(torch.equal(found[name], expected[name]) for name in expected)
        result["steps"] = resumed.state_dict()["steps"], saved["steps"]

        # Two micro-batches: one message, of their sum.
        calls: list[int] = []
        counting, plain = ddp_of(seed, group), ddp_of(seed, group)
        counted = HookState(counting, CompressionOptions("bf16"))

        def count(state: HookState, bucket: dist.GradBucket):  # type: ignore[no-untyped-def]  # noqa: ANN202
            calls.append(bucket.index())
            return hook(state, bucket)

        count.__annotations__.clear()
        counting.register_comm_hook(counted, count)
        accumulated = []
        for model in (counting, plain):
            with model.no_sync():
                model(xs[0]).square().sum().backward()
            model(xs[1]).square().sum().backward()
            accumulated.append({name: p.grad for name, p in model.module.named_parameters()})
        result["accumulated"], result["calls"] = off(*accumulated), calls
    return result


def test_a_step_that_is_not_finite_leaves_nothing_behind(run_ranks: RunRanks, seed: int) -> None:
    """On four ranks as two groups of two: the last rank's Inf reaches its own group alone."""
    found = run_ranks(4, not_finite_and_resume, seed)
    for rank, one in enumerate(found):
        assert one["kept"] == (rank >= 2), "a step counts where all its gradients are finite, only there"
        assert all(one["spoilt"]) if rank >= 2 else not any(one["spoilt"])
        assert one["discarded"] == (rank >= 2)
        assert one["resumed"] and one["accumulated"] < 0.01
        assert one["calls"] == list(range(len(one["calls"]))), "the hook ran once for each bucket"


def half_precision(seed: int) -> tuple[float, bool]:
    """Gradients whose sum over ranks isn't in fp16: of one weight, the mean and whether it is finite."""
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(nn.Linear(300, 2, bias=False).half())
    ddp.register_comm_hook(HookState(ddp, CompressionOptions("bf16")), hook)
    x = torch.full((1, 300), 4e4, dtype=torch.float16)
    ddp(x).sum().backward()
    grad = ddp.module.weight.grad
    assert grad is not None
    return float(grad.float().mean()), bool(grad.isfinite().all())


def test_a_mean_that_fits_doesnt_overflow(run_ranks: RunRanks, seed: int) -> None:
    for mean, finite in run_ranks(2, half_precision, seed):
        assert finite and mean == pytest.approx(4e4, rel=0.01)


def failing(seed: int) -> str:
    """A phase that raises on both ranks: backward raises, or ends with NaN and the next one raises."""
    ddp = ddp_of(seed)
    state = HookState(ddp, CompressionOptions("int8"))
    ddp.register_comm_hook(state, hook)
    for _ in range(2):  # the second makes buckets anew
        gradients(ddp, torch.randn(7, 30))
    for bucket in state._buckets.values():
        bucket._pack = lambda flat: 1 / 0  # type: ignore[assignment,method-assign]
    try:
        spoilt = gradients(ddp, torch.randn(7, 30))  # raises where a bucket failed before the next one was ready
        assert all(g.isnan().all() for g in spoilt.values())
        gradients(ddp, torch.randn(7, 30))
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_a_failure_is_raised_at_the_next_backward_at_the_latest(run_ranks: RunRanks, seed: int) -> None:
    assert all("division by zero" in text for text in run_ranks(2, failing, seed))


def alone(seed: int) -> bool:
    ddp, plain = ddp_of(seed), ddp_of(seed)
    state = HookState(ddp, CompressionOptions("1bit"))
    ddp.register_comm_hook(state, hook)
    x = torch.randn(7, 30)
    mine, theirs = gradients(ddp, x), gradients(plain, x)
    return all(torch.equal(mine[name], theirs[name]) for name in theirs) and state.statistics() is None


def test_one_rank_is_left_alone(run_ranks: RunRanks, seed: int) -> None:
    assert run_ranks(1, alone, seed) == [True]


def buckets_without_matrices(seed: int) -> tuple[float, str]:
    """A model of vectors; then one whose embedding's gradient is sparse: what its backward says."""
    vectors, plain = (DistributedDataParallel(nn.LayerNorm(60)) for _ in range(2))
    vectors.register_comm_hook(HookState(vectors, CompressionOptions("int8")), hook)
    x = torch.randn(7, 60, generator=torch.Generator().manual_seed(seed + dist.get_rank()))
    error = off(gradients(vectors, x), gradients(plain, x))
    sparse = DistributedDataParallel(nn.Sequential(nn.Embedding(50, 16, sparse=True), nn.Linear(16, 4)))
    sparse.register_comm_hook(HookState(sparse, CompressionOptions("int8")), hook)
    try:
        sparse(torch.tensor([1, 2])).sum().backward()
    except TypeError as raised:
        return error, str(raised)
    return error, "nothing was raised"


def test_a_bucket_of_vectors_is_averaged_and_a_sparse_one_refused(run_ranks: RunRanks, seed: int) -> None:
    for error, said in run_ranks(2, buckets_without_matrices, seed):
        assert error < 1e-6
        assert "0.weight is sparse" in said
