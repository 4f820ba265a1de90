"""The one file that calls torch.distributed's collectives; each takes an `Axis`, and an axis of one rank is a no-op.

Lives here: plain collectives, and named autograd pairs: of sequence-parallel tensor parallelism (Korthikanti et al.,
2205.05198: g gathers forward and reduce-scatters backward, ḡ the reverse), and of rows that travel to other ranks while
something else is computed. May import `parallel.mesh` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from parallel.mesh import Axis

GradBucket = dist.GradBucket
"""What torch's DDP hands to a communication hook."""
_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# torch 2.13 renamed these and warns about the old names; 2.11 has only the old ones.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Work(Protocol):
    """What an asynchronous operation returns: `wait()` blocks until its tensor may be read (for a send: changed)."""

    def wait(self, timeout: timedelta = ...) -> Any: ...

    def is_completed(self) -> bool: ...


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


_SMALL = 1 << 18
"""Bytes up to which a rank of a gloo group fetches every tensor and reduces by itself, rather than by an all-reduce."""
_LOCAL_REDUCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda everyone: everyone.sum(0),
    "max": lambda everyone: everyone.amax(0),
    "min": lambda everyone: everyone.amin(0),
}


def _exchange_is_faster(axis: Axis) -> bool:
    """On gloo a reduce-scatter is an all-reduce inside, and even a gather is slower than an exchange of the same bytes.

    Two ranks of one host, 128 KiB: reduce-scatter 2.0 ms, gather 0.9 ms, all-to-all 0.4 ms (0.5 ms with the sum); an
    all-reduce of 16 KiB takes 3 ms.
    """
    return dist.get_backend(axis.group) == "gloo"


def _all_to_all(received: torch.Tensor, sent: torch.Tensor, axis: Axis) -> None:
    """Block i of dimension 0 goes to rank i; block i of `received` comes from it."""
    dist.all_to_all_single(received, sent, group=axis.group)


def all_reduce_(x: torch.Tensor, axis: Axis, op: str = "sum", async_op: bool = False) -> Work | None:
    """Reduce `x` over the axis in place. Any contiguous shape. Returns the work when asynchronous, None on one rank."""
    if axis.group is None:
        return None
    axis.ledger.add(axis.name, "all_reduce", 2 * _bytes(x) * (axis.size - 1) / axis.size)
    if not async_op and _bytes(x) * axis.size <= _SMALL and _exchange_is_faster(axis):
        everyone = x.new_empty((axis.size, x.numel()))
        _all_to_all(everyone, x.reshape(1, -1).repeat(axis.size, 1), axis)
        x.copy_(_LOCAL_REDUCE[op](everyone).view_as(x))
        return None
    return dist.all_reduce(x, op=_REDUCE[op], group=axis.group, async_op=async_op)


def all_gather(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Concatenate every rank's `x` along dimension 0, in axis order: [n, ...] -> [size * n, ...]."""
    if axis.group is None:
        return x
    axis.ledger.add(axis.name, "all_gather", _bytes(x) * (axis.size - 1))
    gathered = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    if _exchange_is_faster(axis):
        _all_to_all(gathered, x.repeat(axis.size, *(1 for _ in x.shape[1:])), axis)
    else:
        _gather_into(gathered, x.contiguous(), group=axis.group)
    return gathered


def reduce_scatter(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sum `x` over the axis and keep this rank's block of dimension 0: [size * n, ...] -> [n, ...]."""
    if axis.group is None:
        return x
    if x.shape[0] % axis.size:
        raise ValueError(f"reduce_scatter over {axis.name}: {x.shape[0]} rows do not divide by {axis.size} ranks")
    axis.ledger.add(axis.name, "reduce_scatter", _bytes(x) * (axis.size - 1) / axis.size)
    if _exchange_is_faster(axis):
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        _all_to_all(received, x.contiguous(), axis)
        return received.unflatten(0, (axis.size, -1)).sum(0)
    block = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    _reduce_scatter_into(block, x.contiguous(), group=axis.group)
    return block


def all_to_all(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Block i of dimension 0 goes to the axis's rank i, block i of the result comes from it: [size * n, ...], alike."""
    if axis.group is None:
        return x
    if x.shape[0] % axis.size:
        raise ValueError(f"all_to_all over {axis.name}: {x.shape[0]} rows do not divide by {axis.size} ranks")
    axis.ledger.add(axis.name, "all_to_all", _bytes(x) * (axis.size - 1) / axis.size)
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    _all_to_all(received, x.contiguous(), axis)
    return received


def start_all_to_all(received: torch.Tensor, sent: torch.Tensor, axis: Axis) -> Work:
    """Row i of `sent` goes to the axis's rank i; row i of `received` comes from it: both [size, ...]. Asynchronous.

    Neither may be touched before the work's `wait()`.
    """
    assert axis.group is not None, "nobody to send to"
    axis.ledger.add(axis.name, "all_to_all", _bytes(sent) * (axis.size - 1) / axis.size)
    return dist.all_to_all_single(received, sent, group=axis.group, async_op=True)


def start_all_gather(gathered: torch.Tensor, x: torch.Tensor, axis: Axis) -> Work:
    """Row i of `gathered`, [size, ...], becomes the `x`, [...], of the axis's rank i. Asynchronous.

    Neither may be touched before the work's `wait()`.
    """
    assert axis.group is not None, "nobody to send to"
    axis.ledger.add(axis.name, "all_gather", _bytes(x) * (axis.size - 1))
    if _exchange_is_faster(axis):
        sent = x.expand_as(gathered).contiguous()
        return dist.all_to_all_single(gathered, sent, group=axis.group, async_op=True)
    return _gather_into(gathered, x, group=axis.group, async_op=True)


def broadcast_(x: torch.Tensor, axis: Axis, source: int = 0) -> None:
    """Overwrite `x` with that of the axis's rank `source`."""
    if axis.group is None:
        return
    axis.ledger.add(axis.name, "broadcast", _bytes(x) if axis.rank == source else 0)
    dist.broadcast(x, src=axis.ranks[source], group=axis.group)


def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Every rank's picklable `value`, in axis order, on every rank."""
    if axis.group is None:
        return [value]
    values: list[Any] = [None] * axis.size
    dist.all_gather_object(values, value, group=axis.group)
    return values


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis is here."""
    if axis.group is not None:
        dist.barrier(group=axis.group)


def waits_on_host(axis: Axis) -> bool:
    """Whether `Work.wait` blocks this process (gloo) rather than the device's stream (NCCL)."""
    return axis.group is not None and dist.get_backend(axis.group) == "gloo"


def wait_for(work: Work, seconds: float) -> bool:
    """Wait at most `seconds` for a collective of gloo; False: it isn't done, and may be waited for again.

    Raises what the collective raised.
    """
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it failed, and says so again; or it ended just now
    return True


def job_store(world: Axis) -> dist.Store | None:
    """The key-value store that the job's ranks met at; None on one rank."""
    return None if world.group is None else world.group.get_group_store()


def isend(x: torch.Tensor, axis: Axis, peer: int) -> Work:
    """Send contiguous `x` to the axis's rank `peer`; never blocks. `x` must live, unchanged, until the work is done."""
    assert axis.group is not None, "nobody to send to"
    axis.ledger.add(axis.name, "send", _bytes(x))
    # Not dist.isend: its checks take 0.06 ms where caches are cold, between any two actions of a pipeline.
    return axis.group.send([x], peer, 0)


def irecv(x: torch.Tensor, axis: Axis, peer: int) -> Work:
    """Receive into `x` from the axis's rank `peer`; `x` may be read after `wait()`."""
    assert axis.group is not None, "nobody to receive from"
    return axis.group.recv([x], peer, 0)


def connect(like: torch.Tensor, axis: Axis, source: int, target: int) -> None:
    """Let two of the axis's ranks meet, by a message that isn't counted. Others return at once. like: of its dtype."""
    assert axis.group is not None, "nobody to meet"
    if axis.rank == source:
        axis.group.send([like.new_zeros(1)], target, 0).wait()
    elif axis.rank == target:
        axis.group.recv([like.new_empty(1)], source, 0).wait()


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return all_gather(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce_scatter(grads[0], ctx.axis), None


class _ScatterSequenceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return reduce_scatter(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_gather(grads[0], ctx.axis), None


def gather_sequence(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """g: all-gather along dimension 0 forward, reduce-scatter backward. [s/n, ...] -> [s, ...].

    For an input of column-parallel layers: each rank's backward knows only its columns' part of the gradient.
    """
    return x if axis.size == 1 else _GatherSequence.apply(x, axis)


def gather_sequences(parts: Sequence[torch.Tensor], axis: Axis) -> list[torch.Tensor]:
    """`gather_sequence` of several tensors in one message; they differ in their last dimension only."""
    if axis.size == 1:
        return list(parts)
    gathered = gather_sequence(torch.cat(list(parts), dim=-1), axis)
    return list(gathered.split([part.shape[-1] for part in parts], dim=-1))


def scatter_sequence_sum(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """ḡ: reduce-scatter along dimension 0 forward, all-gather backward. [s, ...] -> [s/n, ...].

    For the output of row-parallel layers: each rank holds a partial sum of the whole sequence.
    """
    return x if axis.size == 1 else _ScatterSequenceSum.apply(x, axis)


@dataclass
class Exchange:
    """Rows on their way between the ranks of an axis: one way in forward, back in backward.

    sent, received: how many rows go to and come from each of the axis's ranks. Ranks must agree: what one sends another
    one receives.
    """

    axis: Axis
    sent: list[int]
    received: list[int]
    _under_way: list[tuple[Work, torch.Tensor, torch.Tensor]] = field(default_factory=list, repr=False)

    def launch(self, rows: Sequence[torch.Tensor], back: bool) -> None:
        """Send the rows of each tensor. back: from where rows were received to where they came from."""
        sent, received = (self.received, self.sent) if back else (self.sent, self.received)
        for leaving in map(torch.Tensor.contiguous, rows):
            away = (leaving.shape[0] - sent[self.axis.rank]) * leaving[0:1].nbytes
            self.axis.ledger.add(self.axis.name, "all_to_all", away)
            arriving = leaving.new_empty((sum(received), *leaving.shape[1:]))
            with self._naming():
                work = dist.all_to_all_single(arriving, leaving, received, sent, group=self.axis.group, async_op=True)
            self._under_way.append((work, arriving, leaving))

    def wait(self) -> tuple[torch.Tensor, ...]:
        """What has arrived, by source rank. Blocks until it has (NCCL: the device's stream does).

        Whatever else this rank may compute meanwhile runs first.
        """
        self.axis.baton.pass_on()
        for work, _, _ in self._under_way:
            with self._naming():
                work.wait()
        arrived = tuple(arriving for _, arriving, _ in self._under_way)
        self._under_way.clear()
        return arrived

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Inside, a lost peer's error says which ranks' rows it has stopped."""
        try:
            yield
        except RuntimeError as error:
            ranks = ", ".join(map(str, self.axis.ranks))
            raise RuntimeError(f"rows between ranks {ranks} ({self.axis.name}): {error}") from error


class _StartExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        exchange.launch(rows, back=False)
        # Stand for what is under way, and take no memory.
        return tuple(x.new_zeros(()).expand(sum(exchange.received), *x.shape[1:]) for x in rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.exchange.wait()


class _FinishExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        return exchange.wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.exchange.launch(grads, back=True)
        return None, *grads  # stand for what is under way: autograd wants the shape of what was received


def start_exchange(exchange: Exchange, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Launch the rows of each tensor [r, ...], which lie by the rank they go to; returns what only `finish_exchange`
    may take.

    What is computed between the two hides the transfer, and its backward hides the gradients' way back: autograd runs
    it between their backward passes, of which that of `finish_exchange` launches and that of this one waits.
    """
    return rows if exchange.axis.group is None else _StartExchange.apply(exchange, *rows)


def finish_exchange(exchange: Exchange, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Wait for what was started: the rows that came, by the rank they came from."""
    return rows if exchange.axis.group is None else _FinishExchange.apply(exchange, *rows)
