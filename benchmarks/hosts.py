"""One rank on each of several hosts, network namespaces of this machine, for benchmarks of what travels between them.

Lives here: starting them and reading what rank 0 found. May import tests.simulated_hosts only (Linux, root, iproute2).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.simulated_hosts import SimulatedHosts

ROOT = Path(__file__).resolve().parent.parent


def run_on_hosts(count: int, module: str, rate: str | None, passed: dict[str, Any]) -> Any:
    """What rank 0 of `python -m module PASSED` printed, as JSON; a rank on each of `count` hosts, one thread a rank.

    rate: of each host's link, in tc's words, None: as fast as memory; passed: handed over as JSON. Raises RuntimeError
    where a rank fails, whose error is on the terminal then.
    """
    with SimulatedHosts(count, rate) as hosts:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # hosts have no names, which torch warns of
            "GLOO_SOCKET_IFNAME": hosts.interface,
            "MASTER_ADDR": hosts.addresses[0],
            "MASTER_PORT": "29500",
            "WORLD_SIZE": str(count),
            "PYTHONPATH": str(ROOT),
        }
        words = [sys.executable, "-m", module, json.dumps(passed)]
        ranks = [
            subprocess.Popen(
                hosts.command(rank, words), env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
            )
            for rank in range(count)
        ]
        output = [rank.communicate()[0] for rank in ranks]
    if failed := [rank for rank, process in enumerate(ranks) if process.returncode]:
        raise RuntimeError(f"rank {failed[0]} ended with status {ranks[failed[0]].returncode}; its error is above")
    return json.loads(output[0])
