"""Compressed gradient reduction beside torch's DDP, between four hosts whose links have a chosen rate.

Lives here: the command, the formulas of bytes, its table and its verdict; `gradient_compression_rank.py` is what runs
on each host. Hosts are network namespaces of this machine (Linux, root, iproute2). Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.hosts import run_on_hosts
from tests.simulated_hosts import unavailable

PLAIN = "fp32 all-reduce"
LEAST = {"200mbit": {"int8": 3.0, "int4": 5.0}, "1gbit": {"int8": 1.5}}
"""How many times faster than the plain all-reduce a codec must be at a link's rate."""
OFF = 0.02
"""The part by which bytes on the interface may differ from the formula."""
HEADERS = 66
"""Bytes before the payload of a packet: Ethernet 14, IP 20, TCP 32 with its time stamps."""
RANK = 8
DENSITY = 0.01
OURS: dict[str, dict[str, Any] | None] = {
    "ours, uncompressed": None,
    "bf16": {"name": "bf16"},
    "fp8": {"name": "fp8"},
    "int8": {"name": "int8"},
    "int4": {"name": "int4"},
    "1bit": {"name": "1bit"},
    "int8, two hops": {"name": "int8", "inner_size": 2},
    "int4, two hops": {"name": "int4", "inner_size": 2},
    "topk 1 %": {"name": "topk", "density": DENSITY},
    f"powersgd rank {RANK}": {"name": "powersgd", "rank": RANK},
}
BITS = {"bf16": 16.0, "fp8": 8 + 32 / 256, "int8": 8 + 32 / 256, "int4": 4 + 32 / 256, "1bit": 1 + 32 / 1024 + 1 / 32}
"""Of a value on the wire, with its part of the block's scale; for 1bit of the mask of zeros too."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gradient_compression",
        description="Step time, bytes on the interface and break-even bandwidth of every codec of the gradient "
        "reduction, beside torch's DistributedDataParallel and its hooks. A step is the reduction of ready gradients: "
        "nothing is computed meanwhile. Status 1: what is claimed at 200 Mbit/s and 1 Gbit/s doesn't hold.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rates", nargs="+", default=list(LEAST), help="of the links, in tc's words")
    parser.add_argument("--hosts", type=int, default=4, help="with one rank each")
    parser.add_argument("--tensors", type=int, default=8, help="square matrices of fp32 gradients")
    parser.add_argument("--side", type=int, default=1024, help="of each: 1024 makes 4 MiB")
    parser.add_argument("--bucket-mb", type=float, default=4.0, help="MiB of fp32 in a bucket")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each kind, taken in turns; medians are shown")
    parser.add_argument("--warm-up", type=int, default=3, help="steps of each kind before that")
    parser.add_argument("--kinds", nargs="+", default=list(OURS), choices=list(OURS), help="of our reducer")
    parser.add_argument("--no-ddp", action="store_true", help="leave DDP out")
    parser.add_argument("--json", type=Path, help="also write all that was measured to this file")
    return parser.parse_args(arguments)


def measure(rate: str, options: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 found: see `gradient_compression_rank.main`."""
    passed = {name: getattr(options, name) for name in ("tensors", "side", "bucket_mb", "rounds", "warm_up")}
    passed |= {"ours": {kind: OURS[kind] for kind in options.kinds}, "ddp": not options.no_ddp, "ddp_rank": RANK}
    found: dict[str, Any] = run_on_hosts(options.hosts, "benchmarks.gradient_compression_rank", rate, passed)
    return found


def formula(kind: str, options: argparse.Namespace) -> float:
    """Bytes that a rank sends in a step: N hosts, n values, q bits of a value on the wire.

    All-reduce and two-shot 2 (N - 1)/N · n · q/8; over L hosts inside and X between, twice
    (L - 1)/L · n · q/8 + (X - 1)/X · n/L · q/8; PowerSGD 2 (N - 1)/N · r (p + q) · 4 for a matrix of p rows and q
    columns; top-k over regions twice (N - 1)/N · k entries of 8 bytes.
    """
    n, around = options.tensors * options.side**2, 2 * (options.hosts - 1) / options.hosts
    if kind.lower().find("powersgd") >= 0:
        return around * 4 * RANK * 2 * options.side * options.tensors
    if kind == "DDP, bf16 hook":
        return around * 2 * n
    compression = OURS.get(kind)
    if compression is None:
        return around * 4 * n
    if compression["name"] == "topk":
        return around * DENSITY * n * 8
    inner = compression.get("inner_size", 1)
    outer = options.hosts // inner
    hops = 2 * ((inner - 1) / inner + (outer - 1) / outer / inner)
    return hops * n * BITS[compression["name"]] / 8


def bits_per_second(rate: str) -> float:
    """Of tc's words, such as 200mbit."""
    number, unit = re.fullmatch(r"([\d.]+)([kmg]?)bit", rate).groups()  # type: ignore[union-attr]
    return float(number) * {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}[unit]


class Row(NamedTuple):
    """One kind of step. sent, payload: bytes of a rank on the interface, with and without headers; seconds: medians;
    ratio: times faster than the plain all-reduce of the same round; encode, wire, decode: seconds, None where nothing
    is encoded; break_even: bits a second, the rate above which it is slower than fp32, from its parts."""

    kind: str
    expected: float
    sent: float
    payload: float
    ledger: float
    seconds: float
    ratio: float
    encode: float | None
    wire: float | None
    decode: float | None
    break_even: float | None

    @property
    def off(self) -> float:
        """Of the formula."""
        return self.payload / self.expected - 1


def rows_of(found: dict[str, Any], options: argparse.Namespace) -> list[Row]:
    rows, plain = [], found[PLAIN]
    for kind, of_kind in found.items():
        sent = median(of_kind["sent"])
        payload = median(s - HEADERS * p for s, p in zip(of_kind["sent"], of_kind["packets"], strict=True))
        parts = {
            name: median(step[f"{name}_seconds"] for step in of_kind["parts"]) if of_kind["parts"] else None
            for name in ("encode", "wire", "decode")
        }
        break_even = None
        if parts["encode"] is not None and parts["decode"] is not None:
            break_even = 8 * (median(plain["sent"]) - sent) / max(parts["encode"] + parts["decode"], 1e-9)
        ratio = median(a / b for a, b in zip(plain["seconds"], of_kind["seconds"], strict=True))
        rows.append(
            Row(
                kind,
                formula(kind, options),
                sent,
                payload,
                median(of_kind["ledger"]),
                median(of_kind["seconds"]),
                ratio,
                parts["encode"],
                parts["wire"],
                parts["decode"],
                break_even,
            )
        )
    return rows


def fitted_break_even(rows: dict[str, list[Row]], kind: str) -> float:
    """Bits a second at which a kind would be as fast as the plain all-reduce, from the steps at all rates.

    A step takes a + 8 · bytes / rate; a is the mean of what it took beyond its bytes. Infinite where a is not larger
    than the plain all-reduce's.
    """

    def fixed(kind: str) -> tuple[float, float]:
        measured = {rate: next(row for row in of_rate if row.kind == kind) for rate, of_rate in rows.items()}
        beyond = [row.seconds - 8 * row.sent / bits_per_second(rate) for rate, row in measured.items()]
        return sum(beyond) / len(beyond), 8 * sum(row.sent for row in measured.values()) / len(measured)

    (plain, plain_bits), (own, own_bits) = fixed(PLAIN), fixed(kind)
    return (plain_bits - own_bits) / (own - plain) if own > plain else math.inf


def table(rate: str, rows: list[Row], options: argparse.Namespace) -> str:
    """Markdown."""
    head = ("Reduction", "MiB sent a rank", "Off the formula", "Step, s", "Times faster", "Encode, s", "Wire, s")
    lines = [
        f"### {rate}: {4 * options.tensors * options.side**2 / 2**20:.1f} MiB of fp32 gradients, {options.hosts} hosts",
        "",
        f"| {' | '.join(head)} | Decode, s | Break-even, Gbit/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        parts = " | ".join("" if x is None else f"{x:.3f}" for x in (row.encode, row.wire, row.decode))
        break_even = "" if row.break_even is None else f"{row.break_even / 1e9:.2f}"
        lines.append(
            f"| {row.kind} | {row.sent / 2**20:.2f} | {row.off:+.1%} | {row.seconds:.3f} | {row.ratio:.2f} | {parts} | "
            f"{break_even} |"
        )
    return "\n".join(lines) + "\n"


def break_even_table(rows: dict[str, list[Row]]) -> str:
    """Markdown: the link rate above which a kind is slower than the plain all-reduce, from its parts and its steps."""
    lines = ["| Reduction | From encode and decode, Gbit/s | From the steps, Gbit/s |", "|---|---|---|"]
    for row in next(iter(rows.values())):
        parts = [other.break_even for of_rate in rows.values() for other in of_rate if other.kind == row.kind]
        known = [x for x in parts if x is not None]
        if known:
            fitted = fitted_break_even(rows, row.kind)
            lines.append(
                f"| {row.kind} | {median(known) / 1e9:.2f} | "
                f"{'none: always faster' if fitted == math.inf else f'{fitted / 1e9:.2f}'} |"
            )
    return "\n".join(lines) + "\n"


def verdicts(rate: str, rows: list[Row]) -> list[tuple[str, bool]]:
    """What is checked at one rate, and whether it holds."""
    checked = []
    by_kind = {row.kind: row for row in rows}
    for kind, least in LEAST.get(rate, {}).items():
        if kind in by_kind:
            ratio = by_kind[kind].ratio
            words = f"{rate}: {kind} is at least {least:g} times as fast as the {PLAIN}: {ratio:.2f}"
            checked.append((words, ratio >= least))
    worst = max(rows, key=lambda row: abs(row.off))
    checked.append(
        (
            f"{rate}: bytes are within {OFF:.0%} of the formula: {worst.off:+.2%} for {worst.kind}",
            abs(worst.off) <= OFF,
        )
    )
    counted = [row for row in rows if row.ledger]
    far = max(counted, key=lambda row: abs(row.ledger / row.expected - 1))
    checked.append(
        (
            f"{rate}: the ledger has the formula's bytes: {far.ledger / far.expected - 1:+.2%} for {far.kind}",
            abs(far.ledger / far.expected - 1) <= OFF,
        )
    )
    # Encoding and decoding of one bucket overlaps with another's way, so a codec may win beyond its break-even; what
    # it mustn't do is lose below it.
    slower = [
        row.kind
        for row in rows
        if row.break_even is not None and bits_per_second(rate) < row.break_even and row.ratio < 1
    ]
    words = f"{rate}: below its break-even each codec is faster than fp32"
    checked.append((words + (f"; not {', '.join(slower)}" if slower else ""), not slower))
    return checked


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if reason := unavailable():
        print(f"skipped: {reason}")
        return 0
    found, rows, checked = {}, {}, []
    for rate in options.rates:
        found[rate] = measure(rate, options)
        rows[rate] = rows_of(found[rate], options)
        print(table(rate, rows[rate], options), flush=True)
        checked += verdicts(rate, rows[rate])
    if options.json is not None:
        options.json.write_text(json.dumps(found))
    print("### Break-even\n")
    print(break_even_table(rows))
    for words, holds in checked:
        print(f"- {'holds' if holds else 'FAILS'}: {words}")
    return 0 if all(holds for _, holds in checked) else 1


if __name__ == "__main__":
    sys.exit(main())
