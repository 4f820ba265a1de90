"""Why the processes of a node failed: the first failing rank and its message, for scripts/lib/nodes.py.

Imports `training.failures` and the standard library. Reads what a run's logs directory holds: the records of failed
ranks, the output of ranks and torchrun's own messages.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from training.failures import EXIT_CONFIGURATION, first_error

TAIL = 20


@dataclass(frozen=True)
class Failure:
    """Why a node failed.

    message: in a line or few, for all nodes; detail: what goes before it on this node's terminal; told: rank 0 has said
    the message on this terminal; root: False where the cause may lie on another node.
    """

    message: str
    detail: str = ""
    told: bool = False
    root: bool = True


@dataclass(frozen=True)
class Ended:
    """A rank in torchrun's summary; `root` where torchrun saw it first. Negative exit codes are signals."""

    rank: int
    exit_code: int
    root: bool
    message: str


def ended_ranks(log: Path) -> list[Ended]:
    """All ranks of one torchrun's summary, in its order (the first one that failed is its last)."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    summary, _, root = text.partition("Root Cause")
    entry = re.compile(
        r"^ +rank +: (\d+).*\n +exitcode +: (-?\d+).*\n +error_file.*\n +traceback +: (.*(?:\n(?!\[|=).*)*)",
        re.MULTILINE,
    )
    return [
        Ended(int(rank), int(code), part is root, message.strip())
        for part in (summary, root)
        for rank, code, message in entry.findall(part)
    ]


def tail(file: Path) -> str:
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
    return "\n".join(lines[-TAIL:])


def output(logs: Path, rank: int) -> str:
    """The end of what a rank printed; of rank 0 nothing, as it is on the terminal already."""
    return "" if rank == 0 else tail(logs / f"output_rank_{rank:05d}.log")


def find_failure(logs: Path, started: float, nodes: list[int], node: int, code: int) -> Failure:
    """Why torchrun of `node`, the first of this host's `nodes` that failed, ended with `code`.

    started: time (since the epoch) of the start; older records are an earlier run's.
    """
    record = first_error(logs)
    if record is not None and record["time"] < started:
        record = None
    ordered = sorted(nodes, key=lambda other: other != node)
    ended = [rank for other in ordered for rank in ended_ranks(logs / f"torchrun_node_{other}.log")]

    if record is not None and not record["cascade"]:
        stack = record["traceback"] if record["rank"] != 0 else ""
        # Where hosts share the directory it may be another's record, which that one's node reports as its own.
        ours = not ended or record["rank"] in {rank.rank for rank in ended}
        return Failure(f"rank {record['rank']} on {record['host']} failed: {record['message']}", stack, root=ours)

    # A rank that is killed leaves no record, only peers that lost their connection to it. SIGTERM is torchrun's own, as
    # is SIGKILL where a rank didn't follow that: the root cause goes before such.
    killed = [rank for rank in ended if rank.exit_code < 0 and -rank.exit_code != signal.SIGTERM]
    if killed:
        first = min(killed, key=lambda rank: not rank.root)
        name = signal.Signals(-first.exit_code).name
        memory = " (the kernel does so when memory runs out: see dmesg)" if name == "SIGKILL" else ""
        return Failure(f"rank {first.rank} was killed by {name}{memory}", output(logs, first.rank))

    if record is not None:
        return Failure(f"rank {record['rank']} on {record['host']} failed: {record['message']}", root=False)

    # No record at all: it ended before the run began, by a wrong flag, which rank 0 tells unless it was ended before.
    for first in (rank for rank in ended if rank.root):
        if first.exit_code == EXIT_CONFIGURATION:
            text = output(logs, first.rank)
            return Failure(first.message or text or f"rank {first.rank} refused its flags", told=first.rank == 0)
        return Failure(f"rank {first.rank} ended with exit code {first.exit_code}", output(logs, first.rank))
    if code < 0:
        return Failure(f"torchrun of node {node} was killed by {signal.Signals(-code).name}")
    file = logs / f"torchrun_node_{node}.log"
    return Failure(f"node {node} could not start its processes; torchrun's messages are in {file}", tail(file))
