"""AdamW here is torch's, number for number, without what torch's own class imports; moments in bf16."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import training.optimizer
from parallel.mesh import Layout
from parallel.sharding import Sharding
from tests.training.test_grad_compression import batches_of, engine_of, job
from training import checkpoint
from training.arguments import Arguments
from training.optimizer import AdamW, Optimizer
from training.precision import DTYPES

FP32 = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
BF16 = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}


def test_adamw_is_torchs_bit_for_bit() -> None:
    seed = torch.seed()
    print(f"seed {seed}")
    ours, theirs = ([torch.empty(37, 5), torch.empty(11)] for _ in range(2))
    for one, other in zip(ours, theirs, strict=True):
        other.copy_(one.normal_())

    def groups(parameters: list[torch.Tensor]) -> list[dict]:
        return [
            {"params": parameters[:1], "weight_decay": 0.1},
            {"params": parameters[1:], "weight_decay": 0.0},
        ]

    mine = AdamW(groups(ours), 1e-3, (0.9, 0.95), 1e-8)
    reference = torch.optim.AdamW(groups(theirs), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for step in range(5):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for group in (*mine.param_groups, *reference.param_groups):
            group["lr"] = 1e-3 * (step + 1)
        mine.step()
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        for kind, value in reference.state[other].items():
            assert torch.equal(mine.state[one][kind], value)


def test_a_step_doesnt_import_what_costs_seconds() -> None:
    program = """
import sys, torch, training.trainer
from training.optimizer import AdamW
parameter = torch.ones(2)
parameter.grad = torch.ones(2)
AdamW([{"params": [parameter], "weight_decay": 0.0}], 1e-3, (0.9, 0.95), 1e-8).step()
slow = ("torch._dynamo", "sympy", "deepspeed", "torch.distributed.checkpoint")
print([name for name in slow if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("moments", [BF16, FP32 | {"exp_avg_sq": torch.bfloat16}], ids=["both", "the second"])
def test_bf16_moments_are_fp32s_rounded_after_each_step(
    moments: dict[str, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training.optimizer, "_CHUNK", 64)  # several parts, the last one smaller
    seed = torch.seed()
    print(f"seed {seed}")
    ours, theirs = ([torch.empty(37, 5), torch.empty(11)] for _ in range(2))
    for one, other in zip(ours, theirs, strict=True):
        other.copy_(one.normal_())
    mine, reference = (
        AdamW([{"params": tensors, "weight_decay": 0.1}], 1e-2, (0.9, 0.95), 1e-8, kept)
        for tensors, kept in ((ours, moments), (theirs, FP32))
    )
    for _ in range(5):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = other.grad = torch.randn_like(one)
        mine.step()
        reference.step()
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
            for kind, dtype in moments.items():
                rounded = reference.state[other][kind].to(dtype)
                assert mine.state[one][kind].dtype == dtype and torch.equal(mine.state[one][kind], rounded)
                reference.state[other][kind].copy_(rounded)


def test_bf16_moments_take_half_the_bytes() -> None:
    parameter = nn.Parameter(torch.randn(64, 48, dtype=torch.bfloat16))
    parameter.sharding = Sharding()  # type: ignore[attr-defined]
    sizes = {}
    for kept in ("fp32", "bf16"):
        arguments = Arguments().replace(exp_avg_dtype=kept, exp_avg_sq_dtype=kept).optimizer
        optimizer = Optimizer([("w", parameter)], arguments)
        parameter.main_grad = torch.randn(64, 48)  # type: ignore[attr-defined]
        optimizer.step(1e-3)
        (state,) = optimizer.inner.state.values()
        sizes[kept] = sum(state[moment].nbytes for moment in optimizer.moments)
        assert optimizer.read("w").dtype == torch.float32
    assert sizes == {"fp32": 8 * 64 * 48, "bf16": 4 * 64 * 48}


@pytest.mark.parametrize(("saved", "loaded"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_a_checkpoint_holds_moments_as_they_are_kept_and_loading_converts(
    run_ranks: Callable[..., Any], tmp_path: Path, saved: str, loaded: str
) -> None:
    run_ranks(2, saved_and_loaded, str(tmp_path), saved, loaded)


def saved_and_loaded(directory: str, saved: str, loaded: str) -> None:
    """Asserts on a rank; tp cuts the matrices, so blocks of them are converted."""
    engines = []
    for kept in (saved, loaded):
        flags = {"precision": "bf16", "exp_avg_dtype": kept, "exp_avg_sq_dtype": kept}
        asked = job("none", Layout(tp=2), flags)
        engines.append(engine_of(asked))
    engine, other = engines
    for step in range(2):
        engine.train_step(batches_of(asked, engine, step), 1e-3)
    path = checkpoint.save(engine, Path(directory), checkpoint.Position(2, 8), "")
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    for name in engine.optimizer.parameters:
        entry = stored[f"optimizer.exp_avg.{name}"]
        assert isinstance(entry, TensorStorageMetadata) and entry.properties.dtype == DTYPES[saved]
    checkpoint.load(other, path)
    for name in engine.optimizer.parameters:
        assert torch.equal(engine.optimizer.read(name), other.optimizer.read(name))
        for moment in engine.optimizer.moments:
            ours, theirs = engine.optimizer.read(name, moment), other.optimizer.read(name, moment)
            assert theirs.dtype == DTYPES[loaded] and torch.equal(theirs, ours.to(theirs.dtype))
            assert theirs.any()
    assert other.train_step(batches_of(asked, other, 2), 1e-3).taken
