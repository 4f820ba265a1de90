"""How long pipeline ranks idle under every schedule, beside the simulator and torch's schedules; and what they keep.

Lives here: the command, its tables and its verdict; `pipeline_rank.py` is what runs on each rank. May import every
room. The stages sleep, so that four ranks need no four cores, and idle time is the schedule's and the runtime's alone.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel.pipeline.catalogue import SCHEDULES
from parallel.pipeline.make import make_schedule
from parallel.pipeline.schedule import peak_activations
from parallel.pipeline.simulate import Costs, ShareCosts, simulate

ROOT = Path(__file__).resolve().parent.parent
NEAR = 0.02
"""How far the measured idle share may be from the simulated one."""
ZB_V = {8: 0.08, 16: 0.05}
"""Below what zb-v must idle on four ranks with equal F, I and W, by micro-batches."""


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def _numbers(text: str) -> list[int]:
    return [_number(word) for word in text.split(",")]


def _times(text: str) -> list[float]:
    times = [float(word) for word in text.split(",")]
    if len(times) not in (1, 3) or min(times) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give one time, or three for F, I and W, above 0")
    return times * (3 // len(times))


def _schedules(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in SCHEDULES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(SCHEDULES)}")
    return names


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline",
        description="Wall idle of pipeline ranks under each schedule, with stages that sleep, beside the simulator and "
        "torch.distributed.pipelining; then the peak memory of stages that compute. On CPU ranks of this machine. The "
        "exit status is 0 if what it checks of the idle times holds.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", type=_number, default=4, help="pipeline ranks")
    parser.add_argument("--microbatches", type=_numbers, default="8,16", help="of a step; some numbers")
    parser.add_argument(
        "--milliseconds",
        type=_times,
        default="100",
        help="F, I and W of a rank's share of a micro-batch; or one for all. What an action costs beyond its "
        "sleep, half a millisecond where caches went cold meanwhile, is idle time: with 20 ms five points of it",
    )
    parser.add_argument(
        "--rounds", type=_number, default=3, help="steps of each kind, taken in turns; medians are shown"
    )
    parser.add_argument("--schedules", type=_schedules, default=",".join(SCHEDULES), help="some of: %(default)s")
    parser.add_argument("--no-torch", action="store_true", help="leave torch's schedules out")
    parser.add_argument("--no-memory", action="store_true", help="leave the peak memory out")
    parser.add_argument("--json", type=Path, help="also write all that was measured to this file")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 found: see `pipeline_rank.main`. Raises RuntimeError naming the rank that failed first."""
    names = ("ranks", "microbatches", "milliseconds", "rounds", "schedules")
    passed = {name: getattr(options, name) for name in names}
    passed |= {"torch": not options.no_torch, "memory": not options.no_memory}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "KINETO_LOG_LEVEL": "6",  # the profiler otherwise tells of each start and stop
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(options.ranks),
        "PYTHONPATH": str(ROOT),
    }
    words = [sys.executable, "-m", "benchmarks.pipeline_rank", json.dumps(passed)]
    ranks = [
        subprocess.Popen(words, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(options.ranks)
    ]
    output = [rank.communicate()[0] for rank in ranks]
    if failed := [rank for rank, process in enumerate(ranks) if process.returncode]:
        raise RuntimeError(f"rank {failed[0]} ended with status {ranks[failed[0]].returncode}; its error is above")
    return json.loads(output[0])


@dataclass(frozen=True)
class Row:
    """Idle shares of one schedule with one number of micro-batches, 0 to 1, medians over the rounds.

    simulated: with the time that a message was measured to take; alone: as if messages took none; late: what the sleeps
    took beyond what was asked, in parts of that; theirs: torch's, None where it has no such schedule.
    """

    schedule: str
    microbatches: int
    simulated: float
    alone: float
    ours: float
    best: float
    late: float
    theirs: float | None


def rows(found: dict[str, Any], ranks: int, milliseconds: Sequence[float]) -> list[Row]:
    """One for each schedule and number of micro-batches, in the order in which they were asked for."""
    message = 1e3 * found["message"]
    f, i, w = milliseconds
    work = {m: m * sum(milliseconds) / 1e3 for m in (record["microbatches"] for record in found["idle"])}
    idle = {
        (r["contender"], r["schedule"], r["microbatches"]): [1 - work[r["microbatches"]] / t for t in r["makespan"]]
        for r in found["idle"]
    }
    made = []
    for record in found["idle"]:
        name, m = record["schedule"], record["microbatches"]
        if record["contender"] != "ours":
            continue
        table = make_schedule(name, ranks, m)
        simulated = [
            simulate(table, Costs.even(table.placement, ShareCosts(f, i, w, send))).idle_share
            for send in (message, 0.0)
        ]
        theirs = idle.get(("torch", name, m))
        made.append(
            Row(
                schedule=name,
                microbatches=m,
                simulated=simulated[0],
                alone=simulated[1],
                ours=statistics.median(idle["ours", name, m]),
                best=min(idle["ours", name, m]),
                late=statistics.median(record["slept"]) / work[m] - 1,
                theirs=None if theirs is None else statistics.median(theirs),
            )
        )
    return made


def idle_table(made: list[Row]) -> str:
    """Markdown."""
    head = (
        "Schedule",
        "Micro-batches",
        "Simulated",
        "without messages",
        "Measured",
        "best",
        "beyond simulated",
        "Sleeps late by",
        "torch's",
    )
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in made:
        theirs = "" if row.theirs is None else f"{row.theirs:.1%}"
        lines.append(
            f"| {row.schedule} | {row.microbatches} | {row.simulated:.1%} | {row.alone:.1%} | {row.ours:.1%} | "
            f"{row.best:.1%} | {100 * (row.ours - row.simulated):+.1f} | {row.late:.1%} | {theirs} |"
        )
    return "\n".join(lines) + "\n"


def verdicts(made: list[Row], equal_costs_on_four: bool) -> list[tuple[str, bool]]:
    """What is checked of the idle times, and whether it holds."""
    off = {row: abs(row.ours - row.simulated) for row in made}
    worst = max(off, key=off.__getitem__)
    words = f"within {100 * NEAR:g} points of the simulator: at most {100 * off[worst]:.1f} ({_of(worst)})"
    found = [(words, off[worst] <= NEAR)]
    if both := [row for row in made if row.theirs is not None]:
        nearest = min(both, key=lambda row: (row.theirs or 0.0) - row.ours)
        gain = 100 * ((nearest.theirs or 0.0) - nearest.ours)
        found.append((f"below torch's: by at least {gain:.1f} points ({_of(nearest)})", gain > 0))
    for row in made if equal_costs_on_four else ():
        if row.schedule == "zb-v" and row.microbatches in ZB_V:
            most = ZB_V[row.microbatches]
            found.append((f"below {most:.0%} with {_of(row)}: {row.ours:.1%}", row.ours < most))
    return found


def _of(row: Row) -> str:
    return f"{row.schedule}, {row.microbatches} micro-batches"


def memory_table(memory: dict[str, list[float]], ranks: int, microbatches: int) -> str:
    """Markdown: peak of each rank, counted from the table and measured, in its share of one micro-batch."""
    lines = [f"| Schedule | {' | '.join(f'Rank {rank}' for rank in range(ranks))} |", "|---" * (ranks + 1) + "|"]
    for name, measured in memory.items():
        counted = peak_activations(make_schedule(name, ranks, microbatches))
        cells = [f"{peak:.2f} ({count:.2f})" for peak, count in zip(measured, counted, strict=True)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    options = parse()
    found = measure(options)
    if options.json is not None:
        options.json.write_text(json.dumps(found))
    made = rows(found, options.ranks, options.milliseconds)
    f, i, w = options.milliseconds
    print(f"### Wall idle of {options.ranks} ranks, stages that sleep: F {f:g}, I {i:g}, W {w:g} ms a rank's share\n")
    print(idle_table(made))
    print(f"Medians of {options.rounds} steps. A message takes {1e3 * found['message']:.2f} ms.\n")
    checked = verdicts(made, options.ranks == 4 and f == i == w)
    for words, holds in checked:
        print(f"- {'holds' if holds else 'FAILS'}: {words}")
    if "memory" in found:
        most = max(options.microbatches)
        print(f"\n### Peak memory, measured (counted), in shares of one micro-batch; {most} micro-batches\n")
        print(memory_table(found["memory"], options.ranks, most))
    return 0 if all(holds for _, holds in checked) else 1


if __name__ == "__main__":
    sys.exit(main())
