"""Joining the job: which device this process drives, and the default process group.

Lives here: the one question "CUDA or CPU?" of the whole project, and the life of the default process group. Imports
nothing of this project.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def pick_backend(backend: str | None, gpus: int) -> str:
    """`backend`, or nccl where there is a GPU and gloo where there isn't. Raises ValueError for nccl without a GPU."""
    if backend in (None, "", "auto"):
        return "nccl" if gpus else "gloo"
    if backend not in ("nccl", "gloo"):
        raise ValueError(f"distributed backend {backend!r} is unknown: use nccl (GPUs) or gloo (CPUs)")
    if backend == "nccl" and not gpus:
        raise ValueError("distributed backend nccl needs a GPU and this host has 0: use --distributed-backend gloo")
    return str(backend)


def init_distributed(backend: str | None = None, timeout_minutes: float = 10.0) -> torch.device:
    """Join the default process group from the launcher's environment and return this process's device.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT (torchrun sets them); with none of them the process
    trains alone and no group is made. Raises ValueError when a variable is missing or the backend doesn't fit the host.
    """
    gpus = torch.cuda.device_count()
    chosen = pick_backend(backend, gpus)
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
    device = torch.device("cpu")
    if chosen == "nccl":
        if local_rank >= gpus:
            raise ValueError(
                f"this is process {local_rank + 1} of its host, which has {gpus} GPUs: start one process for each GPU "
                f"(--nproc-per-node {gpus}), or use --distributed-backend gloo"
            )
        # Kernels loaded on first use synchronise the device, which a receive posted early may hold up for ever.
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return device
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"{', '.join(missing)} not set: start with torchrun, or set all of RANK, WORLD_SIZE, MASTER_*")
    # No device_id: NCCL then makes one communicator for each pair of pipeline neighbours on first use, instead of
    # queueing all peers of a rank on one stream.
    dist.init_process_group(chosen, timeout=timedelta(minutes=timeout_minutes))
    return device


def destroy() -> None:
    """Leave every process group. Call before exit: peers may still be waiting for buffered sends."""
    if dist.is_initialized():
        dist.destroy_process_group()


def gpu_count() -> int:
    """GPUs this host offers; 0 means CPU and gloo."""
    return torch.cuda.device_count()
