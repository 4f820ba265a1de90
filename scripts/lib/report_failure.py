"""Why a run failed, its last line the message of the first failing rank; for scripts/pretrain_multinode.sh.

    PYTHONPATH=. python scripts/lib/report_failure.py LOGS STARTED NODE CODE

Imports `training.failures` and the standard library. LOGS holds the records of failed ranks, the output of ranks and
torchrun's own messages; STARTED is the time of the start; NODE's torchrun failed first, with exit code CODE.
"""

from __future__ import annotations

import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from training.failures import EXIT_CONFIGURATION, first_error

TAIL = 20


@dataclass(frozen=True)
class Ended:
    """A rank in torchrun's summary; `root` where torchrun saw it first. Negative exit codes are signals."""

    rank: int
    exit_code: int
    root: bool


def ended_ranks(log: Path) -> list[Ended]:
    """All ranks of one torchrun's summary, in its order (the first one that failed is its last)."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    summary, _, root = text.partition("Root Cause")
    entry = re.compile(r"^ +rank +: (\d+).*\n +exitcode +: (-?\d+)", re.MULTILINE)
    return [Ended(int(rank), int(code), part is root) for part in (summary, root) for rank, code in entry.findall(part)]


def tail(file: Path) -> str:
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
    return "\n".join(lines[-TAIL:])


def output(logs: Path, rank: int) -> str:
    """The end of what a rank printed; of rank 0 nothing, as it is on the terminal already."""
    return "" if rank == 0 else tail(logs / f"output_rank_{rank:05d}.log")


def report(logs: Path, started: float, node: str, code: int) -> list[str]:
    """The lines to print, nothing where rank 0 has said it all."""
    record = first_error(logs)
    if record is not None and record["time"] < started:
        record = None
    torchrun = sorted(logs.glob("torchrun_node_*.log"), key=lambda file: file.stem != f"torchrun_node_{node}")
    ended = [rank for file in torchrun for rank in ended_ranks(file)]

    if record is not None and not record["cascade"]:
        stack = [record["traceback"]] if record["rank"] != 0 else []
        return [*stack, f"rank {record['rank']} on {record['host']} failed: {record['message']}"]

    # A rank that is killed leaves no record, only peers that lost their connection to it. SIGTERM is torchrun's own, as
    # is SIGKILL where a rank didn't follow that: the root cause goes before such.
    killed = [rank for rank in ended if rank.exit_code < 0 and -rank.exit_code != signal.SIGTERM]
    if killed:
        first = min(killed, key=lambda rank: not rank.root)
        name = signal.Signals(-first.exit_code).name
        memory = " (the kernel does so when memory runs out: see dmesg)" if name == "SIGKILL" else ""
        return [output(logs, first.rank), f"rank {first.rank} was killed by {name}{memory}"]

    if record is not None:
        return [f"rank {record['rank']} on {record['host']} failed: {record['message']}"]

    # No record at all: it ended before the run began, by a wrong flag, which rank 0 tells unless it was ended before.
    for first in (rank for rank in ended if rank.root):
        told = first.exit_code == EXIT_CONFIGURATION
        return ["" if told else f"rank {first.rank} ended with exit code {first.exit_code}", output(logs, first.rank)]
    if code > 128:
        return [f"torchrun of node {node} was killed by {signal.Signals(code - 128).name}"]
    file = logs / f"torchrun_node_{node}.log"
    return [tail(file), f"node {node} could not start its processes; torchrun's messages are in {file}"]


if __name__ == "__main__":
    for text in report(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3], int(sys.argv[4])):
        if text:
            print(text, file=sys.stderr)
