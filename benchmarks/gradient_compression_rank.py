"""One rank of the compression benchmark: ready gradients are reduced by every codec and by torch's DDP, in turns.

Lives here: what `benchmarks/gradient_compression.py` starts on each host, with its options as JSON. May import every
room. A step is the reduction alone: nothing is computed meanwhile, so nothing is hidden.
"""

from __future__ import annotations

import json
import random
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from parallel.comm import all_reduce_, barrier, gather_objects
from parallel.compression.options import CompressionOptions
from parallel.gradients import GradientReducer
from parallel.launch import destroy, init_distributed
from parallel.mesh import Layout, Mesh
from parallel.sharding import Sharding

COUNTERS = Path("/sys/class/net/eth0/statistics")
PARTS = ("encode_seconds", "wire_seconds", "decode_seconds")


class _ReadyGradients(torch.autograd.Function):
    """Stands for a model whose backward takes no time: gives each parameter its gradient, from last to first."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.gradients


class _Model(nn.Module):
    def __init__(self, gradients: list[torch.Tensor]):
        super().__init__()
        self.gradients = gradients
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros_like(g)) for g in gradients)

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = _ReadyGradients.apply(self.gradients, *self.weights)
        return loss


class Steps:
    """All kinds of step, by name; each has parameters of its own. A step ends when the sum is on this rank."""

    def __init__(self, options: dict[str, Any], mesh: Mesh):
        self.mesh, self.bucket_mb = mesh, options["bucket_mb"]
        side = options["side"]
        # Heavy-tailed as gradients are: a fifth of the values of a tensor have most of its square.
        self.gradients = [torch.randn(side, side).mul_(torch.randn(side, side)) for _ in range(options["tensors"])]
        self.one_bucket_mb = sum(g.nbytes for g in self.gradients) / 2**20
        self.run: dict[str, Callable[[], None]] = {"fp32 all-reduce": self._plain()}
        self.reducers: dict[str, GradientReducer] = {}
        for name, compression in options["ours"].items():
            chosen = None if compression is None else CompressionOptions(**compression)
            self.run[name] = self._ours(name, chosen)
        if options["ddp"]:
            rank = options["ddp_rank"]
            self.run["DDP"] = self._theirs(self.bucket_mb)
            # DDP refuses its own hook on gloo, by its name; gloo sums bf16 all the same.
            self.run["DDP, bf16 hook"] = self._theirs(
                self.bucket_mb, lambda _, bucket: bf16_compress_hook(None, bucket)
            )
            # It sends plain gradients in its first two steps, which are of the warm-up. In one bucket, since it waits
            # for its second message on one of gloo's two threads: with three buckets nobody is left to send.
            state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
            self.run[f"DDP, PowerSGD hook rank {rank}"] = self._theirs(self.one_bucket_mb, powerSGD_hook, state)

    def _plain(self) -> Callable[[], None]:
        buffers = [g.clone() for g in self.gradients]

        def step() -> None:
            works = [all_reduce_(buffer, self.mesh.dp_cp, async_op=True) for buffer in buffers]
            for work in works:
                assert work is not None
                work.wait()

        self._before = {"fp32 all-reduce": lambda: _copy(buffers, self.gradients)}
        return step

    def _ours(self, name: str, compression: CompressionOptions | None) -> Callable[[], None]:
        parameters = [nn.Parameter(torch.empty_like(g)) for g in self.gradients]
        for parameter in parameters:
            parameter.sharding = Sharding()  # type: ignore[attr-defined]
        named = [(f"{i}.weight", parameter) for i, parameter in enumerate(parameters)]
        # gloo itself sends 1.8 KB in an all-reduce, 4 % of PowerSGD's factors of a bucket of 4 MiB: they go in one.
        thin = compression is not None and compression.name == "powersgd"
        bucket_mb = self.one_bucket_mb if thin else self.bucket_mb
        reducer = GradientReducer(named, self.mesh, bucket_mb, compression=compression)
        gradients = [parameter.main_grad for parameter in parameters]  # type: ignore[attr-defined]
        self._before[name] = lambda: _copy(gradients, self.gradients)
        self.reducers[name] = reducer

        def step() -> None:
            reducer.finish()
            reducer.commit()

        return step

    def _theirs(
        self, bucket_mb: float, hook: Callable[..., Any] | None = None, state: Any = None
    ) -> Callable[[], None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # unused parameters aren't looked for; some torch warns of it
            ddp = DistributedDataParallel(_Model(self.gradients), bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
        if hook is not None:
            ddp.register_comm_hook(state, hook)

        def step() -> None:
            ddp.zero_grad(set_to_none=False)
            ddp().backward()

        return step

    def prepare(self, name: str) -> None:
        """This rank's gradients where the step finds them; not part of its time."""
        if name in self._before:
            self._before[name]()

    def parts(self, name: str) -> dict[str, float] | None:
        """Seconds of the last step, by part, where it compressed."""
        reducer = self.reducers.get(name)
        statistics = None if reducer is None else reducer.compression_statistics()
        return None if statistics is None else {part: getattr(statistics, part) for part in PARTS}


def _copy(to: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    for x, gradient in zip(to, gradients, strict=True):
        x.copy_(gradient)


def _sent() -> tuple[int, int]:
    """Bytes and packets that this host has put on its link."""
    return int((COUNTERS / "tx_bytes").read_text()), int((COUNTERS / "tx_packets").read_text())


def main() -> None:
    options = json.loads(sys.argv[1])
    init_distributed("gloo")
    mesh = Mesh.create(Layout())
    torch.manual_seed(mesh.rank)
    steps = Steps(options, mesh)
    kinds = list(steps.run)
    for kind in kinds:
        for _ in range(options["warm_up"]):
            steps.prepare(kind)
            steps.run[kind]()
    measured: dict[str, dict[str, list[Any]]] = {
        kind: {"seconds": [], "sent": [], "packets": [], "ledger": [], "parts": []} for kind in kinds
    }
    order = random.Random(0)  # the same on all ranks
    for _ in range(options["rounds"]):
        for kind in order.sample(kinds, len(kinds)):
            steps.prepare(kind)
            mesh.ledger.reset()
            barrier(mesh.world)
            before, started = _sent(), time.perf_counter()
            steps.run[kind]()
            taken = time.perf_counter() - started
            barrier(mesh.world)  # what still queues at the link is counted with this step
            sent = [after - first for after, first in zip(_sent(), before, strict=True)]
            counted, found = mesh.ledger.bytes(), gather_objects((taken, *sent, steps.parts(kind)), mesh.world)
            everyone = list(zip(*found, strict=True))
            measured[kind]["seconds"].append(max(everyone[0]))
            measured[kind]["sent"].append(sum(everyone[1]) / mesh.world_size)
            measured[kind]["packets"].append(sum(everyone[2]) / mesh.world_size)
            measured[kind]["ledger"].append(counted)
            if everyone[3][0] is not None:
                mean = {part: sum(rank[part] for rank in everyone[3]) / mesh.world_size for part in PARTS}
                measured[kind]["parts"].append(mean)
    if mesh.rank == 0:
        print(json.dumps(measured))
    destroy()


if __name__ == "__main__":
    main()
