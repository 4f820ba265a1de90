"""What DeepSpeed is handed at each stage, and that the tables of its keys are those of the installed one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.test_deepspeed_config import READY, ROOT, asked
from training import deepspeed_keys
from training.arguments import Arguments
from training.deepspeed_config import completed, engine_config
from training.deepspeed_keys import OLD_GATHER, OLD_OFFLOAD, OLD_TOP_LEVEL, TOP_LEVEL, ZERO, Key


def test_stage_1_gets_whole_gradients_and_neither_scales_clips_nor_reduces() -> None:
    for precision in ("fp32", "bf16", "fp16"):
        config = engine_config(Arguments().replace(zero_stage=1, precision=precision))
        assert config["fp16"] == {"enabled": False, "loss_scale": 1.0} and "bf16" not in config
        assert config["gradient_clipping"] == 0.0
        zero = config["zero_optimization"]
        assert not zero["contiguous_gradients"] and not zero["overlap_comm"] and not zero["compute_grad_norm"]
    offloaded = engine_config(Arguments().replace(zero_stage=1, offload_optimizer="cpu"))
    assert offloaded["zero_optimization"]["compute_grad_norm"]


@pytest.mark.parametrize("stage", [2, 3])
def test_stages_2_and_3_clip_and_get_no_precision_which_the_engine_knows(stage: int) -> None:
    config = engine_config(Arguments().replace(zero_stage=stage, precision="fp16", clip_grad=0.25))
    assert config["gradient_clipping"] == 0.25 and not {"fp16", "bf16", "data_types"} & config.keys()


def test_stage_0_has_no_engine() -> None:
    with pytest.raises(ValueError, match="stage 0"):
        engine_config(Arguments())


def test_a_file_cannot_move_what_a_stage_needs(tmp_path: Path) -> None:
    content = {"zero_optimization": {"stage": 1, "contiguous_gradients": True, "compute_grad_norm": True}}
    arguments, _ = completed(asked(tmp_path, content))
    zero = engine_config(arguments)["zero_optimization"]
    assert zero["contiguous_gradients"] is False and zero["compute_grad_norm"] is False


def test_tables_have_the_keys_and_kinds_of_the_installed_deepspeed(tmp_path: Path) -> None:
    """And DeepSpeed takes what it is handed, for each stage and each ready file."""
    tried = [
        Arguments().replace(zero_stage=stage, precision=p) for stage in (1, 2, 3) for p in ("fp32", "bf16", "fp16")
    ]
    tried += [completed(Arguments().replace(deepspeed_config=str(path), nvme_path="/fast"))[0] for path in READY]
    configurations = "\n".join(json.dumps(engine_config(arguments)) for arguments in tried)
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-m", "tests.training.deepspeed_keys"]
    done = subprocess.run(program, input=configurations, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("KEYS "))
    theirs: dict[str, dict[str, str]] = json.loads(line.removeprefix("KEYS "))
    old = {*OLD_GATHER, *OLD_OFFLOAD, *OLD_TOP_LEVEL}
    removed = {name for name, key in ZERO.items() if "removed" in key.line} | {"zeropp_loco_param"}
    ours = {
        "ZERO": {**ZERO},
        "OFFLOAD_OPTIMIZER": deepspeed_keys.OFFLOAD_OPTIMIZER,
        "OFFLOAD_PARAM": deepspeed_keys.OFFLOAD_PARAM,
        "FP16": TOP_LEVEL["fp16"].section,
        "BF16": TOP_LEVEL["bf16"].section,
        "COMMS_LOGGER": deepspeed_keys.COMMS_LOGGER,
        "AIO": deepspeed_keys.AIO,
        "THROUGHPUT": TOP_LEVEL["timers"].section["throughput"].section,
    }
    for table, keys in ours.items():
        assert sorted(set(theirs[table]) - set(keys) - old) == [], f"{table}: not in ours"
        assert sorted(set(keys) - set(theirs[table]) - removed) == [], f"{table}: not DeepSpeed's"
        assert [name for name, key in keys.items() if not same_kind(key, theirs[table].get(name))] == []
    assert sorted(theirs["TOP_LEVEL"] - TOP_LEVEL.keys() - old) == []
    assert sorted(TOP_LEVEL.keys() - theirs["TOP_LEVEL"] - {"vocabulary_size", "sequence_parallel_size"}) == []


def same_kind(key: Key, theirs: str | None) -> bool:
    """Of keys that are handed on, whose wrong kinds DeepSpeed would find on every rank, late."""
    return (
        key.use != "passed"
        or theirs in (None, "", key.kind.__name__ if isinstance(key.kind, type) else "")
        or (
            key.kind is bool
            and theirs == "typing.Optional[bool]"
            or key.kind is list
            and theirs.startswith("<class 'list")
        )
    )
