"""Rows travel to their ranks and back by uneven all-to-alls, and what is computed meanwhile is between the two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallel.comm import Exchange, finish_exchange, start_exchange
from parallel.expert import plan_traffic
from parallel.mesh import Layout, Mesh

RunRanks = Callable[..., list[Any]]

EXPERTS = 4
ROWS = {  # of each rank, for each expert; some experts get none
    "uneven": [[3, 0, 2, 1], [1, 0, 4, 0]],
    "a rank sends nothing": [[0, 0, 0, 0], [1, 2, 3, 1]],
    "a rank gets nothing": [[2, 3, 0, 0], [1, 4, 0, 0]],
    "nothing": [[0, 0, 0, 0], [0, 0, 0, 0]],
    "four ranks": [[1, 0, 2, 3], [0, 0, 0, 0], [5, 1, 0, 0], [0, 7, 0, 2]],
}


class _Says(torch.autograd.Function):
    """Writes down when it runs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, log: list[str]) -> torch.Tensor:
        ctx.log = log
        log.append("shared")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.log.append("shared's gradient")
        return grads[0], None


def there_and_back(rows: list[list[int]], seed: int) -> dict[str, Any]:
    """Each row is scaled by a factor of its expert on the expert's rank; what one process computes for comparison."""
    mesh = Mesh.create(Layout(ep=len(rows)))
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(sum(counts), 3, generator=generator, dtype=torch.float64) for counts in rows]
    weights = [torch.randn(sum(counts), generator=generator, dtype=torch.float64) for counts in rows]
    factors = torch.randn(EXPERTS, generator=generator, dtype=torch.float64)
    here = mesh.ep.rank
    mine = torch.tensor(rows[here])
    traffic = plan_traffic(mine, mesh.ep)
    runs = traffic.ends_u.diff(prepend=torch.zeros(1, dtype=torch.int32))
    local = EXPERTS // mesh.ep.size
    expert_r = here * local + torch.repeat_interleave(torch.arange(len(runs)) % local, runs)

    log: list[str] = []
    launch, wait = Exchange.launch, Exchange.wait

    def launching(self: Exchange, rows: Any, back: bool) -> None:
        log.append("launch")
        launch(self, rows, back)

    def waiting(self: Exchange) -> tuple[torch.Tensor, ...]:
        log.append("wait")
        return wait(self)

    x, w = values[here].clone().requires_grad_(), weights[here].clone().requires_grad_()
    shared = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "launch", launching)
        patch.setattr(Exchange, "wait", waiting)
        there, back = traffic.there(), traffic.back()
        under_way = start_exchange(there, x, w)
        beside = _Says.apply(shared, log)
        x_r, w_r = finish_exchange(there, *under_way)
        under_way = start_exchange(back, x_r * (w_r * factors[expert_r]).unsqueeze(-1))
        beside = _Says.apply(beside, log)
        (y,) = finish_exchange(back, *under_way)
        (y.square().sum() + beside.sum()).backward()

    factor_r = factors[torch.repeat_interleave(torch.arange(EXPERTS), mine)]
    x_ref, w_ref = values[here].requires_grad_(), weights[here].requires_grad_()
    y_ref = x_ref * (w_ref * factor_r).unsqueeze(-1)
    y_ref.square().sum().backward()
    assert x.grad is not None and w.grad is not None and x_ref.grad is not None and w_ref.grad is not None
    pairs = ((y, y_ref), (x.grad, x_ref.grad), (w.grad, w_ref.grad))
    return {
        "equal": all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-12) for a, b in pairs),
        "log": log,
        "sent": mesh.ledger.entries["ep", "all_to_all"].bytes,
        "traffic": (traffic.sent, traffic.received),
    }


@pytest.mark.parametrize("case", ROWS)
def test_rows_come_back_with_their_gradients(run_ranks: RunRanks, seed: int, case: str) -> None:
    rows = ROWS[case]
    ranks, local = len(rows), EXPERTS // len(rows)
    per_rank = [[sum(counts[d * local : (d + 1) * local]) for d in range(ranks)] for counts in rows]
    for rank, found in enumerate(run_ranks(ranks, there_and_back, rows, seed)):
        assert found["equal"]
        assert found["traffic"] == (per_rank[rank], [counts[rank] for counts in per_rank])
        # What is beside an exchange in forward is beside its gradient's in backward.
        once = ["launch", "shared", "wait"]
        assert found["log"] == [*once, *once, *("launch", "shared's gradient", "wait") * 2]
        away = sum(per_rank[rank]) - per_rank[rank][rank]
        arrived = sum(counts[rank] for counts in per_rank) - per_rank[rank][rank]
        # fp64: three values and a weight there, their gradients back; three values back, their gradients there
        assert (
            found["sent"]
            == 8 * ((3 + 1) * (away + arrived) + 3 * (arrived + away)) + 8 * EXPERTS * (ranks - 1) // ranks
        )


def test_alone_nothing_is_sent() -> None:
    mesh = Mesh.create(Layout())
    traffic = plan_traffic(torch.tensor([2, 0, 3]), mesh.ep)
    x = torch.randn(5, 2)
    exchange = traffic.there()
    (rows,) = finish_exchange(exchange, *start_exchange(exchange, x))
    assert rows is x and traffic.ends_u.tolist() == [2, 2, 5] and not mesh.ledger.entries
