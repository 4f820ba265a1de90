"""One rank of the bucket benchmark: the same step with every reducer and bucket size, in turns.

Lives here: what `benchmarks/buckets.py` starts on each host, with its options as JSON. May import every room. Every
kind of step has a model of its own, since hooks of two reducers on one parameter would both run.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from model.config import DeepSeekConfig
from model.deepseek import DeepSeekStage, build_stages
from model.microbatch import MicroBatch, set_denominators
from model.options import ModelOptions
from parallel.comm import barrier, gather_objects
from parallel.gradients import GradientReducer
from parallel.launch import destroy, init_distributed
from parallel.mesh import Layout, Mesh

SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
CONFIG = Path(__file__).resolve().parent.parent / "configs" / "models" / "tiny_v3.json"


def model_config(options: dict[str, Any]) -> DeepSeekConfig:
    """The tiny V3, as wide as asked for, with enough parameters for its tokens to make communication matter."""
    hidden = options["hidden"]
    return dataclasses.replace(
        DeepSeekConfig.from_file(CONFIG),
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        moe_intermediate_size=hidden // 2,
        num_hidden_layers=options["layers"],
        num_nextn_predict_layers=options["mtp"],
    )


class Steps:
    """All kinds of step, by name: one forward and backward pass of a micro-batch and its reduction.

    A step returns how long it was blocked after backward; 0 for DDP, which waits inside it.
    """

    def __init__(self, options: dict[str, Any], mesh: Mesh):
        self.config, self.mesh = model_config(options), mesh
        tokens = torch.randint(self.config.vocab_size, (1, options["tokens"] + 1))
        mask, positions = torch.ones(1, options["tokens"]), torch.arange(options["tokens"]).unsqueeze(0)
        self.batch = MicroBatch(tokens[:, :-1], tokens[:, 1:], mask, positions)
        set_denominators([self.batch], self.config.num_mtp_layers, mesh)
        self.run: dict[str, Callable[[], float]] = {}
        self.ddp: dict[str, DistributedDataParallel] = {}
        for cap in options["bucket_mb"]:
            stage = self._stage()
            self.gradient_bytes = 4 * sum(p.numel() for p in stage.parameters())
            reducer = GradientReducer(stage.parameters_in_forward_order(), mesh, cap)
            for overlap in (True, False):
                name = f"ours, {cap:g}" if overlap else f"ours without overlap, {cap:g}"
                self.run[name] = self._ours(stage, reducer, overlap)
        self.run["ours, no_sync"] = self._ours(stage, reducer, None)
        for cap in options["bucket_mb"] if options["ddp"] else ():
            # Its buffers, biases of the routers, don't change here, and its gradients are the buckets, as ours are.
            with warnings.catch_warnings():  # torch 2.13 renamed broadcast_buffers; 2.11 has only the old name
                warnings.simplefilter("ignore", FutureWarning)
                ddp = DistributedDataParallel(
                    self._stage(), bucket_cap_mb=cap, broadcast_buffers=False, gradient_as_bucket_view=True
                )
            self.run[f"ddp, {cap:g}"] = self._theirs(ddp, True)
            self.ddp[f"ddp, {cap:g}"] = ddp
        if options["ddp"]:
            self.run["ddp, no_sync"] = self._theirs(ddp, False)

    def _stage(self) -> DeepSeekStage:
        return build_stages(self.config, self.mesh, (0,), ModelOptions(), seed=0)[0].train()

    def _batch(self) -> MicroBatch:
        return dataclasses.replace(self.batch, routing={}, losses={})

    def _ours(self, stage: DeepSeekStage, reducer: GradientReducer, overlap: bool | None) -> Callable[[], float]:
        def step() -> float:
            reducer.overlap = bool(overlap)
            reducer.zero()
            with reducer.no_sync() if overlap is None else nullcontext():
                stage(None, self._batch()).backward()
            if overlap is None:
                return 0.0
            reducer.finish()
            return reducer.exposed_seconds

        return step

    def _theirs(self, ddp: DistributedDataParallel, sync: bool) -> Callable[[], float]:
        def step() -> float:
            ddp.zero_grad(set_to_none=False)
            with nullcontext() if sync else ddp.no_sync():
                ddp(None, self._batch()).backward()
            return 0.0

        return step

    def messages(self, name: str) -> int:
        """Of one step of this kind, which it takes; for DDP, the number of buckets it then has."""
        self.mesh.ledger.reset()
        self.run[name]()
        if name.startswith("ddp"):
            return 0 if name == "ddp, no_sync" else len(self.ddp[name].reducer._get_zeros_like_grad_buckets())
        return self.mesh.ledger.calls()


def main() -> None:
    options = json.loads(sys.argv[1])
    init_distributed("gloo")
    mesh = Mesh.create(Layout())
    torch.manual_seed(mesh.rank)
    steps = Steps(options, mesh)
    kinds = list(steps.run)
    for kind in steps.ddp:  # it makes its buckets anew in its second step
        steps.run[kind]()
    messages = {kind: steps.messages(kind) for kind in kinds}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    blocked: dict[str, list[float]] = {kind: [] for kind in kinds}
    sent: dict[str, list[int]] = {kind: [] for kind in kinds}
    order = random.Random(0)  # the same on both ranks
    for _ in range(options["rounds"]):
        for kind in order.sample(kinds, len(kinds)):
            barrier(mesh.world)
            before, started = int(SENT.read_text()), time.perf_counter()
            waited = steps.run[kind]()
            taken = time.perf_counter() - started
            sent[kind].append(int(SENT.read_text()) - before)
            found = gather_objects((taken, waited), mesh.world)
            seconds[kind].append(max(taken for taken, _ in found))
            blocked[kind].append(min(waited for _, waited in found))  # of the rank that came last
    if mesh.rank == 0:
        measured = {"seconds": seconds, "blocked": blocked, "sent": sent, "messages": messages}
        print(json.dumps(measured | {"gradient_bytes": steps.gradient_bytes}))
    destroy()


if __name__ == "__main__":
    main()
