"""Runs that compress: resumed bit for bit, told what doesn't fit, told what runs; and two steps on Triton's kernels."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernels.backend import IMPLEMENTATIONS, forced
from parallel.mesh import Layout
from tests.layouts import Job, train
from tests.test_pretrain import Ranks, lines_of, ranks, workplace  # noqa: F401 (fixtures)
from tests.training.test_grad_compression import batches_of, differing, engine_of, job, state_of
from training import checkpoint
from training.failures import ConfigurationError
from training.residuals import DIRECTORY

ROOT = Path(__file__).parents[2]


def straight_and_resumed(codecs: list[str], directory: str, steps: int) -> list[dict[str, Any]]:
    """On each rank: `steps` steps with a save in the middle, beside an engine that loads it and goes on."""
    found = []
    for codec in codecs:
        asked, half = job(codec), steps // 2
        engine, losses = engine_of(asked), []
        for step in range(steps):
            if step == half:
                position = checkpoint.Position(half, half * asked.global_batch)
                path = checkpoint.save(engine, Path(directory) / codec, position, "")
            losses.append(engine.train_step(batches_of(asked, engine, step), 1e-3).losses)
        other = engine_of(asked)
        checkpoint.load(other, path)
        resumed = [other.train_step(batches_of(asked, other, step), 1e-3).losses for step in range(half, steps)]
        ours = state_of(engine)
        found.append(
            {
                "losses": losses[half:] == resumed,
                "differing": differing(ours, state_of(other)),
                "residuals": sum(name.startswith("residual") and bool(x.any()) for name, x in ours.items()),
                "steps": (engine.steps_done, other.steps_done),
            }
        )
    return found


@pytest.mark.parametrize(
    ("codecs", "steps"),
    [
        (["int8", "1bit", "topk", "powersgd"], 10),
        pytest.param(["none", "bf16", "fp8", "int4"], 10, marks=pytest.mark.full),
    ],
)
def test_ten_steps_equal_five_saved_loaded_and_five_more(
    run_ranks: Callable[..., Any], tmp_path: Path, codecs: list[str], steps: int
) -> None:
    for rank in run_ranks(2, straight_and_resumed, codecs, str(tmp_path), steps):
        for codec, found in zip(codecs, rank, strict=True):
            assert found["losses"] and found["differing"] == [], codec
            assert (found["residuals"] > 0) == (codec not in ("none", "bf16")), codec
            assert found["steps"] == (steps, steps)


class Heard(logging.Handler):
    """The lines of one logger."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger(name).addHandler(self)
        logging.getLogger(name).setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def saved_and_loaded_elsewhere(saved: Job, others: list[Job], directory: str) -> list[dict[str, Any]]:
    """Two steps of `saved`; then what each of the others is told on loading them, and keeps of residuals."""
    engine = engine_of(saved)
    for step in range(2):
        engine.train_step(batches_of(saved, engine, step), 1e-3)
    path = checkpoint.save(engine, Path(directory), checkpoint.Position(2, 8), "")
    heard, found = Heard("training.residuals"), []
    for asked in others:
        heard.lines.clear()
        other = engine_of(asked)
        for residual in other.reducer.residuals().values():
            residual.fill_(1)
        checkpoint.load(other, path)
        kept = {name: bool(x.any()) for name, x in other.reducer.residuals().items()}
        same = asked.layout == saved.layout and not differing(
            {name: x for name, x in state_of(engine).items() if not name.startswith("residual")},
            {name: x for name, x in state_of(other).items() if not name.startswith("residual")},
        )
        finite = other.train_step(batches_of(asked, other, 2), 1e-3).taken
        found.append({"lines": list(heard.lines), "kept": any(kept.values()), "same": same, "finite": finite})
    return found


def test_residuals_of_another_layout_or_codec_start_at_zero_and_the_log_names_both(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    saved = job("int8")
    cases = {
        "the same": (job("int8", flags={"grad_compression_decay": 0.9, "grad_compression_block_size": 256}), None),
        "layout": (job("int8", Layout(tp=2)), ["layout dp 2 there, tp 2 here"]),
        "codec": (job("int4"), ["codec int8 there, int4 here", "block_size 256 there, 64 here"]),
        "numbers": (job("int8", flags={"grad_compression_residual": "bf16"}), ["residual fp32 there, bf16 here"]),
        "buckets": (
            job("int8", flags={"bucket_cap_mb": 0.1}),
            ["second shots start at zero: buckets are cut otherwise"],
        ),
        "none": (job("none"), ["holds residuals of int8 on dp 2; this run doesn't compress and leaves them"]),
    }
    others = [asked for asked, _ in cases.values()]
    for rank in run_ranks(2, saved_and_loaded_elsewhere, saved, others, str(tmp_path / "int8")):
        for (name, (_, parts)), found in zip(cases.items(), rank, strict=True):
            assert found["finite"] and found["same"] == (name != "layout"), name
            assert found["kept"] == (parts is None or name == "buckets"), name
            assert len(found["lines"]) == (0 if parts is None else 1), found["lines"]
            assert not [part for part in parts or () if part not in found["lines"][0]], found["lines"]
    step = tmp_path / "int8" / "step_00000002"
    files = sorted((step / DIRECTORY).iterdir())
    assert [file.name for file in files] == ["rank_00000.safetensors", "rank_00001.safetensors"]
    modes = {file.stat().st_mode for file in (*files, step / "meta.json")}
    assert len(modes) == 1, "whoever may read a checkpoint may read all of it"
    plain = job("none")
    for rank in run_ranks(2, saved_and_loaded_elsewhere, plain, [job("1bit"), plain], str(tmp_path / "none")):
        assert ["none were saved" in line for line in rank[0]["lines"]] == [True] and rank[1]["lines"] == []
        assert not rank[0]["kept"]


def load_damaged(asked: Job, directory: str) -> str:
    engine = engine_of(asked)
    engine.train_step(batches_of(asked, engine, 0), 1e-3)
    path = checkpoint.save(engine, Path(directory), checkpoint.Position(1, 4), "")
    mine = path / DIRECTORY / f"rank_{engine.mesh.rank:05d}.safetensors"
    mine.write_bytes(mine.read_bytes()[:-3])
    with pytest.raises(ConfigurationError) as caught:
        checkpoint.load(engine, path)
    return str(caught.value)


def test_a_damaged_file_of_residuals_is_named(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    for told in run_ranks(2, load_damaged, job("int8"), str(tmp_path)):
        assert "rank_0000" in told and "can't be read" in told and f"remove {tmp_path}" in told


def test_a_run_tells_what_is_compressed_by_which_kernels_and_goes_on_after_a_resume(
    ranks: Ranks,  # noqa: F811
    workplace: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    flags = ["--run-dir", str(run), "--grad-compression", "int8", "--grad-compression-warmup-steps", "1"]
    ranks.start(workplace, *flags, "--kernels", "torch", "--train-iters", "2")
    for code, _, err in ranks.finish():
        assert code == 0, err
    first = lines_of(run / "logs" / "rank_00000.jsonl")
    messages = [line["message"] for line in first]
    assert "kernel quantize on cpu: torch" in messages and "kernel decode_sum_encode on cpu: torch" in messages
    (told,) = [text for text in messages if "travel as int8 in blocks of 256, residual fp32" in text]
    assert "1 of embedding" in told and "2 of router" in told and "of vector" in told
    steps = lines_of(run / "metrics.jsonl")
    assert [step["grad_compression_ratio"] > 1 for step in steps] == [False, True]
    assert steps[0]["grad_sent_bytes"] > 1.5 * steps[1]["grad_sent_bytes"]
    assert 0 < steps[1]["grad_compression_error"] < 0.1
    for name in ("grad_encode_seconds", "grad_wire_seconds", "grad_decode_seconds"):
        assert steps[0][name] == 0 < steps[1][name]
    ranks.start(workplace, *flags, "--resume", "--train-iters", "4", "--lr", "1e20")
    resumed = ranks.finish()
    assert all(code == 1 for code, _, _ in resumed)
    assert "the step was not taken, parameters and optimizer are as they were before it; resume from" in resumed[0][2]
    assert "step_00000002 with a lower --lr than" in resumed[0][2]
    lines = [line["message"] for line in lines_of(run / "logs" / "rank_00000.jsonl")[len(first) :]]
    assert any("loaded" in line and "2 steps" in line for line in lines)
    assert not [line for line in lines if "start at zero" in line]


LEAST = dict(vocab_size=61, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1)
LEAST |= dict(num_nextn_predict_layers=0, first_k_dense_replace=0, q_lora_rank=24, kv_lora_rank=16, v_head_dim=16)
LEAST |= dict(num_attention_heads=2, qk_nope_head_dim=16, qk_rope_head_dim=8)
INTERPRETED = """
import json, sys
import torch
from parallel.launch import destroy, init_distributed
from tests.training.test_grad_compression_resume import two_steps
torch.set_num_threads(1)  # as the ranks of a test have
init_distributed("gloo", 2.0, 60.0)
print(json.dumps(two_steps(sys.argv[1], "triton")))
destroy()
"""


def two_steps(codec: str, kernels: str) -> list[Any]:
    """Losses and norms, on a rank."""
    with forced(kernels):
        curve = train(job(codec, overrides=LEAST, length=8, lr=1e-2))
    return [curve.losses, curve.norms]


def interpreted(codec: str) -> list[Any]:
    """`two_steps` on two ranks, processes of their own, since Triton asks for its interpreter when it is imported."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "TRITON_INTERPRET": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", INTERPRETED, codec],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        ended = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), ended
    told = [json.loads(out.splitlines()[-1]) for out, _ in ended]
    assert told[0] == told[1]
    return told[0]


@pytest.mark.parametrize(
    "codec", ["int8", *(pytest.param(name, marks=pytest.mark.full) for name in ("bf16", "fp8", "int4", "1bit", "topk"))]
)
def test_two_steps_on_tritons_kernels_give_the_reference_loss(run_ranks: Callable[..., Any], codec: str) -> None:
    pytest.importorskip("triton")
    if "triton" not in IMPLEMENTATIONS["quantize"]:
        pytest.skip("no Triton kernels are entered")
    reference, found = run_ranks(2, two_steps, codec, "torch")[0], interpreted(codec)
    assert found[0][1]["lm"] < found[0][0]["lm"]
    if codec == "1bit":  # its scale is a sum, in an order of the kernel's own
        for one, other in zip(reference[0], found[0], strict=True):
            assert other == pytest.approx(one, rel=1e-5)
    else:
        assert found == reference
