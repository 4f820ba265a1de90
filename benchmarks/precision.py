"""The default run in fp32, bf16 and fp16: speed, memory and the loss at its end.

    python -m benchmarks.precision [--steps 260]

Trains the tiny V3 with the flags of configs/runs/tiny_v3.yaml, as README's first command does, once in each precision:
fresh processes each time, so that a peak of memory is that run's. Prints a Markdown table. Ends with an error where a
validation loss is more than 1 % off that of fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.compression_convergence import make_corpus
from training.command_line import from_yaml

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = "configs/runs/tiny_v3.yaml"
PRECISIONS = ("fp32", "bf16", "fp16")
BOUND = 0.01
"""How far a validation loss may be from fp32's, relative."""
WARM_UP = 5
"""Steps that don't count for the speed."""


@dataclass(frozen=True)
class Result:
    """Of a run. speed: tokens a second, median of steps; peak: bytes, of the rank that needs most."""

    speed: float
    peak: float
    valid_loss: float
    overflows: int
    loss_scale: float | None

    @classmethod
    def of(cls, records: list[dict]) -> Result:
        """From the lines of metrics.jsonl."""
        last = records[-1]
        return cls(
            statistics.median(record["tokens_per_second"] for record in records[WARM_UP:] or records),
            last["peak_memory_gib"] * 2**30,
            last["valid_loss"],
            sum(record.get("overflows", 0) for record in records),
            last.get("loss_scale"),
        )


def train(precision: str, options: argparse.Namespace, data: str, directory: Path) -> Result:
    """One run, its ranks being processes of this host. Exits where one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = directory / precision
    command = [sys.executable, "pretrain_deepseek.py", "--config", SETTINGS, "--data-path", data]
    command += ["--run-dir", str(run), "--precision", precision, "--train-iters", str(options.steps)]
    command += ["--lr-warmup-iters", str(min(20, options.steps // 2)), "--no-bigram-baseline"]
    variables = {"WORLD_SIZE": options.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": ROOT}
    variables |= {"OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "lo"}
    processes = []
    for rank in range(options.ranks):
        own = {name: str(value) for name, value in (variables | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        with (directory / f"{precision}_{rank}.txt").open("w") as output:
            process = subprocess.Popen(command, cwd=ROOT, env=os.environ | own, stdout=output, stderr=output)
        processes.append(process)
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        failed = (directory / f"{precision}_{codes.index(max(codes))}.txt").read_text()
        raise SystemExit(f"{precision}: exit codes {codes}\n{failed}")
    return Result.of([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()])


def table(results: dict[str, Result]) -> list[str]:
    """Rows in Markdown."""
    base = results["fp32"]
    lines = ["| | tokens/s | peak of a rank | validation loss | beside fp32 | loss scale at the end, overflows |"]
    lines.append("|---" * 6 + "|")
    for precision, result in results.items():
        scale = "" if result.loss_scale is None else f"{result.loss_scale:.10g}, {result.overflows}"
        lines.append(
            f"| {precision} | {result.speed:,.0f} | {result.peak / 2**20:,.0f} MiB | {result.valid_loss:.4f} | "
            f"{result.valid_loss / base.valid_loss - 1:+.2%} | {scale} |"
        )
    return lines


def verdicts(results: dict[str, Result]) -> list[tuple[bool, str]]:
    """Whether each loss is within the bound of fp32's, and the line that says so."""
    base = results["fp32"].valid_loss
    found = []
    for precision, result in results.items():
        if precision != "fp32":
            holds = abs(result.valid_loss / base - 1) <= BOUND
            said = f"the loss of {precision} is within {BOUND:.0%} of fp32's: {result.valid_loss / base - 1:+.2%}"
            found.append((holds, f"- {'holds' if holds else 'DOES NOT HOLD'}: {said}"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    settings = from_yaml((ROOT / SETTINGS).read_text(encoding="utf-8"), SETTINGS)
    parser.add_argument("--steps", type=int, default=settings.training.train_iters, help="of each run (%(default)s)")
    parser.add_argument("--ranks", type=int, default=8, help="processes, a multiple of 4 (%(default)s)")
    parser.add_argument("--data-path", help="prefix of token files of at most 1,024 ids; by default Python's library")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        data = options.data_path or make_corpus(directory)
        results = {}
        for precision in PRECISIONS:
            print(f"{precision} …", file=sys.stderr, flush=True)
            results[precision] = train(precision, options, data, directory)
    print(f"{options.steps} steps of {SETTINGS} on {options.ranks} ranks.\n")
    print("\n".join(table(results)))
    said = verdicts(results)
    print("\n" + "\n".join(text for _, text in said))
    if not all(holds for holds, _ in said):
        sys.exit(1)


if __name__ == "__main__":
    main()
