"""What goes with what is one table: printed, shown in the documents, and the same that refuses flags."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from training.arguments import Arguments
from training.command_line import from_yaml, parse, to_yaml
from training.compositions import EXCLUDED, FEATURES, STAGES, as_markdown, as_text, composition_errors

ROOT = Path(__file__).parents[2]
ASKED: dict[str, dict[str, Any]] = {
    "tensor parallel": {"tensor_model_parallel_size": 2},
    "context parallel": {"context_parallel_size": 2},
    "pipeline, any schedule": {"pipeline_model_parallel_size": 4},
    "expert parallel": {"expert_model_parallel_size": 8},
    "tokens travel while others compute": {"overlap_moe_expert_parallel_comm": True},
    "gradient compression": {"grad_compression": "int8"},
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "Adam's moments in bf16": {"exp_avg_dtype": "bf16"},
    "SGD": {"optimizer": "sgd"},
    "optimizer offloaded to the host": {"offload_optimizer": "cpu"},
    "optimizer offloaded to a disk": {"offload_optimizer": "nvme"},
    "parameters offloaded to the host": {"offload_param": "cpu"},
    "parameters offloaded to a disk": {"offload_param": "nvme"},
    "recomputation": {"recompute_granularity": "full"},
    "16-bit weights saved": {"save_16bit_weights": True},
}
"""Feature -> flags that ask for it; no_sync is a call."""


def why_not(name: str, stage: int) -> str | None:
    return {feature.name: feature for feature in FEATURES}[name].why_not.get(stage)


def told(**flags: Any) -> list[str]:
    return list(composition_errors(Arguments().replace(**flags)))


def test_the_table_has_every_feature_of_the_flags() -> None:
    assert [feature.name for feature in FEATURES] == [*ASKED, "no_sync"]
    for feature in FEATURES:
        assert set(feature.why_not) < set(STAGES)  # each goes with one stage at least
    for pair in EXCLUDED:
        assert set(pair) <= set(ASKED)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ASKED)
def test_a_cell_is_what_the_check_does(name: str, stage: int) -> None:
    errors = told(zero_stage=stage, **ASKED[name])
    reason = why_not(name, stage)
    if reason is None:
        assert errors == []
    else:
        (error,) = errors
        flag, value = next(iter(ASKED[name].items()))
        asked = f"--{flag.replace('_', '-')}" + ("" if value is True else f" {value}")
        assert error.startswith(f"{asked} doesn't go with --zero-stage {stage}: {reason}; use --zero-stage ")


def test_stage_1_goes_with_every_feature_but_swapping_and_offloaded_parameters() -> None:
    assert [feature.name for feature in FEATURES if 1 in feature.why_not] == [
        "optimizer offloaded to a disk",
        "parameters offloaded to the host",
        "parameters offloaded to a disk",
    ]


def test_stages_2_and_3_have_no_pipeline_experts_compression_or_no_sync() -> None:
    for stage in (2, 3):
        for name in ("pipeline, any schedule", "expert parallel", "gradient compression", "no_sync"):
            assert why_not(name, stage)
    (error,) = told(zero_stage=3, pipeline_schedule="zb-h1")  # on one rank too, as it cuts backward passes in two
    assert error.startswith("--pipeline-schedule zb-h1 doesn't go with --zero-stage 3")
    assert told(zero_stage=3, pipeline_schedule="gpipe") == []


def test_features_that_exclude_each_other_are_named_together() -> None:
    (error,) = told(zero_stage=2, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16", offload_optimizer="cpu")
    assert "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 doesn't go with --offload-optimizer cpu" in error
    assert "fp32" in error


def test_everything_outside_the_table_is_said_at_once() -> None:
    assert len(told(zero_stage=2, pipeline_model_parallel_size=2, grad_compression="int8", offload_param="cpu")) == 3


def test_the_documents_show_this_table() -> None:
    assert as_markdown() in (ROOT / "docs" / "zero.md").read_text(encoding="utf-8")


def test_help_compositions_prints_the_table_before_anything_else_and_without_torch() -> None:
    program = (
        "import sys, runpy\n"
        "sys.argv = ['pretrain_deepseek.py', '--nonsense', '--help_compositions']\n"
        "try:\n    runpy.run_path('pretrain_deepseek.py', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules and 'deepspeed' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == as_text()
    for feature in FEATURES:
        assert feature.name in done.stdout
        assert all(reason in done.stdout for reason in feature.why_not.values())


def test_help_compositions_is_no_flag_of_a_run() -> None:
    assert "help_compositions" not in to_yaml(Arguments())
    assert from_yaml(to_yaml(Arguments())) == Arguments()
    with pytest.raises(SystemExit) as end:
        parse(["--help-compositions"], {})
    assert end.value.code == 0
