"""What ZeRO saves and what it sends: bytes of each rank's tensors by role, and of a step's messages, by stage.

Lives here: the command, what is expected, its tables and its verdict; `zero_rank.py` is what runs on each rank. Ranks
are gloo processes of this machine. Prints Markdown. Source of the shares: ZeRO (1910.02054), section 5.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import zero_rank
from tests.process_pool import ProcessPool

WIDTH = {"parameters": 2, "gradients": 4, "masters": 4, "moments": 8}
"""Bytes of a value: bf16, and fp32 for the rest; there are two moments."""
CUT_FROM = {"parameters": 3, "gradients": 2, "masters": 1, "moments": 1}
"""The stage from which a role is cut over replicas."""
BUCKET_MB = 0.25


@dataclass(frozen=True)
class Kind:
    """One thing to measure. offload: "" for none, "optimizer", or "all" (parameters too)."""

    dp: int
    stage: int
    offload: str = ""
    tp: int = 1
    pp: int = 1

    @property
    def name(self) -> str:
        layout = "".join(f"{axis}{size}·" for axis, size in (("tp", self.tp), ("pp", self.pp)) if size > 1)
        offload = {"": "", "optimizer": ", optimizer offloaded", "all": ", all offloaded"}[self.offload]
        return f"{layout}dp{self.dp} stage {self.stage}{offload}"

    def flags(self, file: Path) -> dict[str, Any]:
        """Of the run. file: a place for DeepSpeed's JSON, which lets stage 3 cut small parameters too."""
        if self.stage == 3:
            file.write_text(json.dumps({"zero_optimization": {"stage3_param_persistence_threshold": 0}}))
        return {
            "precision": "bf16",
            "bucket_cap_mb": BUCKET_MB,
            "zero_stage": self.stage,
            "offload_optimizer": "cpu" if self.offload else "none",
            "offload_param": "cpu" if self.offload == "all" else "none",
            "deepspeed_config": str(file) if self.stage == 3 else None,
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
        }

    def in_host_memory(self) -> set[str]:
        """The roles that an accelerator would not have to hold."""
        roles = {"masters", "moments", "copies"} if self.offload else set()
        if self.offload and self.stage == 3:
            roles.add("gradients")
        return roles | ({"parameters"} if self.offload == "all" else set())


def kinds(sizes: list[int]) -> list[Kind]:
    """Every stage for every dp, offloading at the middle one, and stage 1 under tensor and pipeline parallelism."""
    plain = [Kind(dp, stage) for dp in sizes for stage in range(4)]
    middle = sizes[len(sizes) // 2]
    offloaded = [Kind(middle, stage, "optimizer") for stage in (1, 2, 3)]
    return [*plain, *offloaded, Kind(middle, 3, "all"), Kind(2, 0, tp=2, pp=2), Kind(2, 1, tp=2, pp=2)]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zero",
        description="Bytes of parameters, gradients, masters and moments that live on a rank between a backward pass "
        "and the step of a tiny V3 in bf16, and bytes that it sends in a step, under every stage of ZeRO. Status 1: "
        "a role isn't cut to 1/dp where it should be, or is where it shouldn't, or messages aren't the formula's.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--dp", type=int, nargs="+", default=[1, 2, 4], help="data-parallel sizes")
    parser.add_argument("--only", nargs="+", metavar="KIND", help='take some, such as "dp2 stage 3"')
    parser.add_argument("--microbatches", type=int, default=2, help="of a step on each rank")
    parser.add_argument("--json", type=Path, help="also write all that was measured to this file")
    return parser.parse_args(arguments)


def measure(kind: Kind, microbatches: int) -> list[dict[str, Any]]:
    """What each rank found: see `zero_rank.measure`. In processes that have had no other engine."""
    pool = ProcessPool()
    try:
        with tempfile.TemporaryDirectory() as directory:
            flags = kind.flags(Path(directory) / "deepspeed.json")
            ranks = kind.dp * kind.tp * kind.pp
            return pool.run_ranks(ranks, zero_rank.measure, flags, microbatches, timeout=900.0)
    finally:
        pool.close()


def expected(kind: Kind, found: dict[str, Any]) -> dict[str, float]:
    """Bytes by role on the rank that found this: 2, 4, 4 and 8 for each value, or for each of a replica's part.

    With the optimizer offloaded DeepSpeed keeps the part of the gradients twice.
    """
    sizes = {
        role: width * (found["part"] if kind.stage >= CUT_FROM[role] else found["values"])
        for role, width in WIDTH.items()
    }
    return sizes | {"copies": 4 * found["part"] if kind.offload else 0.0}


def slack(kind: Kind, found: dict[str, Any], role: str) -> float:
    """Bytes that alignment may add: to 16 for each bf16 parameter, and some for each of DeepSpeed's flat tensors."""
    return WIDTH.get(role, 4) * (8 * found["tensors"] + 16 * kind.dp)


def formula(kind: Kind, microbatches: int, found: dict[str, Any]) -> float:
    """Bytes that a rank sends in a step over dp; N replicas, G bytes of fp32 gradients, P bytes of parameters.

    Stages 0 and 1 reduce once a step: 2 (N - 1)/N · G; the others in every micro-batch, stage 2 by an all-reduce too,
    stage 3 by a reduce-scatter, (N - 1)/N · G. Stages 1 and 2 gather parameters after the step, (N - 1)/N · P, stage 3
    before each micro-batch's forward pass, after which they stay until its backward pass is over.
    """
    around = (kind.dp - 1) / kind.dp
    gradients, parameters = around * 4 * found["values"], around * 2 * found["values"]
    return {
        0: 2 * gradients,
        1: 2 * gradients + parameters,
        2: 2 * gradients * microbatches + parameters,
        3: (gradients + parameters) * microbatches,
    }[kind.stage]


def memory_off(kind: Kind, found: dict[str, Any]) -> Iterator[str]:
    """What a rank holds that isn't as expected, in words."""
    for role, size in expected(kind, found).items():
        if abs(found["live"][role] - size) > slack(kind, found, role):
            yield f"{kind.name}: {role} {found['live'][role]:,} bytes instead of {size:,.0f}"


def traffic_off(kind: Kind, microbatches: int, found: dict[str, Any]) -> Iterator[str]:
    """What a rank sends that isn't within 1 % of the formula, where all messages are those of replicas."""
    sent, wanted = sum(found["sent"].values()), formula(kind, microbatches, found)
    if kind.tp * kind.pp == 1 and abs(sent - wanted) > 0.01 * wanted:
        yield f"{kind.name}: {sent:,} bytes sent instead of {wanted:,.0f}"


def memory_table(found: dict[Kind, list[dict[str, Any]]]) -> str:
    """Of rank 0, in MB (10⁶ bytes)."""
    lines = [
        "| Layout | Stage | Parameters | Gradients | Masters | Moments | Sum | in the host's memory | "
        "Buffers, other | Peak of a step |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, ranks in found.items():
        live = ranks[0]["live"]
        layout, _, stage = kind.name.partition(" stage ")
        shown = [live["parameters"], live["gradients"] + live["copies"], live["masters"], live["moments"]]
        hosted = sum(live[role] for role in kind.in_host_memory())
        sizes = [*shown, sum(shown), hosted, live["other"], ranks[0]["peak"]]
        lines.append(f"| {layout} | {stage} | {' | '.join(f'{size / 1e6:.2f}' for size in sizes)} |")
    return "\n".join(lines) + "\n"


def traffic_table(found: dict[Kind, list[dict[str, Any]]], microbatches: int) -> str:
    """Of rank 0, in MB, of the layouts that have no messages but those of replicas."""
    lines = ["| Layout | Stage | Sent a step | Formula | by |", "|---|---|---|---|---|"]
    for kind, ranks in found.items():
        if kind.dp == 1 or kind.tp * kind.pp > 1:
            continue
        sent = {name: size for name, size in ranks[0]["sent"].items() if size > 1e4}
        by = ", ".join(f"{name} {size / 1e6:.2f}" for name, size in sorted(sent.items()))
        layout, _, stage = kind.name.partition(" stage ")
        wanted = formula(kind, microbatches, ranks[0])
        total = sum(ranks[0]["sent"].values())
        lines.append(f"| {layout} | {stage} | {total / 1e6:.2f} | {wanted / 1e6:.2f} | {by} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    asked = [kind for kind in kinds(options.dp) if not options.only or kind.name in options.only]
    if not asked:
        names = "; ".join(kind.name for kind in kinds(options.dp))
        print(f"--only {' '.join(options.only)}: not among {names}", file=sys.stderr)
        return 2
    found: dict[Kind, list[dict[str, Any]]] = {}
    for kind in asked:
        print(f"measuring {kind.name}", file=sys.stderr, flush=True)
        found[kind] = measure(kind, options.microbatches)
    if options.json is not None:
        options.json.write_text(json.dumps({kind.name: ranks for kind, ranks in found.items()}))
    print(memory_table(found))
    print("MB of a rank between backward and step; values of bf16, gradients, masters and moments of fp32.\n")
    print(traffic_table(found, options.microbatches))
    print(f"MB that a rank sends in a step of {options.microbatches} micro-batches.\n")
    wrong = [
        words
        for kind, ranks in found.items()
        for each in ranks
        for words in (*memory_off(kind, each), *traffic_off(kind, options.microbatches, each))
    ]
    for words in dict.fromkeys(wrong):
        print(f"- FAILS: {words}")
    if not wrong:
        print("- holds: on every rank each role has its bytes, whole or 1/dp, and sends those of the formula")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
