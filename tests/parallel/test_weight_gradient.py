"""Linears that add their weight's gradient to `main_grad`: the same numbers as autograd's, and the reducer is told."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from kernels.grouped_matmul import grouped_matmul_reference
from parallel.gradients import GradientReducer
from parallel.mesh import Layout, Mesh
from parallel.sharding import Sharding
from parallel.weight_gradient import WeightGradientQueue, grouped_linear, linear, will_add_its_gradient


def owned(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    parameter = nn.Parameter(torch.randn(shape).to(dtype))
    parameter.sharding = Sharding()  # type: ignore[attr-defined]
    return will_add_its_gradient(parameter)


@pytest.mark.parametrize("shape", [(9, 5), (2, 9, 5)], ids=str)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=str)
def test_micro_batches_add_up_in_the_main_gradient(shape: tuple[int, ...], dtype: torch.dtype, bound: float) -> None:
    weight = owned(*shape, dtype=dtype)
    plain = weight.detach().float().flatten(0, -2).requires_grad_()
    reducer = GradientReducer([("weight", weight)], Mesh.create(Layout()))
    for _ in range(3):
        x = torch.randn(7, 2, 5).to(dtype).requires_grad_()
        grad = torch.randn(7, 2, plain.shape[0]).to(dtype)
        with reducer.no_sync():
            linear(x, weight).backward(grad)
        x_plain = x.detach().float().requires_grad_()
        (x_plain @ plain.t()).backward(grad.float())
        assert x.grad is not None and x_plain.grad is not None
        assert (x.grad.float() - x_plain.grad).norm() <= bound * x_plain.grad.norm()
    reducer.finish()
    assert plain.grad is not None
    found = weight.main_grad.flatten(0, -2)  # type: ignore[attr-defined]
    assert (found - plain.grad).norm() <= bound * plain.grad.norm()


def test_a_bucket_is_launched_when_its_layers_have_added_their_gradients() -> None:
    first, second = owned(4, 5), owned(3, 4)
    reducer = GradientReducer([("first", first), ("second", second)], Mesh.create(Layout()))
    x = torch.randn(6, 5)
    with reducer.no_sync():
        linear(linear(x, first), second).sum().backward()
    assert not any(bucket.launched for bucket in reducer.buckets)
    linear(linear(x, first), second).sum().backward()
    assert all(bucket.launched for bucket in reducer.buckets)
    with pytest.raises(RuntimeError, match="inside no_sync"):
        linear(x, first).sum().backward()


def test_without_a_reducer_gradients_are_autograds() -> None:
    weight, x = nn.Parameter(torch.randn(3, 4, dtype=torch.float64)), torch.randn(6, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(linear, (x.requires_grad_(), weight))
    stack, ends = nn.Parameter(torch.randn(3, 5, 4, dtype=torch.float64)), torch.tensor([2, 2, 6], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda x, w: grouped_linear(x, w, ends), (x, stack))


def test_grouped_weights_add_up_too_and_frozen_ones_get_nothing() -> None:
    stack, frozen = owned(3, 5, 4), owned(3, 4, 5)
    frozen.requires_grad_(False)
    reducer = GradientReducer([("stack", stack)], Mesh.create(Layout()))
    plain = stack.detach().clone().requires_grad_()
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    for _ in range(2):
        x, grad = torch.randn(6, 4), torch.randn(6, 4)
        with reducer.no_sync():
            grouped_linear(grouped_linear(x, stack, ends), frozen, ends).backward(grad)
        grouped_matmul_reference(grouped_matmul_reference(x, plain, ends), frozen, ends).backward(grad)
    reducer.finish()
    torch.testing.assert_close(stack.main_grad, plain.grad)  # type: ignore[attr-defined]
    assert frozen.grad is None


def test_gradients_wait_in_the_queue_and_launch_their_buckets_when_all_ran() -> None:
    first, second = owned(4, 5), owned(3, 4)
    bias = nn.Parameter(torch.randn(3))
    bias.sharding = Sharding()  # type: ignore[attr-defined]
    named = [("first", first), ("second", second), ("bias", bias)]
    reducer = GradientReducer(named, Mesh.create(Layout()), bucket_cap_mb=0)
    queue = WeightGradientQueue(p for _, p in named)
    plain = [p.detach().clone().requires_grad_() for _, p in named]
    reducer.expect({p: 2 for _, p in named})
    waiting = []
    for _ in range(2):
        x, grad = torch.randn(6, 5, requires_grad=True), torch.randn(6, 3)
        x_plain = x.detach().clone().requires_grad_()
        ((x_plain @ plain[0].t()) @ plain[1].t() + plain[2]).backward(grad)
        with queue.collect() as collected:
            (linear(linear(x, first), second) + bias).backward(grad)
        assert len(collected) == 2
        torch.testing.assert_close(x.grad, x_plain.grad)
        waiting.append(collected)
    assert not first.main_grad.any() and not second.main_grad.any()  # type: ignore[attr-defined]
    launched = {name: bucket.launched for (name, _), bucket in zip(reversed(named), reducer.buckets, strict=True)}
    assert launched == {"first": False, "second": False, "bias": True}, "what isn't deferred has come already"

    queue.run(waiting[1])  # in any order
    assert waiting[1] == [], "what ran has let go of what it kept"
    assert not reducer.buckets[-1].launched
    queue.run(waiting[0])
    assert all(bucket.launched for bucket in reducer.buckets)
    reducer.finish()
    for (name, parameter), expected in zip(named, plain, strict=True):
        torch.testing.assert_close(parameter.main_grad, expected.grad, msg=name)  # type: ignore[attr-defined]


def test_outside_collect_nothing_waits() -> None:
    weight = owned(3, 4)
    GradientReducer([("weight", weight)], Mesh.create(Layout()))
    WeightGradientQueue([weight])
    linear(torch.randn(5, 4), weight).sum().backward()
    assert weight.main_grad.any()  # type: ignore[attr-defined]


def test_gradients_that_wait_keep_no_graph() -> None:
    weight, stack = owned(4, 5), owned(2, 4, 5)
    reducer = GradientReducer([("weight", weight), ("stack", stack)], Mesh.create(Layout()))
    queue = WeightGradientQueue([weight, stack])
    x = torch.randn(6, 5, requires_grad=True)
    entered = weakref.ref(x)
    ends = torch.tensor([2, 6], dtype=torch.int32)
    with queue.collect() as collected:
        (linear(x.exp(), weight) + grouped_linear(x.exp(), stack, ends)).sum().backward()
    del x
    assert entered() is None and len(collected) == 2
    queue.run(collected)
    reducer.finish()
    assert weight.main_grad.abs().sum() > 0  # type: ignore[attr-defined]
