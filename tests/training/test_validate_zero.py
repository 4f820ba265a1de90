"""ZeRO's flags and DeepSpeed's file are checked with all others, before any rank waits."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from model.config import DeepSeekConfig
from tests.training.test_validate import arguments, config, errors  # noqa: F401 (fixtures)
from training.arguments import Arguments
from training.validate import validate
from training.validate_zero import zero_errors, zero_warnings


def told(world_size: int = 8, **flags: Any) -> list[str]:
    return list(zero_errors(Arguments().replace(**flags), world_size))


def test_errors_of_file_and_compositions_come_with_those_of_other_flags(
    arguments: Arguments,  # noqa: F811
    config: DeepSeekConfig,  # noqa: F811
    tmp_path: Path,
) -> None:
    found = errors(arguments.replace(zero_stage=2, seq_length=127), config)
    assert len(found) == 2 and "--seq-length 127" in found[0]
    assert "--pipeline-model-parallel-size 2 doesn't go with --zero-stage 2" in found[1]
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    (error,) = errors(arguments.replace(deepspeed_config=str(path)), config)  # the stage that the file says
    assert "doesn't go with --zero-stage 3" in error
    path.write_text(json.dumps({"gradient_accumulation_steps": 2}))
    (error,) = errors(arguments.replace(deepspeed_config=str(path)), config)  # 8 ranks are 2 replicas, so 4 steps
    assert "gradient_accumulation_steps 2" in error and "give --global-batch-size 4" in error


def test_right_flags_pass(arguments: Arguments, config: DeepSeekConfig, tmp_path: Path) -> None:  # noqa: F811
    validate(arguments.replace(zero_stage=1, offload_optimizer="cpu", grad_compression="int8"), config, 8)
    one_stage = arguments.replace(pipeline_model_parallel_size=1)
    validate(one_stage.replace(zero_stage=3, offload_optimizer="cpu", offload_param="cpu"), config, 8)
    swapped = {"offload_optimizer": "nvme", "offload_param": "nvme", "nvme_path": str(tmp_path / "new" / "er")}
    validate(one_stage.replace(zero_stage=3, **swapped), config, 8)
    assert not (tmp_path / "new").exists()  # checks make nothing


def test_offloading_without_a_stage_is_refused() -> None:
    for flag in ("offload_optimizer", "offload_param"):
        (error,) = told(**{flag: "cpu"})
        assert error.startswith(f"--{flag.replace('_', '-')} cpu doesn't go with --zero-stage 0")


def test_a_disk_has_a_directory_that_can_be_written(tmp_path: Path) -> None:
    swapped = {"zero_stage": 3, "offload_optimizer": "nvme", "offload_param": "nvme"}
    (error,) = told(**swapped)
    assert error.startswith("--offload-optimizer nvme and --offload-param nvme: give --nvme-path too")
    (tmp_path / "file").touch()
    (error,) = told(**swapped, nvme_path=str(tmp_path / "file" / "x"))
    assert f"{tmp_path / 'file'} is a file" in error
    (error,) = told(zero_stage=3, offload_optimizer="cpu", nvme_path="/fast")
    assert "--nvme-path /fast is for" in error


def test_a_disk_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != closed)  # root may write everywhere
    (error,) = told(zero_stage=3, offload_param="nvme", nvme_path=str(closed))
    assert error == f"--nvme-path {closed} can't be written: name a directory that this user can write"
    (error,) = told(zero_stage=3, offload_param="nvme", nvme_path=str(closed / "swap"))
    assert f"can't be made in {closed}" in error


def test_shards_over_one_replica_are_warned_of() -> None:
    layout = {"zero_stage": 1, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
    (warning,) = zero_warnings(Arguments().replace(**layout), 2)
    assert "--zero-stage 1 shards nothing: 2 ranks as tensor 2 · pipeline 1 are 1 replica" in warning
    assert list(zero_warnings(Arguments().replace(**layout), 4)) == []
    # Experts that aren't cut have a copy on each of two tp ranks, which share its states.
    whole = layout | {"expert_model_parallel_size": 1}
    assert list(zero_warnings(Arguments().replace(**whole), 2)) == []
    for stage in (2, 3):  # whose engine knows no edp
        (warning,) = zero_warnings(Arguments().replace(**whole | {"zero_stage": stage}), 2)
        assert f"--zero-stage {stage} shards nothing" in warning
    assert list(zero_warnings(Arguments(), 1)) == []
