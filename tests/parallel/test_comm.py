"""Collectives over an axis: autograd pairs against dense gradients, and a ledger that counts what was sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallel import comm
from parallel.mesh import Axis, Layout, Mesh

RunRanks = Callable[..., list[Any]]


def sequence_pairs(seed: int) -> dict[str, float]:
    """The largest difference to the dense computation, by what was compared. Each rank weighs its result otherwise."""
    tp = Mesh.create(Layout(tp=torch.distributed.get_world_size())).tp
    torch.manual_seed(seed)
    length = 3 * tp.size
    block = slice(3 * tp.rank, 3 * tp.rank + 3)

    x = torch.randn(length, 2, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(tp.size, length, 2, 5, dtype=torch.float64)
    dense = x.tanh()
    (weights * dense).sum().backward()
    assert x.grad is not None
    mine = x.detach()[block].clone().requires_grad_()
    # Transposed on the way in and in its gradient: neither may be assumed contiguous.
    gathered = comm.gather_sequence(mine.transpose(1, 2).tanh(), tp)
    (weights[tp.rank].transpose(1, 2) * gathered).sum().backward()
    assert mine.grad is not None

    partials = torch.randn(tp.size, length, 2, 5, dtype=torch.float64, requires_grad=True)
    summed = partials.sin().sum(0)
    (weights[0] * summed.square()).sum().backward()
    assert partials.grad is not None
    part = partials.detach()[tp.rank].clone().requires_grad_()
    scattered = comm.scatter_sequence_sum(part.transpose(1, 2).sin(), tp)
    (weights[0][block].transpose(1, 2) * scattered.square()).sum().backward()
    assert part.grad is not None

    def off(found: torch.Tensor, expected: torch.Tensor) -> float:
        return float((found - expected).detach().abs().max())

    return {
        "gather": off(gathered, dense.transpose(1, 2)),
        "gather's gradient": off(mine.grad, x.grad[block]),
        "scatter": off(scattered, summed[block].transpose(1, 2)),
        "scatter's gradient": off(part.grad, partials.grad[tp.rank]),
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_sequence_pairs_have_the_dense_values_and_gradients(run_ranks: RunRanks, seed: int, ranks: int) -> None:
    for rank, differences in enumerate(run_ranks(ranks, sequence_pairs, seed)):
        for name, difference in differences.items():
            assert difference < 1e-12, f"{name} on rank {rank}"


def every_operation(seed: int) -> tuple[dict[str, bool], dict[tuple[str, str], tuple[int, int]], dict[str, Any]]:
    size = torch.distributed.get_world_size()
    mesh = Mesh.create(Layout(tp=size))
    tp, rank = mesh.tp, mesh.tp.rank
    torch.manual_seed(seed)
    whole = torch.randn(size, 2 * size, 7)  # [rank, rows, columns]: every rank knows everyone's
    right = {}

    for op, expected in (("sum", whole.sum(0)), ("max", whole.amax(0)), ("min", whole.amin(0))):
        x = whole[rank].clone()
        assert comm.all_reduce_(x, tp, op) is None
        right[f"all_reduce {op}"] = torch.allclose(x, expected, atol=1e-5)
    x = whole[rank].clone()
    work = comm.all_reduce_(x, tp, async_op=True)
    assert work is not None
    work.wait()
    right["asynchronous"] = torch.allclose(x, whole.sum(0), atol=1e-5)

    right["all_gather"] = torch.equal(comm.all_gather(whole[rank].t(), tp), whole.transpose(1, 2).flatten(0, 1))
    block = comm.reduce_scatter(whole[rank], tp)
    right["reduce_scatter"] = torch.allclose(block, whole.sum(0)[2 * rank : 2 * rank + 2], atol=1e-5)
    x = whole[rank].bfloat16()
    comm.broadcast_(x, tp, source=1)
    right["broadcast"] = torch.equal(x, whole[1].bfloat16())

    # A ring: everyone sends before anyone receives.
    x = torch.empty(3, 5)
    send = comm.isend(whole[rank, 0, :1].expand(3, 5).contiguous(), tp, (rank + 1) % size)
    comm.irecv(x, tp, (rank - 1) % size).wait()
    send.wait()
    right["ring"] = torch.equal(x, whole[(rank - 1) % size, 0, :1].expand(3, 5))

    sent = {key: (entry.calls, entry.bytes) for key, entry in mesh.ledger.entries.items()}
    objects = comm.gather_objects({"rank": rank, "odd": "é" * rank}, tp)
    right["gather_objects"] = objects == [{"rank": r, "odd": "é" * r} for r in range(size)]
    comm.barrier(tp)
    try:
        comm.reduce_scatter(torch.ones(size + 1, 3), tp)
        error = ""
    except ValueError as refused:
        error = str(refused)
    totals = {"tp calls": mesh.ledger.calls("tp"), "calls": mesh.ledger.calls(), "pp bytes": mesh.ledger.bytes("pp")}
    mesh.ledger.reset()
    return right, sent, {**totals, "after reset": mesh.ledger.bytes(), "error": error}


@pytest.mark.parametrize("ranks", [2, 4])
def test_operations_are_right_and_counted(run_ranks: RunRanks, seed: int, ranks: int) -> None:
    """Bytes are what this rank sends under the best algorithm: (n - 1) / n of the message, twice for an all-reduce."""
    message = 2 * ranks * 7 * 4
    for rank, (right, sent, rest) in enumerate(run_ranks(ranks, every_operation, seed)):
        assert [name for name, good in right.items() if not good] == [], f"rank {rank}"
        assert sent == {
            ("tp", "all_reduce"): (4, 4 * round(2 * message * (ranks - 1) / ranks)),
            ("tp", "all_gather"): (1, message * (ranks - 1)),
            ("tp", "reduce_scatter"): (1, round(message * (ranks - 1) / ranks)),
            ("tp", "broadcast"): (1, message // 2 if rank == 1 else 0),
            ("tp", "send"): (1, 3 * 5 * 4),
        }, f"rank {rank}"
        assert rest["tp calls"] == rest["calls"] == 8 and rest["pp bytes"] == 0 and rest["after reset"] == 0
        assert f"{ranks + 1} rows do not divide by {ranks} ranks" in rest["error"]


def test_an_axis_of_one_rank_communicates_nothing() -> None:
    """Without any process group: a call that reached torch.distributed would raise."""
    axis = Axis("tp", (0,), 0)
    x = torch.randn(3, 5, requires_grad=True)
    before = x.detach().clone()
    assert comm.all_reduce_(x.detach(), axis, async_op=True) is None
    comm.broadcast_(x.detach(), axis)
    comm.barrier(axis)
    assert comm.gather_objects("here", axis) == ["here"]
    for operation in (comm.all_gather, comm.reduce_scatter, comm.gather_sequence, comm.scatter_sequence_sum):
        assert operation(x, axis) is x
    assert torch.equal(x, before)
    assert axis.ledger.calls() == 0
