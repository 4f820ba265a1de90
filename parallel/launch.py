"""Joining the job: which device this process drives, who else is there, and the default process group.

Lives here: the one question "CUDA or CPU?" of the whole project, and the life of the default process group. Imports
nothing of this project.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Place:
    """Where this process stands in the job, by the launcher's variables."""

    rank: int
    world_size: int
    address: str
    port: int
    store_is_here: bool
    """Whether this process serves the store that ranks meet at. torchrun's agent has one already."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Place | None:
        """None for a process that trains alone. Raises ValueError naming a variable that is missing or no number."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if "RANK" not in environ and "WORLD_SIZE" not in environ:
            return None
        missing = [name for name in names if not environ.get(name)]
        if missing:
            raise ValueError(
                f"{', '.join(missing)} not set: start with torchrun, or set all of RANK, WORLD_SIZE, MASTER_*"
            )
        numbers = {}
        for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
            if not environ[name].isdecimal():
                raise ValueError(f"{name} is {environ[name]!r}: it must be a whole number")
            numbers[name] = int(environ[name])
        rank, world_size, port = numbers.values()
        if rank >= world_size:
            raise ValueError(f"RANK is {rank} with WORLD_SIZE {world_size}: it must be below")
        if not 0 < port < 65536:
            raise ValueError(f"MASTER_PORT is {port}: it must be from 1 to 65535")
        by_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(rank, world_size, environ["MASTER_ADDR"], port, rank == 0 and not by_agent)


def pick_backend(backend: str | None, gpus: int) -> str:
    """`backend`, or nccl where there is a GPU and gloo where there isn't. Raises ValueError for nccl without a GPU."""
    if backend in (None, "", "auto"):
        return "nccl" if gpus else "gloo"
    if backend not in ("nccl", "gloo"):
        raise ValueError(f"distributed backend {backend!r} is unknown: use nccl (GPUs) or gloo (CPUs)")
    if backend == "nccl" and not gpus:
        raise ValueError("distributed backend nccl needs a GPU and this host has 0: use --distributed-backend gloo")
    return str(backend)


def init_distributed(
    backend: str | None = None, timeout_minutes: float = 10.0, start_timeout_seconds: float = 300.0
) -> torch.device:
    """Join the default process group from the launcher's environment and return this process's device.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT (torchrun sets them); with none of them the process
    trains alone and no group is made. Collective. Raises ValueError when a variable is missing, the backend doesn't fit
    the host, or not all ranks have come within the start time-out: then it names the address, the port and the ranks.
    """
    gpus = torch.cuda.device_count()
    chosen = pick_backend(backend, gpus)
    place = Place.from_environment(os.environ)
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
    if place is None:
        return device
    store = check_in(place, start_timeout_seconds)
    # No device_id: NCCL then makes one communicator for each pair of pipeline neighbours on first use, instead of
    # queueing all peers of a rank on one stream.
    timeout = timedelta(minutes=timeout_minutes)
    store.set_timeout(timeout)
    dist.init_process_group(chosen, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
    return device


# Keys in the store. Torch's own begin with other words.
_COUNT, _VERDICT, _RANK = "check_in/count", "check_in/verdict", "check_in/rank/"
_ALL_HERE = "all here"


def check_in(place: Place, timeout_seconds: float) -> dist.Store:
    """Meet all ranks at the store, and return it. Raises ValueError, on every rank that has come, naming who hasn't.

    The last to come says so to all, in one key that the others wait for: one request a rank, however many there are.
    """
    began = time.monotonic()
    store = open_store(place, timeout_seconds)
    try:
        store.set(f"{_RANK}{place.rank}", socket.gethostname())
        if store.add(_COUNT, 1) == place.world_size:
            store.set(_VERDICT, _ALL_HERE)
        try:
            store.wait([_VERDICT], timedelta(seconds=max(0.1, timeout_seconds - (time.monotonic() - began))))
        except dist.DistStoreError:  # time's up; a lost connection is a DistNetworkError
            store.compare_set(_VERDICT, "", _who_is_missing(store, place, timeout_seconds))
        verdict = store.get(_VERDICT).decode()
    except dist.DistNetworkError as error:
        raise ValueError(
            f"the process that serves the start at {place.address}:{place.port} has gone before all {place.world_size} "
            "ranks were there: see what it says"
        ) from error
    if verdict != _ALL_HERE:
        if place.store_is_here:
            time.sleep(1.0)  # the others ask for the verdict
        raise ValueError(verdict)
    return store


def open_store(place: Place, timeout_seconds: float) -> dist.TCPStore:
    """A connection to the store that the ranks meet at. Raises ValueError naming the address, the port and the fix."""
    where = f"{place.address}:{place.port}"
    if not place.store_is_here:
        reason = _reach(place.address, place.port, timeout_seconds)
        if reason is not None:
            raise ValueError(
                f"rank {place.rank} of {place.world_size} can't reach {where} since {timeout_seconds:.0f} s "
                f"({reason}): check that rank 0 is started there, that MASTER_ADDR and MASTER_PORT are its own, and "
                "that no firewall is between; --distributed-start-timeout-seconds waits longer"
            )
    opened: list[dist.TCPStore | RuntimeError] = []

    def connect() -> None:
        try:
            store = dist.TCPStore(
                place.address,
                place.port,
                place.world_size,
                is_master=place.store_is_here,
                timeout=timedelta(seconds=max(2.0, timeout_seconds)),
                wait_for_workers=False,
            )
            opened.append(store)
        except RuntimeError as error:
            opened.append(error)

    # In a thread: where another service listens and says nothing, torch waits for ever, whatever its timeout.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(max(2.0, timeout_seconds) + 1.0)
    if opened and isinstance(opened[0], dist.TCPStore):
        return opened[0]
    said = str(opened[0]) if opened else "no answer"
    if "EADDRINUSE" in said:
        raise ValueError(
            f"MASTER_PORT {place.port} of this host is in use by another process: end that, or set MASTER_PORT to a "
            "free port, on all ranks"
        )
    raise ValueError(
        f"{where} doesn't answer as the start of a run should ({said}): it may be another service's; check MASTER_ADDR "
        "and MASTER_PORT"
    )


def tell_waiting_ranks(message: str) -> None:
    """Let ranks that wait in `check_in` know that this one failed before it could join; does nothing where none can.

    To be called by a rank other than 0: where rank 0 serves the store and has failed too there is nobody to tell.
    """
    try:
        place = Place.from_environment(os.environ)
        if place is None or place.store_is_here or _reach(place.address, place.port, 1.0) is not None:
            return
        store = open_store(place, 2.0)
        told = f"rank {place.rank} on {socket.gethostname()} failed before joining: {message}"
        store.compare_set(_VERDICT, "", told)  # only where there is none: what ended the start comes first
    except (ValueError, RuntimeError):
        return


def _who_is_missing(store: dist.Store, place: Place, timeout_seconds: float) -> str:
    missing = [rank for rank in range(place.world_size) if not store.check([f"{_RANK}{rank}"])]
    listed = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
    return (
        f"{len(missing)} of {place.world_size} ranks didn't come to {place.address}:{place.port} within "
        f"{timeout_seconds:.0f} s: rank {listed}; see why on their terminals (not started, failed, or started with "
        "another MASTER_ADDR, MASTER_PORT or WORLD_SIZE), or raise --distributed-start-timeout-seconds"
    )


def _reach(address: str, port: int, timeout_seconds: float) -> str | None:
    """Wait until something listens there; the last reason why not, or None. Torch's own waiting tells no reason."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.1, min(5.0, deadline - time.monotonic()))).close()
            return None
        except socket.gaierror:
            reason = "its name is not known here"
        except TimeoutError:
            reason = "no answer"
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
        if time.monotonic() >= deadline:
            return reason
        time.sleep(0.2)


def destroy() -> None:
    """Leave every process group. Call before exit: peers may still be waiting for buffered sends."""
    if dist.is_initialized():
        dist.destroy_process_group()


def gpu_count() -> int:
    """GPUs this host offers; 0 means CPU and gloo."""
    return torch.cuda.device_count()


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Of a GPU, such as (8, 0), which decides what numbers it computes with; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
