"""DeepSpeed's file beside the flags: it completes them, never contradicts them, and is never ignored in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from training.arguments import Arguments
from training.command_line import from_yaml, to_yaml
from training.deepspeed_config import completed, engine_config
from training.deepspeed_keys import OLD_GATHER, OLD_OFFLOAD
from training.failures import ConfigurationError

ROOT = Path(__file__).parents[2]
READY = sorted((ROOT / "configs" / "deepspeed").glob("*.json"))
ISSUE = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}
GATHER = "stage3_gather_16bit_weights_on_model_save"


def asked(tmp_path: Path, content: Any, **flags: Any) -> Arguments:
    """Flags with a file of this content."""
    path = tmp_path / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return Arguments().replace(deepspeed_config=str(path), **flags)


def refused(tmp_path: Path, content: Any, world_size: int | None = None, **flags: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        completed(asked(tmp_path, content, **flags), world_size)
    return tuple(error.replace(f"{tmp_path}/", "") for error in caught.value.errors)


def told(tmp_path: Path, content: Any, **flags: Any) -> tuple[str, ...]:
    return tuple(notice.replace(f"{tmp_path}/", "") for notice in completed(asked(tmp_path, content, **flags))[1])


def test_without_a_file_flags_stay_as_they_are() -> None:
    arguments = Arguments().replace(zero_stage=2)
    assert completed(arguments, 4) == (arguments, ())


def test_a_file_of_stage_and_offloading_alone_runs_as_it_is(tmp_path: Path) -> None:
    arguments, notices = completed(asked(tmp_path, ISSUE, precision="bf16"), 4)
    assert notices == ()
    zero = arguments.zero
    assert (zero.zero_stage, zero.offload_optimizer, zero.offload_param) == (3, "cpu", "cpu")
    config = engine_config(arguments)
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert config["zero_optimization"]["offload_param"] == {"device": "cpu"}
    assert "bf16" not in config and config["gradient_clipping"] == 1.0  # the engine knows its parameters' dtype


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_ready_files_complete_the_flags_their_names_say(path: Path) -> None:
    arguments, notices = completed(Arguments().replace(deepspeed_config=str(path), nvme_path="/fast"), 4)
    assert notices == ()
    stage, _, place = path.stem.removeprefix("stage").partition("_")
    device = {"": "none", "offload": "cpu", "nvme": "nvme"}[place]
    zero = arguments.zero
    assert (zero.zero_stage, zero.offload_optimizer) == (int(stage), device)
    assert zero.offload_param == (device if stage == "3" else "none")
    assert arguments.checkpoint.save_16bit_weights == (stage == "3")


def test_completed_flags_stay_completed_and_survive_yaml(tmp_path: Path) -> None:
    content = {
        "fp16": {"enabled": True, "initial_scale_power": 10, "hysteresis": 2},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/fast"}, GATHER: True},
    }
    arguments, _ = completed(asked(tmp_path, content, precision="fp16"), 4)
    assert arguments.zero.nvme_path == "/fast" and arguments.checkpoint.save_16bit_weights
    assert (arguments.training.initial_loss_scale, arguments.training.hysteresis) == (1024.0, 2)
    assert completed(arguments, 4)[0] == arguments
    assert completed(from_yaml(to_yaml(arguments)), 4)[0] == arguments  # --config RUN/config.yaml doesn't contradict


def test_auto_and_what_is_left_out_come_from_the_flags(tmp_path: Path) -> None:
    content = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 16},
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": True},
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }
    arguments, notices = completed(asked(tmp_path, content, precision="bf16", clip_grad=0.5, bucket_cap_mb=4.0), 4)
    assert notices == ()
    assert arguments.training.loss_scale_window is None  # of fp16, and the run is bf16
    config = engine_config(arguments)
    assert config["gradient_clipping"] == 0.5 and config["steps_per_print"] == 2000
    zero = {"stage": 2, "reduce_bucket_size": 2**20, "overlap_comm": True, "parameter_alignment": True}
    assert config["zero_optimization"] == zero


@pytest.mark.parametrize(
    ("content", "flags", "parts"),
    [
        ({"train_batch_size": 64}, {}, ["train_batch_size 64", "--global-batch-size 8", "give --global-batch-size 64"]),
        ({"train_micro_batch_size_per_gpu": 4}, {}, ["train_micro_batch_size_per_gpu 4", "--micro-batch-size 1"]),
        (
            {"gradient_accumulation_steps": 3},
            {},
            ["gradient_accumulation_steps 3", "--global-batch-size 8", "2 times", "data parallel size 4", "size 12"],
        ),
        ({"gradient_clipping": 0.3}, {}, ["gradient_clipping 0.3", "--clip-grad 1"]),
        ({"fp16": {"enabled": True}}, {}, ["fp16.enabled true", "--precision fp32", "give --precision fp16"]),
        ({"bf16": {"enabled": True}}, {"precision": "fp16"}, ["bf16.enabled true", "--precision fp16"]),
        ({"bf16": {"enabled": False}}, {"precision": "bf16"}, ["bf16.enabled false", "--precision bf16"]),
        ({"data_types": {"param_dtype": "bf16"}}, {}, ["data_types.param_dtype bf16", "--precision fp32"]),
        ({"zero_optimization": {"stage": 2}}, {"zero_stage": 1}, ["zero_optimization.stage 2", "--zero-stage 1"]),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            {"offload_optimizer": "none"},
            ["zero_optimization.offload_optimizer.device cpu", "--offload-optimizer none"],
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/a"}}},
            {"zero_stage": 3, "nvme_path": "/b"},
            ["offload_param.nvme_path /a", "--nvme-path /b"],
        ),
        (
            {
                "zero_optimization": {
                    "offload_param": {"device": "nvme", "nvme_path": "/a"},
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/b"},
                }
            },
            {},
            ["/a", "/b", "one directory for both"],
        ),
        ({"zero_optimization": {"stage": 3, GATHER: False}}, {"save_16bit_weights": True}, ["--save-16bit-weights"]),
        ({"optimizer": {"type": "SGD"}}, {}, ["optimizer.type SGD", "--optimizer adamw", "give --optimizer sgd"]),
        ({"optimizer": {"type": "Lion"}}, {}, ["optimizer.type Lion", "Adam, AdamW and SGD"]),
        ({"optimizer": {"type": "OneBitAdam"}}, {}, ["optimizer.type OneBitAdam", "--grad-compression"]),
        ({"optimizer": {"params": {"lr": 0.5}}}, {}, ["optimizer.params.lr 0.5", "--lr 0.00022"]),
        ({"optimizer": {"params": {"betas": [0.9, 0.999]}}}, {}, ["[0.9, 0.999]", "--adam-beta1 0.9", "0.95"]),
        ({"optimizer": {"params": {"eps": 1e-6}}}, {}, ["params.eps 1e-06", "--adam-eps 1e-08"]),
        ({"optimizer": {"params": {"weight_decay": 0}}}, {}, ["weight_decay 0", "--weight-decay 0.1"]),
        ({"optimizer": {"params": {"max_grad_norm": 3}}}, {}, ["max_grad_norm 3", "--clip-grad 1"]),
        (
            {"fp16": {"loss_scale": 128}},
            {"precision": "fp16", "loss_scale": 64.0},
            ["loss_scale 128", "--loss-scale 64"],
        ),
        ({"fp16": {"loss_scale": 0}}, {"precision": "fp16", "loss_scale": 64.0}, ["dynamic", "--loss-scale 64"]),
        (
            {"fp16": {"initial_scale_power": 16}},
            {"precision": "fp16", "initial_loss_scale": 4.0},
            ["initial_scale_power 16", "--initial-loss-scale 4", "give --initial-loss-scale 65536"],
        ),
        ({"fp16": {"hysteresis": 2}}, {"precision": "fp16", "hysteresis": 3}, ["hysteresis 2", "--hysteresis 3"]),
    ],
)
def test_a_contradiction_names_both(tmp_path: Path, content: Any, flags: dict[str, Any], parts: list[str]) -> None:
    (error,) = refused(tmp_path, content, 4, micro_batch_size=1, **flags)
    assert error.startswith("ds.json: ")
    assert [part for part in parts if part not in error] == [], error


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ({"zero_optimisation": {}}, "unknown key zero_optimisation: did you mean zero_optimization?"),
        (
            {"zero_optimization": {"stge": 1}},
            "unknown key zero_optimization.stge: did you mean zero_optimization.stage?",
        ),
        ({"overlap_comm": True}, "overlap_comm belongs inside zero_optimization: move it"),
        ({"zero_optimization": {"gradient_cliping": 1}}, "did you mean gradient_clipping?"),
        ({"frobnicate": 1}, "unknown key frobnicate: DeepSpeed has no such key"),
        ({"optimizer": {"params": {"beta": 1}}}, "did you mean optimizer.params.betas?"),
        ({"aio": {"block_sise": 1}}, "did you mean aio.block_size?"),
        ({"zero_optimization": {"stage": 4}}, "stage 4 must be one of 0, 1, 2, 3"),
        ({"zero_optimization": {"stage": True}}, "stage true must be one of 0, 1, 2, 3"),
        ({"zero_optimization": {"reduce_bucket_size": "big"}}, "reduce_bucket_size big must be a whole number"),
        ({"zero_optimization": {"reduce_bucket_size": -1}}, "reduce_bucket_size -1 must be a whole number"),
        ({"zero_optimization": {"overlap_comm": 1}}, "overlap_comm 1 must be true or false"),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, "device gpu must be one of none, cpu, nvme"),
        ({"zero_optimization": 3}, "zero_optimization 3 must be a section"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler is refused: the learning rate is --lr"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "use --recompute-granularity"),
        ({"pipeline": {"stages": 2}}, "use --pipeline-model-parallel-size"),
        ({"tensor_parallel": {"autotp_size": 2}}, "use --tensor-model-parallel-size"),
        ({"expert_parallel": {"enabled": True}}, "use --expert-model-parallel-size"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zenflow is refused"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "--grad-compression"),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning is refused"),
        ({"compression_training": {"weight_quantization": {"x": 1}}}, "compression_training is refused"),
        ({"autotuning": {"enabled": True}}, "autotuning is refused"),
        ({"flops_profiler": {"enabled": True}}, "metrics.jsonl"),
        ({"communication_data_type": "fp16"}, "communication_data_type fp16 is refused: gradients are summed in fp32"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "grad_accum_dtype bf16 is refused"),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, "masters are fp32"),
        ({"optimizer": {"params": {"adam_w_mode": False}}}, "weight decay is decoupled"),
        ({"prescale_gradients": True}, "prescale_gradients true is refused"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op sum is refused"),
        ('{"bf16": {}, "bf16": {}}', "bf16 is given twice"),
        ({"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "nvme"}}}, "take cpu_offload out"),
        (
            {"zero_optimization": {"stage3_max_live_parameters": 5, "max_live_parameters": 3}},
            "stage3_max_live_parameters is given under two names, also as max_live_parameters",
        ),
        ({"gradient_clipping": 10**400}, "must be a number"),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "reduce_bucket_size 0 must be a whole number, at least 1"),
        ({"log_level": "loud"}, "log_level loud must be one of debug, info"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps 0 must be a whole number, at least 1"),
        ({"train_batch_size": -8}, "train_batch_size -8 must be a whole number, at least 1"),
        ({"steps_per_print": 0}, "steps_per_print 0 must be a whole number, at least 1"),
        ({"zero_optimization": {"stage3_module_granularity_threshold": 9}}, "which modules are gathered as one"),
        ({"fp16": {"min_loss_scale": 10**400}}, "must be a whole number"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_name(tmp_path: Path, content: Any, part: str) -> None:
    (error,) = refused(tmp_path, content)
    assert error.startswith("ds.json: ") and part in error


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "isn't JSON: "),
        ("[1]", "must be an object of DeepSpeed's keys"),
        ("", "isn't JSON"),
        ("[" * 100_000, "isn't JSON"),
    ],
)
def test_a_file_that_isnt_an_object_is_refused(tmp_path: Path, text: str, part: str) -> None:
    (error,) = refused(tmp_path, text)
    assert error.startswith("--deepspeed-config ds.json ") and part in error


def test_a_loss_scale_beyond_any_number_is_refused(tmp_path: Path) -> None:
    (error,) = refused(tmp_path, {"fp16": {"initial_scale_power": 1024}}, precision="fp16")
    assert error.startswith("ds.json: fp16.initial_scale_power 1024 is too much")


@pytest.mark.parametrize("left_out", [None, "auto"])
def test_an_old_name_at_the_top_finds_its_section_left_out(tmp_path: Path, left_out: str | None) -> None:
    content = {"zero_optimization": left_out, "zero3_save_16bit_model": True}
    arguments, _ = completed(asked(tmp_path, content, zero_stage=3))
    assert arguments.checkpoint.save_16bit_weights


def test_gradients_in_turns_are_left_out_with_a_notice(tmp_path: Path) -> None:
    content = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}
    (notice,) = told(tmp_path, content)
    assert notice.startswith("ds.json: zero_optimization.round_robin_gradients true is left out")
    assert "round_robin_gradients" not in engine_config(completed(asked(tmp_path, content))[0])["zero_optimization"]


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--deepspeed-config nowhere.json can't be read"):
        completed(Arguments().replace(deepspeed_config="nowhere.json"))


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    content = {"train_batch_size": 3, "bf16": {"enabled": True}, "steps": 1, "scheduler": {"type": "x"}}
    assert len(refused(tmp_path, content)) == 4


@pytest.mark.parametrize(
    "content",
    [
        {"flops_profiler": {"enabled": False, "profile_step": 1}, "amp": {"enabled": False}},
        {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
        {"prescale_gradients": False, "gradient_predivide_factor": 1.0, "gradient_allreduce_op": "mean"},
        {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32", "param_dtype": "float32"}},
        {"optimizer": {"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": True, "betas": [0.9, 0.95]}}},
        {"bf16": {"enabled": False}, "fp16": {"enabled": False, "loss_scale": 0}},
        {"tensorboard": {"enabled": False}, "checkpoint": {}},
        {"zero_allow_untested_optimizer": True, "train_batch_size": 8, "gradient_clipping": 1},
    ],
)
def test_what_is_off_or_says_the_same_passes_in_silence(tmp_path: Path, content: Any) -> None:
    assert told(tmp_path, content, zero_stage=1) == ()


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ({"tensorboard": {"enabled": True}}, "ds.json: tensorboard is left out: metrics are this project's own"),
        ({"zero_optimization": {"overlap_comm": True}}, "zero_optimization.overlap_comm true is left out: at stage 1"),
        ({"zero_optimization": {"contiguous_gradients": True}}, "contiguous_gradients true is left out: at stage 1"),
        ({"zero_optimization": {"parameter_alignment": False}}, "multiples of 16 bytes"),
        ({"bf16": {"check_grad_overflow": False}}, "check_grad_overflow false is left out"),
        ({"checkpoint": {"load_universal": True}}, "checkpoint is left out: checkpoints are this project's own"),
        ({"zero_optimization": {GATHER: True}}, f"{GATHER} is for stage 3"),
        ({"zero_optimization": True}, 'zero_optimization true is the old form of {"stage": 1}'),
        ({"bfloat16": {}}, "bfloat16 is the old name of bf16"),
    ],
)
def test_what_is_left_out_is_told_with_the_reason(tmp_path: Path, content: Any, part: str) -> None:
    (notice,) = told(tmp_path, content, zero_stage=1)
    assert part in notice


def test_a_file_without_a_stage_says_that_deepspeed_is_not_used(tmp_path: Path) -> None:
    (notice,) = told(tmp_path, {"gradient_clipping": 1.0})
    assert "DeepSpeed isn't used" in notice


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", OLD_GATHER)
def test_old_names_of_saving_16_bits_are_understood_with_one_notice(tmp_path: Path, name: str, inside: bool) -> None:
    content: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    (content["zero_optimization"] if inside else content)[name] = True
    arguments, notices = completed(asked(tmp_path, content))
    assert arguments.checkpoint.save_16bit_weights
    (notice,) = notices
    assert notice.endswith(f"{name} is the old name of zero_optimization.{GATHER}")


@pytest.mark.parametrize(("old", "new"), OLD_OFFLOAD.items())
def test_old_names_of_offloading_are_understood_with_one_notice(tmp_path: Path, old: str, new: str) -> None:
    arguments, notices = completed(asked(tmp_path, {"zero_optimization": {"stage": 3, old: True}}))
    assert getattr(arguments.zero, new) == "cpu"
    assert len(notices) == 1 and f"{old} is the old name of zero_optimization.{new}" in notices[0]
    arguments, _ = completed(asked(tmp_path, {"zero_optimization": {"stage": 3, old: False}}))
    assert getattr(arguments.zero, new) == "none"


def test_a_constant_loss_scale_of_the_file_leaves_the_dynamic_flags_unset(tmp_path: Path) -> None:
    content = {"fp16": {"loss_scale": 128, "initial_scale_power": 16, "hysteresis": 2}}
    training = completed(asked(tmp_path, content, precision="fp16"))[0].training
    assert (training.loss_scale, training.initial_loss_scale, training.hysteresis) == (128.0, None, None)


def test_a_key_under_both_its_names_is_refused(tmp_path: Path) -> None:
    zero = {"stage": 3, "prefetch_bucket_size": 5, "stage3_prefetch_bucket_size": 6}
    for order in (zero, dict(reversed(zero.items()))):
        with pytest.raises(ConfigurationError, match="stage3_prefetch_bucket_size is given under two names"):
            completed(asked(tmp_path, {"zero_optimization": order}), 4)


def test_a_stage_written_with_a_point_is_a_whole_number(tmp_path: Path) -> None:
    arguments, _ = completed(asked(tmp_path, {"zero_optimization": {"stage": 3.0}}))
    assert repr(arguments.zero.zero_stage) == "3"
