"""DeepSpeed's ops in C++: which a run needs, compiled on each host by one rank before engines are made.

Lives here: the table of ops, and how ranks wait for them and hear of a failure. May import `parallel`.
`python -m training.deepspeed_ops cpu_adam` compiles them ahead of runs, for images and login nodes.
"""

from __future__ import annotations

import argparse
import logging
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from parallel.comm import gather_objects, job_store
from parallel.mesh import Mesh
from training.failures import ConfigurationError
from training.op_compilation import PROGRESS_SECONDS, Op, OpError, ensure_compiled

logger = logging.getLogger(__name__)

_NVME = ("--offload-optimizer nvme or --offload-param nvme", "both with cpu")
OPS = {
    op.name: op
    for op in (
        Op(
            "cpu_adam",
            "deepspeed.ops.op_builder:CPUAdamBuilder",
            "--offload-optimizer cpu",
            "every --zero-stage with --offload-optimizer none, and --offload-param cpu",
        ),
        Op("pin_memory", "deepspeed.ops.op_builder:PinMemoryBuilder", *_NVME),
        Op(
            "async_io",
            "deepspeed.ops.op_builder:AsyncIOBuilder",
            *_NVME,
            library="libaio with its headers (apt-get install libaio-dev)",
            after=("pin_memory",),
        ),
    )
}
"""By name. DeepSpeed loads them when an engine is made, and then compiles in silence what isn't compiled. What it
would compile first of all on a CPU, no run needs: see `parallel/accelerator.py`."""

_LONGEST_SECONDS = 3600.0
"""After which a host that says nothing is given up."""
_READY = "ready"


def prepare_ops(names: Sequence[str], mesh: Mesh) -> None:
    """Have these ops of DeepSpeed compiled on every host, by one rank of each. Collective over the world.

    Returns in milliseconds where they are. Raises ConfigurationError, on every rank, where a tool is missing or the
    compiler fails: with the host, the compiler's last lines, and what works without the op.
    """
    unknown = [name for name in names if name not in OPS]
    if unknown:
        raise ValueError(f"no op of DeepSpeed in use here is called {', '.join(unknown)}: {', '.join(OPS)} are")
    compile_on_hosts(with_required(names), mesh)


def with_required(names: Sequence[str]) -> list[Op]:
    """These ops in this order, each behind those that it loads itself."""

    def expanded() -> Iterator[str]:
        for name in names:
            yield from OPS[name].after
            yield name

    return [OPS[name] for name in dict.fromkeys(expanded())]


def compile_on_hosts(ops: Sequence[Op], mesh: Mesh) -> None:
    """`prepare_ops`, of any ops."""
    if not ops:
        return
    host, hosts = socket.gethostname(), gather_objects(socket.gethostname(), mesh.world)
    leads = hosts.index(host) == mesh.world.rank
    store = job_store(mesh.world)
    error = _compile_here(ops, mesh.device) if leads else None
    if store is None:
        verdict = error or _READY
    else:
        # Not a collective, which would end with the group's timeout: ranks look, and hear of an error at once.
        key = f"deepspeed_ops/{store.add(f'deepspeed_ops/calls/{mesh.world.rank}', 1)}"
        if error is not None:
            store.compare_set(f"{key}/verdict", "", f"on {host}: {error}")
        elif leads and store.add(f"{key}/compiled", 1) == len(set(hosts)):
            store.compare_set(f"{key}/verdict", "", _READY)
        verdict = _wait_for_hosts(store, key, len(set(hosts)))
    if verdict != _READY:
        raise ConfigurationError(verdict)


def _compile_here(ops: Sequence[Op], device: torch.device) -> str | None:
    """Why it can't be done; None: all ops are there."""
    try:
        for op in ops:
            ensure_compiled(op, device, logger.info)
    except OpError as error:
        return str(error)
    return None


def _wait_for_hosts(store: Any, key: str, hosts: int) -> str:
    """What was found on all hosts: ready, or the first error. Raises RuntimeError after an hour."""
    began = told = time.monotonic()
    pause = 0.01
    while not store.check([f"{key}/verdict"]):
        now = time.monotonic()
        if now - began > _LONGEST_SECONDS:
            raise RuntimeError(f"a host hasn't compiled DeepSpeed's ops in {now - began:.0f} s: see its ranks' logs")
        if now - told > PROGRESS_SECONDS:
            told, done = now, store.add(f"{key}/compiled", 0)
            logger.info("waiting for DeepSpeed's ops: %d of %d hosts have them, %.0f s", done, hosts, now - began)
        time.sleep(pause)
        pause = min(1.0, 1.5 * pause)
    return store.get(f"{key}/verdict").decode()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m training.deepspeed_ops",
        description="Compile ops of DeepSpeed for this machine, which a run that needs them would else do first.",
    )
    used = "; ".join(f"{op.name}: {op.needed_by}" for op in OPS.values())
    parser.add_argument("ops", nargs="+", choices=list(OPS), metavar="OP", help=used)
    names = parser.parse_args(words).ops
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    error = _compile_here(with_required(names), torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if error is not None:
        print(f"error: {error}", file=sys.stderr)
    return 0 if error is None else 2


if __name__ == "__main__":
    sys.exit(main())
