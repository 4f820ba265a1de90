"""The front door with a file of DeepSpeed's: its ranks end well, say nothing of DeepSpeed, and leave every step."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data.indexed import IndexedWriter

ROOT = Path(__file__).parent.parent.parent
VOCABULARY, STEPS = 97, 4
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
}
FLAGS = [
    *("--seq-length", "16", "--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", str(STEPS)),
    *("--eval-iters", "1", "--split", "80,20,0", "--lr", "1e-3", "--log-interval", "1"),
]
OFFLOADED = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
}


@pytest.mark.full
def test_stage_3_with_everything_offloaded_runs_as_the_file_says_and_the_terminal_is_ours(tmp_path: Path) -> None:
    config = json.loads((ROOT / "configs/models/tiny_v3.json").read_text()) | SMALL
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "deepspeed.json").write_text(json.dumps(OFFLOADED))
    generator = np.random.default_rng()
    with IndexedWriter(tmp_path / "text", vocab_size=VOCABULARY) as writer:
        for _ in range(50):
            writer.add_document(generator.integers(0, VOCABULARY, 60))
    run = tmp_path / "run"
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(ROOT / "pretrain_deepseek.py"), "--model", str(tmp_path / "config.json")),
            *("--data-path", str(tmp_path / "text"), "--run-dir", str(run), *FLAGS),
            *("--deepspeed-config", str(tmp_path / "deepspeed.json")),
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert metrics[-1]["loss"] < metrics[0]["loss"] + 0.1 and all(line["grad_norm"] > 0 for line in metrics)
    # Of DeepSpeed only what this project says of compiling it; none of its own lines, nor torch's warnings of it.
    lines = [line for line in said.splitlines() if not re.match(r"(compil|waiting for).* DeepSpeed's ", line)]
    stray = [line for line in lines if re.search(r"deepspeed|\[INFO\]|\[WARNING\]|Warning|ninja|c10d", line, re.I)]
    assert not stray, said
    assert [line for line in lines if line.startswith("step ")] and len(lines) < 40, said
