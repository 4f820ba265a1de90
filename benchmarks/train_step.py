"""Time of one training step beside transformers and megatron-core: the same model, weights, tokens and optimizer.

    python -m benchmarks.train_step [--rounds 16]

On CPU, one thread a rank. All contenders are started first; then each does one step, in turn, round after round, so
that whatever else the machine does hits all alike. Prints a Markdown table of medians. Ends with an error where a
contender's first loss isn't that of the others.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from benchmarks.contenders import common

ROOT = Path(__file__).resolve().parent.parent
PEERS = {
    "transformers_model": "transformers",
    "megatron_core": "megatron-core (CPU shim, local spec)",
    "ours": "this project",
}
LAYOUTS: dict[str, dict[str, int]] = {
    "one rank": {},
    "TP2": {"TP": 2},
    "PP2": {"PP": 2},
    "DP2": {"DP": 2},
    "EP2": {"EP": 2},  # the ranks share experts and are data parallel in all else
}
LEAST = {("megatron_core", "EP2"): 1.3}
"""How many times as long as ours a peer's step must take; else the program ends with status 1."""
CHECKED_STEPS = 3
TOLERANCE = 1e-5
"""Largest relative difference of the first loss. Rounding gives some 1e-7; another model gives 1e-2."""


@dataclass
class Contender:
    """A peer on a layout: its processes, and what it answered in each round."""

    peer: str
    layout: str
    processes: list[subprocess.Popen[str]]
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def step(self, number: int) -> None:
        for process in self.processes:
            print(number, file=_pipe(process.stdin), flush=True)
        answers = [self._answer(process) for process in self.processes]
        self.seconds.append(max(answer["seconds"] for answer in answers))
        self.losses.append(next(answer["loss"] for answer in answers if answer["loss"] is not None))

    def wait_until_ready(self) -> None:
        for process in self.processes:
            self._answer(process)

    def _answer(self, process: subprocess.Popen[str]) -> dict:
        line = _pipe(process.stdout).readline()
        if not line:
            raise SystemExit(f"{self.peer} on {self.layout} ended with exit code {process.wait()}; see above")
        return json.loads(line)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


@contextmanager
def contender(peer: str, layout: str, directory: Path) -> Iterator[Contender]:
    """Its processes, one a rank; ended on leaving."""
    world = math.prod(LAYOUTS[layout].values())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": 1}
    variables |= {"WORLD_SIZE": world, **LAYOUTS[layout]}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.contenders.{peer}", str(directory)],
            cwd=ROOT,
            env=os.environ | {name: str(value) for name, value in (variables | {"RANK": rank}).items()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        yield Contender(peer, layout, processes)
    finally:
        for process in processes:
            _pipe(process.stdin).close()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def check_losses(contenders: list[Contender]) -> list[str]:
    """A line on how far losses are from the first contender's: before any update, and after the first updates.

    Exits where the first loss differs: that is another model. Later ones also show how gradients were summed.
    """
    reference, texts = contenders[0], []
    for step in range(CHECKED_STEPS):
        differences = {f"{c.peer} {c.layout}": abs(c.losses[step] / reference.losses[step] - 1) for c in contenders}
        worst = max(differences, key=differences.__getitem__)
        texts.append(f"{differences[worst]:.1e} ({worst})")
        if step == 0 and differences[worst] > TOLERANCE:
            raise SystemExit(f"the loss of {worst} differs by {texts[0]}: that isn't the same model")
    return texts


def ratio_to_ours(one: Contender, ours: Contender) -> float:
    """How many times as long its steps take: the median over rounds."""
    pairs = zip(one.seconds[CHECKED_STEPS:], ours.seconds[CHECKED_STEPS:], strict=True)
    return statistics.median(theirs / own for theirs, own in pairs)


def verdicts(contenders: list[Contender]) -> list[tuple[bool, str]]:
    """Whether each of `LEAST` that was measured holds, and the line that says so."""
    by_name = {(one.peer, one.layout): one for one in contenders}
    found = []
    for (peer, layout), least in LEAST.items():
        if (peer, layout) in by_name:
            ratio = ratio_to_ours(by_name[peer, layout], by_name["ours", layout])
            what = f"{PEERS[peer]} on {layout} takes at least {least} times as long: {ratio:.2f}"
            found.append((ratio >= least, f"- {'holds' if ratio >= least else 'DOES NOT HOLD'}: {what}"))
    return found


def table(contenders: list[Contender]) -> list[str]:
    """Rows of a Markdown table: median milliseconds of a step, and in brackets the median ratio to ours in a round."""
    ours = {c.layout: c for c in contenders if c.peer == "ours"}
    lines = ["| | " + " | ".join(LAYOUTS) + " |", "|---" * (1 + len(LAYOUTS)) + "|"]
    for peer, name in PEERS.items():
        cells = []
        for layout in LAYOUTS:
            found = [c for c in contenders if (c.peer, c.layout) == (peer, layout)]
            if not found:
                cells.append("")
                continue
            milliseconds = 1e3 * statistics.median(found[0].seconds[CHECKED_STEPS:])
            ratio = ratio_to_ours(found[0], ours[layout])
            cells.append(f"{milliseconds:.0f} ms" + ("" if peer == "ours" else f" ({ratio:.2f}×)"))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16, help="measured steps of each contender")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="some of: %(default)s")
    parser.add_argument("--peers", default=",".join(PEERS), help="some of: %(default)s; ours is always one")
    options = parser.parse_args()
    chosen = [
        (peer, layout)
        for layout in options.layouts.split(",")
        for peer in PEERS
        if peer in (*options.peers.split(","), "ours")
        and not (peer == "transformers_model" and layout in ("TP2", "PP2", "EP2"))
    ]
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        common.write_weights(Path(directory), seed=0)
        contenders = [stack.enter_context(contender(peer, layout, Path(directory))) for peer, layout in chosen]
        for one in contenders:
            one.wait_until_ready()
        for step in range(CHECKED_STEPS + options.rounds):
            for one in contenders:
                one.step(step)
            print(f"\rround {step + 1} of {CHECKED_STEPS + options.rounds}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        differences = check_losses(contenders)
    print(f"A step of {common.TOKENS:,} tokens, one thread a rank, median of {options.rounds}; in brackets over ours.")
    print(f"Largest relative difference of the losses in steps 1 to {CHECKED_STEPS}: {', '.join(differences)}.\n")
    print("\n".join(table(contenders)))
    said = verdicts(contenders)
    print("\n" + "\n".join(text for _, text in said))
    if not all(holds for holds, _ in said):
        sys.exit(1)


if __name__ == "__main__":
    main()
