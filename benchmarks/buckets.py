"""Bucket sizes of the gradient reducer beside torch's DDP, between two hosts whose link has a chosen rate.

Lives here: the command and its table; `buckets_rank.py` is what runs on each host. Hosts are network namespaces of this
machine (`tests/simulated_hosts.py`: Linux, root, iproute2). Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.hosts import run_on_hosts
from tests.simulated_hosts import unavailable


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.buckets",
        description="Messages a step and exposed time of the gradient reduction by bucket size, overlap on and off, "
        "beside torch's DistributedDataParallel. Two hosts with one rank each, as network namespaces.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rates", nargs="+", default=["1gbit", "200mbit"], help="of the link, in tc's words")
    parser.add_argument("--bucket-mb", nargs="+", type=float, default=[1.0, 5.0, 25.0, 100.0], help="MiB of fp32")
    parser.add_argument("--rounds", type=int, default=4, help="steps of each kind, taken in turns; medians are shown")
    parser.add_argument("--tokens", type=int, default=768, help="a rank's in a step: more of them, more computation")
    parser.add_argument("--hidden", type=int, default=384, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--mtp", type=int, default=0, help="depths of multi-token prediction")
    parser.add_argument("--no-ddp", action="store_true", help="leave DDP out")
    parser.add_argument("--json", type=Path, help="also write all step times to this file")
    return parser.parse_args(arguments)


def measure(rate: str, options: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 found: see `buckets_rank.main`."""
    passed = {name: getattr(options, name) for name in ("bucket_mb", "rounds", "tokens", "hidden", "layers", "mtp")}
    passed["ddp"] = not options.no_ddp
    return run_on_hosts(2, "benchmarks.buckets_rank", rate, passed)


def table(rate: str, found: dict[str, Any]) -> str:
    """Markdown. Exposed: a step's time beyond that of one without communication, the median of a round's differences.

    In finish: how long a rank was blocked after its backward pass, which is steadier on a busy machine. Hidden: the
    part of the exposed time that overlap takes away, by the column before it.
    """
    seconds = found["seconds"]

    def exposed(kind: str) -> float:
        alone = seconds["ddp, no_sync" if kind.startswith("ddp") else "ours, no_sync"]
        return statistics.median(a - b for a, b in zip(seconds[kind], alone, strict=True))

    def blocked(kind: str) -> float:
        return statistics.median(found["blocked"][kind])

    head = ("Reducer", "Bucket, MiB", "Messages a step", "MB sent a step", "Step, s", "Exposed, s", "Hidden")
    lines = [
        f"### {rate}: {found['gradient_bytes'] / 1e6:.1f} MB of fp32 gradients, "
        f"{statistics.median(seconds['ours, no_sync']):.3f} s of computation a step",
        "",
        f"| {' | '.join(head)} | In finish, s | Hidden |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in seconds:
        name, _, cap = kind.partition(", ")
        if cap == "no_sync":
            continue
        hidden = in_finish = hidden_in_finish = ""
        if name.startswith("ours"):
            in_finish = f"{blocked(kind):.3f}"
        if name == "ours":
            hidden = f"{1 - exposed(kind) / exposed(f'ours without overlap, {cap}'):.0%}"
            hidden_in_finish = f"{1 - blocked(kind) / blocked(f'ours without overlap, {cap}'):.0%}"
        lines.append(
            f"| {name} | {cap} | {found['messages'][kind]} | {statistics.median(found['sent'][kind]) / 1e6:.1f} | "
            f"{statistics.median(seconds[kind]):.3f} | {exposed(kind):.3f} | {hidden} | {in_finish} | "
            f"{hidden_in_finish} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    options = parse()
    if reason := unavailable():
        print(f"skipped: {reason}")
        return
    everything = {}
    for rate in options.rates:
        everything[rate] = measure(rate, options)
        print(table(rate, everything[rate]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(everything))


if __name__ == "__main__":
    main()
