"""One rank of the overlap benchmark: steps of a small V3 with experts across hosts, pairs on and off in turns.

Lives here: what `benchmarks/overlap.py` starts on each host, with its options as JSON. May import every room. Each kind
of step runs the same actions on the same data; gradients aren't reduced over the ranks, whose messages would disturb.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from model.config import DeepSeekConfig
from model.deepseek import build_stages
from model.microbatch import MicroBatch, set_denominators
from model.options import ModelOptions
from parallel import comm
from parallel.comm import barrier, gather_objects
from parallel.gradients import GradientReducer
from parallel.launch import destroy, init_distributed
from parallel.mesh import Layout, Mesh
from parallel.pipeline.make import make_schedule
from parallel.pipeline.runtime import PipelineRuntime
from parallel.pipeline.schedule import Schedule

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "models" / "tiny_v3.json"


def model_config(options: dict[str, Any]) -> DeepSeekConfig:
    """The tiny V3 in V3's proportions: a token visits six experts for one shared one (V3: eight), every layer has them,
    and attention takes a third of a layer's operations.
    """
    hidden = options["hidden"]
    return dataclasses.replace(
        DeepSeekConfig.from_file(CONFIG),
        hidden_size=hidden,
        moe_intermediate_size=options["expert_hidden"],
        n_routed_experts=16,
        num_experts_per_tok=6,
        num_attention_heads=16,
        q_lora_rank=hidden,
        kv_lora_rank=hidden // 2,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        num_hidden_layers=options["layers"],
        first_k_dense_replace=0,
        num_nextn_predict_layers=0,
    )


class Messages:
    """While entered stands in for torch's all-to-all: notes what is launched and waited for, and for how long."""

    def __init__(self) -> None:
        self.waited = 0.0
        """Seconds that this rank stood still in waits."""
        self.events: list[tuple[str, int]] = []
        """In order, each launch and each wait of a message, by the message's number."""
        self.sent: list[tuple[Any, ...]] = []
        """Of each message what is sent and how it's cut: enough to send as much again."""

    def __enter__(self) -> Messages:
        self._launch = comm.dist.all_to_all_single
        comm.dist.all_to_all_single = self._watched
        return self

    def __exit__(self, *_: object) -> None:
        comm.dist.all_to_all_single = self._launch

    def _watched(self, arriving: torch.Tensor, leaving: torch.Tensor, *splits: Any, **options: Any) -> Any:
        number, at_once = len(self.sent), not options.get("async_op")
        options["async_op"] = True
        self.sent.append((arriving.shape, leaving.shape, leaving.dtype, splits, options))
        self.events.append(("launch", number))
        work = _Wait(self, self._launch(arriving, leaving, *splits, **options), number)
        if not at_once:
            return work
        work.wait()  # how many rows each rank gets
        return None

    def replay(self) -> tuple[float, float]:
        """Seconds that the same messages take, launched and waited for in the same order, with nothing in between.

        All of them are waited for; twice, as a step's seconds and those of its waits.
        """
        buffers = [
            (torch.zeros(arriving, dtype=dtype), torch.zeros(leaving, dtype=dtype))
            for arriving, leaving, dtype, _, _ in self.sent
        ]
        under_way: dict[int, Any] = {}
        started = time.perf_counter()
        for what, number in self.events:
            if what == "launch":
                _, _, _, splits, options = self.sent[number]
                under_way[number] = comm.dist.all_to_all_single(*buffers[number], *splits, **options)
            else:
                under_way.pop(number).wait()
        seconds = time.perf_counter() - started
        return seconds, seconds


class _Wait:
    """A message under way, whose wait is timed."""

    def __init__(self, messages: Messages, work: comm.Work, number: int) -> None:
        self.messages, self.work, self.number = messages, work, number

    def wait(self) -> None:
        started = time.perf_counter()
        self.work.wait()
        self.messages.waited += time.perf_counter() - started
        self.messages.events.append(("wait", self.number))


class Steps:
    """A model of two stages on each rank, and one forward and backward pass over a step's micro-batches."""

    def __init__(self, options: dict[str, Any], mesh: Mesh):
        self.config, self.mesh = model_config(options), mesh
        count, length = options["microbatches"], options["tokens"]
        tokens = torch.randint(self.config.vocab_size, (count, 1, length + 1))
        mask, positions = torch.ones(1, length), torch.arange(length).unsqueeze(0)
        self.batches = [MicroBatch(text[:, :-1], text[:, 1:], mask, positions) for text in tokens]
        set_denominators(self.batches, 0, mesh)
        self.tables = {kind: make_schedule("dualpipe-v", 1, count, together=kind == "on") for kind in ("off", "on")}
        stages = build_stages(self.config, mesh, self.tables["off"].placement, ModelOptions(), seed=0)
        named = [entry for stage in stages.values() for entry in stage.train().parameters_in_forward_order()]
        self.reducer = GradientReducer(named, mesh)
        self.runtime = PipelineRuntime(mesh, stages, torch.float32)
        self.shape = torch.Size((length, 1, self.config.hidden_size))

    def run(self, table: Schedule) -> Messages:
        """One step; what it sent over ep and how long it waited."""
        self.reducer.zero()
        batches = [dataclasses.replace(batch, routing={}, losses={}) for batch in self.batches]
        with self.reducer.no_sync(), Messages() as messages:
            self.runtime.run(table, batches, self.shape, self.reducer)
        return messages


def main() -> None:
    options = json.loads(sys.argv[1])
    init_distributed("gloo")
    mesh = Mesh.create(Layout(ep=2))
    torch.manual_seed(mesh.rank)
    steps = Steps(options, mesh)
    recorded = [steps.run(table) for table in steps.tables.values()][0]  # and warm up

    def step(table: Schedule) -> tuple[float, float]:
        started = time.perf_counter()
        stood_still = steps.run(table).waited
        return time.perf_counter() - started, stood_still

    kinds: dict[str, Callable[[], tuple[float, float]]] = {
        kind: partial(step, table) for kind, table in steps.tables.items()
    } | {"alone": recorded.replay}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    waited: dict[str, list[float]] = {kind: [] for kind in kinds}
    order = random.Random(0)  # the same on both ranks
    for _ in range(options["rounds"]):
        for kind in order.sample(list(kinds), len(kinds)):
            barrier(mesh.world)
            found = gather_objects(kinds[kind](), mesh.world)
            seconds[kind].append(max(taken for taken, _ in found))
            waited[kind].append(sum(stood for _, stood in found) / len(found))
    if mesh.rank == 0:
        sent = sum(leaving.numel() * dtype.itemsize / 2 for _, leaving, dtype, _, _ in recorded.sent)
        joined, forwards = len(steps.tables["on"].together[0]), 2 * options["microbatches"]
        measured = {"seconds": seconds, "waited": waited, "sent": sent, "messages": len(recorded.sent)}
        print(json.dumps(measured | {"paired": joined / forwards}))
    destroy()


if __name__ == "__main__":
    main()
