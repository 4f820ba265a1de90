"""What the overlapped forward-backward action of dualpipe-v hides of the experts' all-to-alls between two hosts.

Lives here: the command, its arithmetic and its table; `overlap_rank.py` is what runs on each host. Hosts are network
namespaces of this machine (`tests/simulated_hosts.py`: Linux, root, iproute2). Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.hosts import run_on_hosts
from tests.simulated_hosts import unavailable

LEAST = 0.5
"""The part of the all-to-alls' time that must be hidden."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overlap",
        description="Seconds of a step of a small V3 with experts on two hosts, with the overlapped forward-backward "
        "action of dualpipe-v off and on in turns. Status 1: it hides less than half of the all-to-alls' time.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rate", default="200mbit", help="of each host's link, in tc's words")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each kind, taken in turns; medians are shown")
    parser.add_argument("--microbatches", type=int, default=12, help="of a step on each rank")
    parser.add_argument("--tokens", type=int, default=256, help="of a micro-batch")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model")
    parser.add_argument(
        "--expert-hidden", type=int, default=512, help="inner size of an expert: more of it, more computation"
    )
    parser.add_argument("--layers", type=int, default=2, help="layers of the model, half of them on each of two stages")
    parser.add_argument("--json", type=Path, help="also write all step times to this file")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 found: see `overlap_rank.main`."""
    names = ("rounds", "microbatches", "tokens", "hidden", "expert_hidden", "layers")
    passed = {name: getattr(options, name) for name in names}
    return run_on_hosts(2, "benchmarks.overlap_rank", options.rate, passed)


class Hidden(NamedTuple):
    """Parts of 1. waits: of the time that ranks stand still with the action off, what it takes away; saved: what a step
    is shorter, in parts of the time that the all-to-alls take alone; shared: of that time, what is hidden with the
    action off, by shared experts."""

    waits: float
    saved: float
    shared: float


def hidden(found: dict[str, Any]) -> Hidden:
    """Medians over the rounds; what is compared is of one round, in which the machine was as busy."""
    seconds, waited = found["seconds"], found["waited"]
    rounds = range(len(seconds["on"]))
    return Hidden(
        waits=median(1 - waited["on"][i] / waited["off"][i] for i in rounds),
        saved=median((seconds["off"][i] - seconds["on"][i]) / seconds["alone"][i] for i in rounds),
        shared=median(1 - waited["off"][i] / seconds["alone"][i] for i in rounds),
    )


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    lines = ["| Overlapped action | Step, s | Waiting for all-to-alls, s |", "|---|---|---|"]
    for kind in ("off", "on"):
        lines.append(f"| {kind} | {median(found['seconds'][kind]):.3f} | {median(found['waited'][kind]):.3f} |")
    lines.append(f"| the all-to-alls alone | {median(found['seconds']['alone']):.3f} | |")
    return "\n".join(lines) + "\n"


def verdicts(parts: Hidden) -> list[tuple[str, bool]]:
    """What is checked, and whether it holds."""
    return [
        (
            f"at least {LEAST:.0%} of the waits with the action off are hidden with it on: {parts.waits:.0%}",
            parts.waits >= LEAST,
        ),
        (
            f"a step is shorter by at least {LEAST:.0%} of the time of its all-to-alls: {parts.saved:.0%}",
            parts.saved >= LEAST,
        ),
    ]


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if reason := unavailable():
        print(f"skipped: {reason}")
        return 0
    found = measure(options)
    if options.json is not None:
        options.json.write_text(json.dumps(found))
    parts = hidden(found)
    print(
        f"### {options.rate}: {found['messages']} all-to-alls a step, {found['sent'] / 1e6:.1f} MB each way; "
        f"{found['paired']:.0%} of forwards run together with a backward\n"
    )
    print(table(found))
    print(
        f"Medians of {options.rounds} steps. With the action off {parts.shared:.0%} of the all-to-alls' time is hidden "
        "already, as shared experts are computed meanwhile; what the action hides comes on top.\n"
    )
    checked = verdicts(parts)
    for words, holds in checked:
        print(f"- {'holds' if holds else 'FAILS'}: {words}")
    return 0 if all(holds for _, holds in checked) else 1


if __name__ == "__main__":
    sys.exit(main())
