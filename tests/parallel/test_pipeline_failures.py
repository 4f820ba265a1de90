"""A rank that dies in the middle of a schedule ends every other one, with the name of the action it waited in."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.pipeline.catalogue import placement_of

ROOT = Path(__file__).parents[2]
RANKS, MICROBATCHES = 4, 8

RANK = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn

from parallel.gradients import GradientReducer
from parallel.mesh import Layout, Mesh
from parallel.pipeline.make import make_schedule
from parallel.pipeline.runtime import PipelineRuntime
from parallel.sharding import Sharding
from parallel.weight_gradient import linear, will_add_its_gradient

schedule, dying, fatal = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = Mesh.create(Layout(pp=dist.get_world_size()))
table = make_schedule(schedule, mesh.pp.size, int(sys.argv[4]))


class Stage(nn.Module):
    def __init__(self, last):
        super().__init__()
        self.weight = will_add_its_gradient(nn.Parameter(torch.randn(4, 4)))
        self.weight.sharding = Sharding()
        self.last, self.calls = last, 0

    def forward(self, x, microbatch):
        self.calls += 1
        if mesh.rank == dying and self.calls == fatal:
            os._exit(9)
        y = linear(microbatch if x is None else x, self.weight)
        return y.square().sum() if self.last else y


stages = {s: Stage(s == table.stages - 1) for s in table.stages_of(mesh.pp.rank)}
reducer = GradientReducer([(f"{s}.weight", stage.weight) for s, stage in stages.items()], mesh)
runtime = PipelineRuntime(mesh, stages, torch.float32)
runtime.run(table, [torch.randn(2, 4) for _ in range(table.microbatches)], torch.Size((2, 4)), reducer)
"""


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_every_rank_names_the_action_in_which_it_waited(schedule: str, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    dying, ranks = 2, []
    placement = placement_of(schedule, RANKS)
    for rank in range(RANKS):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, str(script), schedule, str(dying), "4", str(MICROBATCHES)]
        ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        errors = [process.communicate(timeout=120)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert ranks[dying].returncode == 9
    for rank, (process, error) in enumerate(zip(ranks, errors, strict=True)):
        if rank == dying:
            continue
        assert process.returncode == 1, error
        last = error.strip().splitlines()[-1]
        waited = re.search(
            rf"pipeline rank {rank} \({schedule}\) waited for ([FBI])(\d+)\.\d+ to "
            r"(?:get \w+ of [FBI](\d+)\.\d+ from|be received by) pipeline rank (\d) \(rank (\d)\)",
            last,
        )
        assert waited, error
        kind, stage, source, peer, global_rank = waited.groups()
        assert peer == global_rank and int(peer) != rank
        # The one that is accused holds the stage that the message comes from, or goes to.
        step = 1 if kind == "F" else -1
        other = int(stage) + step if source is None else int(source)
        assert placement[other] == int(peer), last
        assert placement[int(stage)] == rank
    neighbours = [errors[rank].strip().splitlines()[-1] for rank in (dying - 1, dying + 1)]
    assert any(f"pipeline rank {dying} (rank {dying})" in last for last in neighbours), neighbours
