"""Whether this host has the memory, and its disk the room, for what is offloaded: asked before anything is allocated.

May import `parallel` (where parameters are counted and ranks must agree); free of torch until then. Bytes are those
that DeepSpeed 0.19.8 allocates, as a test measures them; what they are of is in `offload_bytes`.
"""

from __future__ import annotations

import math
import shutil
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from training.arguments import Arguments
from training.deepspeed_config import engine_config
from training.failures import ConfigurationError
from training.host_memory import available

if TYPE_CHECKING:
    from torch import nn

    from parallel.mesh import Mesh

GIB = 1 << 30
_FP32 = 4
_MOMENTS = {"adamw": 8, "sgd": 4}
_SUB_GROUP = 10**9
_SWAP_BUFFERS, _PARAMETER_BUFFERS, _PARAMETER_BUFFER = 4, 5, 10**8
"""DeepSpeed's own numbers where a file doesn't say: values of a sub-group, its buffers and those of parameters."""


@dataclass(frozen=True)
class Shares:
    """What one rank holds. dense, experts: parameters of its block, before ZeRO shards them, and over how many ranks it
    does; largest: parameters of the largest one."""

    dense: int
    experts: int
    largest: int
    dense_shards: int
    expert_shards: int

    def shard(self) -> int:
        """Parameters whose optimizer states are this rank's."""
        return math.ceil(self.dense / self.dense_shards) + math.ceil(self.experts / self.expert_shards)


@dataclass(frozen=True)
class Need:
    """Bytes that one rank's offloading takes of its host's memory and of its disk."""

    host: int
    disk: int


@dataclass(frozen=True)
class Free:
    """What one rank's host has: bytes of memory and of the disk at --nvme-path; None where it can't be told."""

    name: str
    memory: int | None
    disk: int | None


def offload_bytes(arguments: Arguments, shares: Shares) -> Need:
    """What one rank allocates for offloading, by (completed) flags and --deepspeed-config.

    With n = shares.shard() parameters of p bytes each (4 in fp32, else 2):

    optimizer on the host (cpu): 4n masters + 8n Adam's moments (SGD: 4n) + 4n fp32 gradients. Stages 1 and 2 also
    keep p·n for the rounded weights and p for each value of the largest parameter; stage 3 another 4n, in which
    gradients are added up, and stage 2 in fp32 too, with the whole of a parameter that is cut at the shard's border.
    optimizer on a disk (nvme, stage 3): the disk has masters, moments and gradients, 16n; the host keeps the 4n in
    which gradients are added up, and buffer_count buffers of a sub-group's fp32 values.
    parameters (stage 3): p·n on the host, or on the disk; then the host has buffer_count buffers of buffer_size values.
    """
    zero = engine_config(arguments)["zero_optimization"]
    n, p = shares.shard(), _FP32 if arguments.training.precision == "fp32" else 2
    states = n * (_FP32 + _MOMENTS[arguments.optimizer.optimizer] + _FP32)
    host = disk = 0
    optimizer, parameters = zero.get("offload_optimizer"), zero.get("offload_param")
    if optimizer is not None and optimizer["device"] == "cpu":
        host += states
        host += _FP32 * n if zero["stage"] == 3 else p * (n + shares.largest)
        if zero["stage"] == 2 and p == _FP32:  # below it, fp32 sums of the shard stay on the device
            host += _FP32 * (n + shares.largest)
    elif optimizer is not None:
        disk += states
        sub_group = min(n, zero.get("sub_group_size", _SUB_GROUP))
        host += _FP32 * n + optimizer.get("buffer_count", _SWAP_BUFFERS) * _FP32 * sub_group
    if parameters is not None and parameters["device"] == "cpu":
        host += p * n
    elif parameters is not None:
        disk += p * n
        count, size = parameters.get("buffer_count", _PARAMETER_BUFFERS), parameters.get("buffer_size", None)
        host += count * p * (_PARAMETER_BUFFER if size is None else size)
    return Need(host, disk)


def shortages(needs: list[Need], frees: list[Free], nvme_path: str | None) -> list[str]:
    """What to tell of each host on which its ranks' needs together are more than is free; a need and a host a rank."""
    told = []
    for host in dict.fromkeys(free.name for free in frees):
        here = [rank for rank, free in enumerate(frees) if free.name == host]
        memory = sum(needs[rank].host for rank in here)
        disk = sum(needs[rank].disk for rank in here)
        # The ranks of a host ask it one after the other: what counts is the least that one of them saw.
        free_memory = min((x for rank in here if (x := frees[rank].memory) is not None), default=None)
        free_disk = min((x for rank in here if (x := frees[rank].disk) is not None), default=None)
        if free_memory is not None and memory > free_memory:
            told.append(
                f"offloading needs {memory / GIB:.2f} GiB ({memory} bytes) of memory for the {len(here)} ranks on "
                f"{host} and {max(free_memory, 0) / GIB:.2f} GiB ({max(free_memory, 0)} bytes) are free: offload less, "
                "use more nodes, or --offload-optimizer nvme at stage 3"
            )
        if free_disk is not None and disk > free_disk:
            told.append(
                f"offloading needs {disk / GIB:.2f} GiB ({disk} bytes) at --nvme-path {nvme_path} for the {len(here)} "
                f"ranks on {host} and {free_disk / GIB:.2f} GiB ({free_disk} bytes) are free: name another disk, or "
                "offload less"
            )
    return told


def shares_of(parameters: Iterable[nn.Parameter], mesh: Mesh, stage: int) -> Shares:
    """What this rank holds, of its parameters before DeepSpeed cuts them up: at stage 1 experts over edp."""
    from parallel.sharding import sharding_of

    dense = experts = largest = 0
    for parameter in parameters:
        size = parameter.numel()
        largest = max(largest, size)
        if sharding_of(parameter).expert:
            experts += size
        else:
            dense += size
    expert_shards = (mesh.edp if stage == 1 else mesh.dp_cp).size
    return Shares(dense, experts, largest, mesh.dp_cp.size, expert_shards)


def check_offload_memory(arguments: Arguments, shares: Shares, mesh: Mesh) -> None:
    """Raises ConfigurationError, on every rank alike, where a host lacks what its ranks' offloading needs.

    Collective over all ranks; call it before DeepSpeed allocates anything. Returns at once where nothing is offloaded.
    """
    from parallel.comm import gather_objects  # imports torch

    zero = arguments.zero
    if not zero.zero_stage or {zero.offload_optimizer or "none", zero.offload_param or "none"} == {"none"}:
        return
    mine = (offload_bytes(arguments, shares), free_here(zero.nvme_path))
    everyone = gather_objects(mine, mesh.world)
    if told := shortages([need for need, _ in everyone], [free for _, free in everyone], zero.nvme_path):
        raise ConfigurationError(*told)


def free_here(nvme_path: str | None) -> Free:
    """Of this host, and of the disk that `nvme_path` is or will be on."""
    disk = None
    if nvme_path is not None:
        place = Path(nvme_path).absolute()
        there = next((folder for folder in (place, *place.parents) if folder.exists()), None)
        disk = None if there is None else shutil.disk_usage(there).free
    return Free(socket.gethostname(), available(), disk)
