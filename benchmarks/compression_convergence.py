"""Validation loss of the tiny V3 under every kind of gradient compression, with error feedback and without.

Lives here: the command, its runs, table, verdict and picture; `compression_convergence_rank.py` trains. Ranks are
processes of this machine. May import every room; matplotlib for the picture. Prints Markdown.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODEL = "configs/models/tiny_v3.json"
CODECS: dict[str, dict[str, Any]] = {
    "bf16": {"grad_compression": "bf16"},
    "fp8": {"grad_compression": "fp8"},
    "int8": {"grad_compression": "int8"},
    "int4": {"grad_compression": "int4"},
    "powersgd": {"grad_compression": "powersgd", "grad_compression_rank": 8},
    "1bit": {"grad_compression": "1bit"},
    "topk": {"grad_compression": "topk", "grad_compression_density": 0.01},
}
NAMES = {"powersgd": "PowerSGD rank 8", "topk": "top 1 %", "1bit": "1 bit"}
BOUND = {"bf16": 0.5, "fp8": 0.5, "int8": 0.5, "int4": 2.0, "powersgd": 2.0, "1bit": 5.0, "topk": 8.0}
"""Percent by which the final loss may lie above that without compression."""
LOSSY = ("powersgd", "1bit", "topk")
"""Whose final loss must be lower with feedback; what it gives the others, int4 too, is below a loss's noise."""
CLEARLY = 0.5
"""With feedback, the accumulated gradient's error must be at most this part of that without."""
LEAST_FALL = 1.0
"""Nats by which the loss must fall without compression, for a difference to mean anything."""
SEEDS = 3


@dataclass(frozen=True)
class Run:
    """One training run. codec: "none" or of CODECS; layout: tp, pp, ep."""

    codec: str = "none"
    feedback: bool = True
    layout: tuple[int, int, int] = (1, 1, 1)
    ranks: int = 4
    seed: int = 1

    @property
    def where(self) -> str:
        tp, pp, ep = self.layout
        sizes = {"EP": ep, "TP": tp, "PP": pp, "DP": self.ranks // (tp * pp)}
        return "·".join(f"{name}{size}" for name, size in sizes.items() if size > 1)

    @property
    def kind(self) -> str:
        """Codec and feedback."""
        return self.codec if self.codec == "none" or self.feedback else f"{self.codec} without feedback"

    @property
    def base(self) -> Run:
        """The same without compression."""
        return Run(layout=self.layout, ranks=self.ranks, seed=self.seed)


def runs() -> list[Run]:
    """All of them, those that say most first."""
    layouts = {(2, 1, 2): 4, (2, 2, 1): 8}
    return [
        Run(),
        *(Run(codec) for codec in CODECS),
        *(Run(codec, feedback=False) for codec in CODECS),
        *(Run(seed=seed) for seed in range(2, SEEDS + 1)),
        *(Run(codec, layout=layout, ranks=ranks) for layout, ranks in layouts.items() for codec in ("none", "int8")),
    ]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compression_convergence",
        description="Trains the tiny V3 without compression and with every codec, with error feedback and without, on "
        "four data-parallel ranks, and with int8 on two other layouts. Status 1: a final loss is out of its bound, or "
        "error feedback doesn't help.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data-path", help="prefix of token files of at most 1,024 ids; by default Python's library")
    parser.add_argument("--results", type=Path, help="directory that keeps what is done, so that a second call goes on")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--mtp", type=int, default=1, help="depths of multi-token prediction")
    parser.add_argument("--steps", type=int, default=300, help="of each run, the first third of them in fp32")
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--global-batch-size", type=int, default=4, help="sequences of a step")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak, after a tenth of the steps")
    parser.add_argument("--eval-iters", type=int, default=64, help="global batches of the final validation loss")
    parser.add_argument("--points", type=int, default=15, help="of a curve")
    parser.add_argument("--only", nargs="+", help="kinds of run, such as int8; with the uncompressed one they need")
    parser.add_argument("--picture", type=Path, help="file for the curves; needs matplotlib")
    return parser.parse_args(arguments)


def flags(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """Of the command line, by name, but for what lies in a directory: model and data."""
    tp, pp, ep = run.layout
    chosen: dict[str, Any] = dict(CODECS.get(run.codec, {}))
    if chosen:
        chosen["grad_compression_warmup_steps"] = options.steps // 3
        chosen["grad_compression_residual"] = "fp32" if run.feedback else "none"
    return chosen | {
        "seed": run.seed,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "train_iters": options.steps,
        "eval_iters": options.eval_iters,
        "seq_length": options.seq_length,
        "micro_batch_size": options.micro_batch_size,
        "global_batch_size": options.global_batch_size,
        "lr": options.lr,
        "lr_warmup_iters": options.steps // 10,
        "overlap_grad_reduce": False,  # the exact sum is taken of what isn't summed yet
    }


def make_model(directory: Path, options: argparse.Namespace) -> str:
    """The tiny V3's configuration, as deep as asked for: its file."""
    config = json.loads((ROOT / MODEL).read_text())
    config |= {"num_hidden_layers": options.layers, "num_nextn_predict_layers": options.mtp}
    path = directory / f"tiny_v3_{options.layers}_{options.mtp}.json"
    path.write_text(json.dumps(config))
    return str(path)


def make_corpus(directory: Path) -> str:
    """Python's standard library as token files, as the default run has it: their prefix."""
    from data.corpus import build_corpus
    from data.preprocess import preprocess, read_documents
    from data.tokenizer import train_sentencepiece

    corpus, tokenizer = directory / "corpus.jsonl", directory / "tokenizer.model"
    build_corpus(corpus)
    vocabulary = json.loads((ROOT / MODEL).read_text())["vocab_size"]
    train_sentencepiece((texts[0] for texts, _ in read_documents([corpus])), vocabulary, tokenizer)
    return str(preprocess([str(corpus)], str(directory / "corpus"), str(tokenizer))[0].prefix)


def train(wanted: Iterable[Run], options: argparse.Namespace, results: Path) -> dict[Run, dict[str, Any]]:
    """What each run found; those that `results` has already aren't made again. See `compression_convergence_rank`."""
    paths = {}
    for run in wanted:
        what = {"layers": options.layers, "mtp": options.mtp} | flags(run, options)  # another of these is another run
        digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:8]
        name = re.sub(r"[^a-z0-9]+", "_", f"{run.kind} {run.where} {run.seed}".lower())
        paths[run] = results / f"{name}_{digest}.json"
    if missing := [run for run, path in paths.items() if not path.exists()]:
        results.mkdir(parents=True, exist_ok=True)
        files = {"model": make_model(results, options), "data_path": [options.data_path or make_corpus(results)]}
        for ranks in dict.fromkeys(run.ranks for run in missing):
            each = [(str(paths[run]), flags(run, options) | files) for run in missing if run.ranks == ranks]
            _run_ranks(ranks, {"points": options.points, "runs": each})
    return {run: json.loads(path.read_text()) for run, path in paths.items()}


def _run_ranks(ranks: int, passed: dict[str, Any]) -> None:
    """Raises RuntimeError where a rank fails; its error is on the terminal then."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    words = [sys.executable, "-m", "benchmarks.compression_convergence_rank", json.dumps(passed)]
    environment = os.environ | shared | {"PYTHONPATH": str(ROOT)}
    started = [subprocess.Popen(words, env=environment | {"RANK": str(rank)}) for rank in range(ranks)]
    statuses = [process.wait() for process in started]
    if any(statuses):
        raise RuntimeError(f"ranks ended with status {statuses}; the error is above")


@dataclass
class Findings:
    """All runs' results, and what is compared."""

    found: dict[Run, dict[str, Any]]
    verdicts: list[tuple[str, bool]] = field(default_factory=list)

    def loss(self, run: Run) -> float:
        return float(self.found[run]["loss"])

    def above(self, run: Run) -> float:
        """Percent by which the final loss lies above that without compression."""
        return 100 * (self.loss(run) / self.loss(run.base) - 1)

    def error(self, run: Run) -> float:
        return float(self.found[run]["accumulated_error"])

    def judge(self) -> list[tuple[str, bool]]:
        """What is checked of the runs that are there, and whether it holds."""
        checked = []
        if Run() in self.found:
            fell = self.found[Run()]["curve"][0][1] - self.loss(Run())
            words = f"the loss falls by at least {LEAST_FALL:g} nat without compression: {fell:.2f}"
            checked.append((words, fell >= LEAST_FALL))
        for run in self.found:
            if run.codec == "none" or not run.feedback:
                continue
            bound = BOUND[run.codec]
            words = f"{run.kind}, {run.where}: at most {bound:g} % above uncompressed: {self.above(run):+.2f} %"
            checked.append((words, self.above(run) <= bound))
            without = Run(run.codec, False, run.layout, run.ranks, run.seed)
            if without not in self.found:
                continue
            words = f"{run.kind}: with feedback the accumulated gradient is off by {self.error(run):.2%}, at most "
            words += f"{CLEARLY:g} of what it is without, {self.error(without):.2%}"
            checked.append((words, self.error(run) <= CLEARLY * self.error(without)))
            if run.codec in LOSSY:
                words = f"{run.kind}: the loss is lower with feedback, {self.loss(run):.4f}, than without, "
                checked.append((f"{words}{self.loss(without):.4f}", self.loss(run) < self.loss(without)))
        return checked


def table(findings: Findings) -> str:
    """Markdown."""
    lines = [
        "| Gradients | Ranks | Seed | Final validation loss | Above uncompressed | Accumulated gradient off by | "
        "Fewer bytes |",
        "|---|---|---|---|---|---|---|",
    ]
    for run, found in findings.found.items():
        above = error = ratio = ""
        if run.codec != "none":
            above, error = f"{findings.above(run):+.2f} %", f"{findings.error(run):.2%}"
            ratio = f"{found['ratio']:.1f}×"
        lines.append(
            f"| {run.kind} | {run.where} | {run.seed} | {findings.loss(run):.4f} | {above} | {error} | {ratio} |"
        )
    return "\n".join(lines) + "\n"


def draw(findings: Findings, path: Path, warm_up: int) -> None:
    """Curves of validation loss, with feedback on the left and without on the right, each named at its end."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(12, 6.5), sharey=True, layout="constrained")
    colours = dict(zip(("none", *CODECS), ("black", *pyplot.colormaps["tab10"].colors), strict=False))
    shown = [run for run in findings.found if run.layout == (1, 1, 1) and run.seed == 1]
    low = min(findings.found[run]["curve"][-1][1] for run in shown)
    high = max(loss for run in shown for step, loss in findings.found[run]["curve"] if step >= warm_up)
    for panel, feedback in zip(panels, (True, False), strict=True):
        ends = []
        for run in shown:
            if run.codec != "none" and run.feedback != feedback:
                continue
            steps, losses = zip(*findings.found[run]["curve"], strict=True)
            thick = 2.4 if run.codec == "none" else 1.4
            panel.plot(steps, losses, color=colours[run.codec], linewidth=thick)
            ends.append((losses[-1], "uncompressed" if run.codec == "none" else NAMES.get(run.codec, run.codec), run))
        last, height, least = steps[-1], high - low, 0.0
        for loss, name, run in sorted(ends, key=lambda end: end[0]):
            least = max(least, loss)  # names must not lie on each other
            panel.annotate(
                f"{name} {loss:.2f}",
                (last, loss),
                xytext=(last + 0.07 * (last - warm_up), least),
                color=colours[run.codec],
                fontsize=9,
                va="center",
                arrowprops={"arrowstyle": "-", "color": colours[run.codec], "linewidth": 0.6, "relpos": (0, 0.5)},
            )
            least += height * 0.045
        panel.axvline(warm_up, color="grey", linewidth=0.8, linestyle=":")
        panel.text(warm_up, high, " compression starts", color="grey", fontsize=9, va="top")
        panel.set_xlim(0.9 * warm_up, last + 0.45 * (last - warm_up))
        panel.set_xticks([tick for tick in panel.get_xticks() if warm_up <= tick <= last])
        panel.set_ylim(low - 0.03 * height, high + 0.1 * height)
        panel.set_xlabel("training step")
        panel.set_title("with error feedback" if feedback else "without error feedback")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("validation loss, nats a token")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    wanted = runs()
    if options.only:
        chosen = [run for run in wanted if {run.codec, run.kind} & set(options.only)]
        wanted = list(dict.fromkeys(each for run in chosen for each in (run.base, run)))
    with tempfile.TemporaryDirectory() as temporary:
        results = options.results or Path(temporary)
        findings = Findings(train(wanted, options, results))
    print(table(findings))
    bases = [findings.loss(run) for run in findings.found if run == Run(seed=run.seed)]
    if len(bases) > 1:
        spread = 100 * (max(bases) / min(bases) - 1)
        print(f"Uncompressed losses of {len(bases)} seeds, with other weights and texts, differ by {spread:.2f} %.\n")
    if options.picture is not None:
        draw(findings, options.picture, options.steps // 3)
    checked = findings.judge()
    for words, holds in checked:
        print(f"- {'holds' if holds else 'FAILS'}: {words}")
    return 0 if all(holds for _, holds in checked) else 1


if __name__ == "__main__":
    sys.exit(main())
