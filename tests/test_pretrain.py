"""The front door, end to end: whole runs of pretrain_deepseek.py as processes, two ranks without a launcher between.

Ranks are started by hand with torchrun's variables, so that a test sees each rank's own output and exit code.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.indexed import IndexedWriter, bin_path
from parallel.pipeline.make import make_schedule
from parallel.pipeline.measured import read_measured
from tests.training.test_failures import hear_interrupts

ROOT = Path(__file__).parent.parent
VOCABULARY = 97
SETTINGS = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2
)
FLAGS = [
    *("--seq-length", "16", "--micro-batch-size", "1", "--global-batch-size", "4", "--split", "80,20,0"),
    *("--train-iters", "4", "--eval-iters", "1", "--eval-interval", "2", "--save-interval", "2", "--lr", "1e-3"),
    *("--log-interval", "1", "--bigram-baseline"),
]
# Runs the front door, as it runs itself, with something put in its way on one rank: FAULT is executed before it.
FAULTY = """
import os, sys
exec(os.environ['FAULT'])
import pretrain_deepseek
pretrain_deepseek.main()
pretrain_deepseek.leave()
"""
STEP_FAULT = """
from training.engine import Engine
train_step, done = Engine.train_step, []
def faulty(self, *args):
    done.append(1)
    if self.mesh.rank == 1 and len(done) == 2:
        {what}
    return train_step(self, *args)
Engine.train_step = faulty
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model's config.json and token files."""
    directory = tmp_path_factory.mktemp("pretrain")
    config = json.loads((ROOT / "configs/models/tiny_v3.json").read_text()) | SETTINGS
    (directory / "config.json").write_text(json.dumps(config))
    generator = np.random.default_rng(0)
    with IndexedWriter(directory / "text", vocab_size=VOCABULARY) as writer:
        for _ in range(50):
            writer.add_document(generator.integers(0, VOCABULARY, 60))
    return directory


class Ranks:
    """Processes of one run."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def start(
        self, workplace: Path, *flags: str, world: int = 2, fault: str = "", differ: tuple[str, ...] = ()
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = ["--model", str(workplace / "config.json"), "--data-path", str(workplace / "text"), *FLAGS, *flags]
        for rank in range(world):
            program = [sys.executable, "-c", FAULTY] if fault else [sys.executable, str(ROOT / "pretrain_deepseek.py")]
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "PYTHONPATH": str(ROOT),
                "FAULT": fault,
            }
            command = [*program, *common, *(differ if rank == 1 else ())]
            self.processes.append(
                subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=environment,
                    preexec_fn=hear_interrupts,
                )
            )

    def finish(self) -> list[tuple[int, str, str]]:
        """Exit code, stdout and stderr of every rank."""
        ended = [(process, *process.communicate(timeout=120)) for process in self.processes]
        self.processes = []
        return [(process.returncode, out, err) for process, out, err in ended]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    for process in ranks.processes:
        process.kill()
        process.communicate()


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_leaves_everything_resumes_to_the_same_losses_and_refuses_to_overwrite(
    workplace: Path, ranks: Ranks
) -> None:
    tp2 = ("--tensor-model-parallel-size", "2")
    straight, halved = workplace / "straight", workplace / "halved"
    ranks.start(workplace, *tp2, "--run-dir", str(straight))
    for code, out, err in ranks.finish():
        assert code == 0, out + err
    assert {path.name for path in straight.iterdir()} >= {
        "config.yaml",
        "metrics.jsonl",
        "checkpoints",
        "tensorboard",
        "logs",
    }
    assert sorted(path.name for path in (straight / "checkpoints").iterdir()) == ["step_00000002", "step_00000004"]
    assert sorted(path.name for path in (straight / "logs").iterdir()) == ["rank_00000.jsonl", "rank_00001.jsonl"]
    assert list((straight / "tensorboard").glob("events*"))
    metrics = lines_of(straight / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    wanted = {"loss", "mtp_loss", "aux_loss", "lr", "grad_norm", "tokens", "step_seconds", "tokens_per_second"}
    wanted |= {"grad_reduce_exposed_seconds", "expert_max_violation"}
    assert all(wanted <= line.keys() and line["sent_bytes"]["tp"] > 0 for line in metrics)
    assert {"valid_loss", "bigram_loss"} <= metrics[1].keys() and "valid_loss" in metrics[3]
    assert metrics[-1]["tokens"] == 4 * 4 * 16

    # The same run, stopped after two steps and resumed as a data-parallel one of two ranks without tensor parallelism.
    (halved / "checkpoints").mkdir(parents=True)
    os.symlink(straight / "checkpoints" / "step_00000002", halved / "checkpoints" / "step_00000002")
    ranks.start(workplace, "--run-dir", str(halved), "--resume")
    for code, out, err in ranks.finish():
        assert code == 0, out + err
    for resumed, before in zip(lines_of(halved / "metrics.jsonl"), metrics[2:], strict=True):
        assert resumed["step"] == before["step"] and resumed["lr"] == before["lr"]
        assert resumed["loss"] == pytest.approx(before["loss"], rel=1e-5)

    ranks.start(workplace, *tp2, "--run-dir", str(straight))
    ended = ranks.finish()
    assert [code for code, _, _ in ended] == [2, 2]
    assert "--resume" in ended[0][2] and "--overwrite" in ended[0][2]
    assert lines_of(straight / "metrics.jsonl") == metrics


def test_a_run_that_mostly_waits_for_the_reduction_says_so_once(workplace: Path, ranks: Ranks) -> None:
    waits = """
from parallel.gradients import GradientReducer
GradientReducer.exposed_seconds = property(lambda self: 1e6)
"""
    directory = workplace / "waits"
    ranks.start(workplace, "--train-iters", "9", "--save-interval", "9", "--run-dir", str(directory), fault=waits)
    (code, _, shown), (other, _, silent) = ranks.finish()
    assert code == other == 0, shown + silent
    said = "waiting for the gradient reduction took"
    assert shown.count(said) == 1 and said not in silent
    assert "1 message of" in shown and "raise --global-batch-size (4 now, 2 micro-batches a rank)" in shown
    assert [line["grad_reduce_exposed_seconds"] for line in lines_of(directory / "metrics.jsonl")] == [1e6] * 9


def test_ranks_with_other_flags_are_told_so_before_they_wait_for_each_other(workplace: Path, ranks: Ranks) -> None:
    ranks.start(workplace, "--run-dir", str(workplace / "disagree"), differ=("--seed", "5", "--lr", "0.5"))
    ended = ranks.finish()
    assert [code for code, _, _ in ended] == [2, 2]
    assert "ranks disagree on --seed: 1234 on rank 0" in ended[0][2] and "5 on rank 1" in ended[0][2]
    assert "--lr" in ended[0][2]


def test_a_profiled_pipeline_leaves_what_was_measured_beside_its_simulation(workplace: Path, ranks: Ranks) -> None:
    run = workplace / "profiled"
    flags = ("--pipeline-model-parallel-size", "2", "--pipeline-schedule", "zb-h1", "--profile-pipeline")
    flags += ("--pipeline-layers", "1,1", "--train-iters", "2", "--no-bigram-baseline", "--run-dir", str(run))
    ranks.start(workplace, *flags)
    (code, _, err), (other, _, err_1) = ranks.finish()
    assert (code, other) == (0, 0), err + err_1
    # The last step of a run that is shorter than five.
    told = re.search(r"pipeline of step 2: idle ([\d.]+)% measured, ([\d.]+)% simulated with the same times; see", err)
    assert told is not None and "pipeline of step" not in err_1
    files = {file.name for file in (run / "pipeline").iterdir()}
    assert files == {f"step_00002.{end}" for end in ("json", "trace.json", "txt", "png")}
    measured = read_measured(run).timeline
    assert f"{measured.idle_share:.1%}" == f"{told[1]}%" and measured.schedule == make_schedule("zb-h1", 2, 4)
    drawn = (run / "pipeline" / "step_00002.txt").read_text()
    assert re.search("zb-h1, step 2 measured, clocks within [0-9.]+ ms: 2 ranks", drawn)
    stages = "stages: 0 on pipeline rank 0: embedding, layer 0 | 1 on pipeline rank 1: layer 1, head, 1 MTP layer"
    assert drawn.endswith(f"\n{stages}\n") and stages in err and stages not in err_1
    assert f"idle {told[2]}% (within" in drawn.split("simulated:")[1]


@pytest.mark.parametrize("launcher", ["torch.distributed.launch", "torch.distributed.run"])
def test_any_launcher_will_do(workplace: Path, tmp_path: Path, launcher: str) -> None:
    # Plain variables, without a launcher, are what all the other tests here use.
    common = ["--model", str(workplace / "config.json"), "--data-path", str(workplace / "text"), *FLAGS]
    flags = [*common, "--train-iters", "1", "--eval-iters", "0", "--no-bigram-baseline", "--run-dir", str(tmp_path)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", launcher, "--nproc-per-node", "2", "--master-port", str(port)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(ROOT / "pretrain_deepseek.py"), *flags],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["step"] for line in lines_of(tmp_path / "metrics.jsonl")] == [1]
    assert len(list((tmp_path / "logs").glob("rank_*.jsonl"))) == 2


def test_a_flag_that_is_wrong_on_one_rank_only_ends_the_others_with_its_message(workplace: Path, ranks: Ranks) -> None:
    ranks.start(workplace, "--run-dir", str(workplace / "one_rank"), differ=("--seed", "-1"))
    (code_0, _, err_0), (code_1, _, err_1) = ranks.finish()
    assert (code_0, code_1) == (2, 2)
    assert err_1 == "error: --seed -1 must not be negative\n"
    assert f"rank 1 on {socket.gethostname()} failed before joining: --seed -1 must not be negative" in err_0


def test_a_rank_that_raises_ends_the_run_within_seconds(workplace: Path, ranks: Ranks) -> None:
    run = workplace / "raises"
    ranks.start(workplace, "--run-dir", str(run), fault=STEP_FAULT.format(what="raise ValueError('shard 7 is torn')"))
    ranks.processes[1].wait(timeout=120)
    failed = time.monotonic()
    (code_0, _, _), (code_1, _, err_1) = ranks.finish()
    assert time.monotonic() - failed < 6
    assert code_0 != 0 and code_1 == 1
    assert err_1.strip().splitlines()[-1] == "ValueError: shard 7 is torn"
    record = json.loads((run / "logs" / "error_rank_00001.json").read_text())
    assert record["message"] == "ValueError: shard 7 is torn" and not record["cascade"]


def test_a_killed_rank_ends_the_others_within_seconds(workplace: Path, ranks: Ranks) -> None:
    what = "os.kill(os.getpid(), 9)"
    ranks.start(workplace, "--run-dir", str(workplace / "killed"), fault=STEP_FAULT.format(what=what))
    ranks.processes[1].wait(timeout=120)
    failed = time.monotonic()
    (code_0, _, err_0), (code_1, _, _) = ranks.finish()
    assert time.monotonic() - failed < 6
    assert code_1 == -signal.SIGKILL and code_0 != 0
    assert "another rank has gone" in err_0


def test_ctrl_c_ends_every_rank_with_one_line(workplace: Path, ranks: Ranks) -> None:
    run = workplace / "interrupted"
    ranks.start(workplace, "--run-dir", str(run), "--train-iters", "100000", "--no-bigram-baseline")
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or len(lines_of(run / "metrics.jsonl")) < 2:
        assert time.monotonic() < deadline, "the run never started"
        time.sleep(0.1)
    for process in ranks.processes:
        process.send_signal(signal.SIGINT)
    ended = ranks.finish()
    assert [code for code, _, _ in ended] == [130, 130]
    shown = "".join(err for _, _, err in ended)
    assert shown.count("interrupted by Ctrl-C") == 1 and "Traceback" not in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tensor-model-parallel-size", "3"), "2 ranks can't be laid out as tensor 3"),
        (("--pipeline-model-parallel-size", "2", "--pipeline-layers", "2,1"), "3 layers"),
        (("--global-batch-size", "3"), "global-batch-size 3"),
        (("--distributed-backend", "nccl"), "nccl"),
        (("--lerning-rate", "1"), "--lerning-rate"),
    ],
    ids=["world size", "layers", "batch", "nccl without a GPU", "unknown flag"],
)
def test_bad_flags_are_refused_by_name_at_once(workplace: Path, flags: tuple[str, ...], message: str) -> None:
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    common = ["--model", str(workplace / "config.json"), "--data-path", str(workplace / "text"), *FLAGS]
    command = [sys.executable, str(ROOT / "pretrain_deepseek.py"), *common, "--run-dir", str(workplace / "r"), *flags]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert ended.returncode == 2
    assert message in ended.stderr and "Traceback" not in ended.stderr
    assert not (workplace / "r").exists()


def test_damaged_or_foreign_data_is_refused_naming_the_place(workplace: Path, ranks: Ranks, tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "large", vocab_size=5000) as writer:
        for document in range(20):
            writer.add_document(np.full(60, 4000 if document == 13 else 3))
    with IndexedWriter(tmp_path / "torn", vocab_size=VOCABULARY) as writer:
        writer.add_document(np.arange(60))
    with bin_path(tmp_path / "torn").open("r+b") as file:
        file.truncate(50)
    for prefix, messages in (("large", ("document 13", "4000", str(VOCABULARY))), ("torn", ("120", "50"))):
        ranks.start(workplace, "--run-dir", str(tmp_path / "run"), "--data-path", str(tmp_path / prefix), world=1)
        ((code, _, err),) = ranks.finish()
        assert code == 2 and "Traceback" not in err, err
        for message in messages:
            assert message in err
