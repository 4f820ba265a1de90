"""The validate step: what can't work is refused before any rank waits, with numbers and fix. Free of torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from model.config import DeepSeekConfig
from training.arguments import Arguments
from training.failures import ConfigurationError
from training.validate import read_model_config, validate

TINY = Path(__file__).parents[2] / "configs" / "models" / "tiny_v3.json"


@pytest.fixture
def arguments(tmp_path: Path) -> Arguments:
    """Flags that are right for 8 ranks."""
    for end in (".idx", ".bin"):
        (tmp_path / f"corpus{end}").touch()
    (tmp_path / "tokenizer.model").touch()
    return Arguments().replace(
        model=str(TINY),
        run_dir=str(tmp_path / "run"),
        data_path=(str(tmp_path / "corpus"),),
        tokenizer_model=str(tmp_path / "tokenizer.model"),
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        seq_length=128,
    )


@pytest.fixture
def config() -> DeepSeekConfig:
    """Heads 4, layers 4, experts 8, whatever the tiny model becomes."""
    tiny = DeepSeekConfig.from_file(TINY)
    return dataclasses.replace(tiny, num_attention_heads=4, num_hidden_layers=4, max_position_embeddings=1024)


def errors(arguments: Arguments, config: DeepSeekConfig, world_size: int = 8, **more: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        validate(arguments, config, world_size, **more)
    return caught.value.errors


def test_right_flags_pass(arguments: Arguments, config: DeepSeekConfig) -> None:
    validate(arguments, config, 8)
    validate(arguments.replace(precision="bf16", pipeline_layers=(3, 1)), config, 8)
    validate(arguments.replace(distributed_backend="nccl"), config, 8, gpus=8)
    overlapped = {"pipeline_schedule": "dualpipe-v", "overlap_moe_expert_parallel_comm": True}
    validate(arguments.replace(**overlapped, expert_model_parallel_size=2), config, 8)
    validate(arguments.replace(context_parallel_size=2, seq_length=132), config, 8)
    validate(arguments.replace(tensor_model_parallel_size=4, context_parallel_size=1, seq_length=132), config, 8)
    validate(arguments.replace(recompute_granularity="selective", recompute_modules=("moe", "moe_act")), config, 8)
    validate(arguments.replace(recompute_granularity="selective", recompute_modules=("deepseek",)), config, 8)
    validate(arguments.replace(lr_decay_style="wsd", lr_wsd_decay_iters=20, lr_warmup_iters=10), config, 8)


@pytest.mark.parametrize(
    ("changed", "world_size", "parts"),
    [
        ({}, 6, ["6 ranks", "tensor 2 · pipeline 2 · context 1", "multiple of 4"]),
        (
            {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 1},
            8,
            ["8", "4 attention heads", "1, 2, 4"],
        ),
        ({"pipeline_model_parallel_size": 7}, 14, ["7 needs at least 5 layers", "has 4", "at most 6"]),
        ({"pipeline_layers": (2, 1, 1)}, 8, ["2,1,1", "3 stages", "has 2"]),
        ({"pipeline_layers": (2, 1)}, 8, ["2,1", "3 layers", "has 4", "add 1"]),
        ({"pipeline_layers": (5, -1)}, 8, ["5,-1", "stage 1 with -1"]),
        ({"pipeline_layers": (2, 2), "pipeline_model_parallel_layout": "Ett|ttmL"}, 8, ["leave one out"]),
        (
            {"pipeline_model_parallel_layout": "Ett|tmL"},
            8,
            ["layout: the layout 'Ett|tmL'", "3 layers", "has 4", "add 1"],
        ),
        ({"pipeline_schedule": "zb-v", "num_virtual_stages_per_pipeline_rank": 3}, 8, ["zb-v", "2 stages", "not 3"]),
        ({"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 0}, 8, ["at least 1", "got 0"]),
        ({"pipeline_schedule": "interleaved", "pipeline_layers": (2, 1, 1)}, 8, ["2,1,1", "3 stages", "has 4"]),
        (
            {"pipeline_schedule": "zb-v", "pipeline_model_parallel_size": 4},
            8,
            [
                "--pipeline-model-parallel-size",
                "8 pipeline stages",
                "with 2 of them on a rank use at most 3 pipeline ranks",
            ],
        ),
        (
            {"pipeline_model_parallel_layout": "Et|t|t|tmL"},
            8,
            ["--pipeline-model-parallel-layout", "4 stages", "has 2", "interleaved"],
        ),
        ({"pipeline_model_parallel_layout": "Et*9999999999|L"}, 8, ["more than 10000"]),
        ({"pipeline_schedule": "auto", "pipeline_model_parallel_layout": "Et|x"}, 8, ["parallel-layout: the", "'x'"]),
        ({"pipeline_schedule": "auto", "pipeline_memory_limit": 0.0}, 8, ["--pipeline-memory-limit 0", "above 0"]),
        ({"pipeline_schedule": "auto", "pipeline_costs": (1e308, 1e308, 1e308)}, 8, ["1e+308", "another unit"]),
        ({"pipeline_schedule": "auto", "pipeline_model_parallel_size": 1000}, 2000, ["at most 6"]),
        ({"pipeline_costs": (1.0, 1.0, 1.0)}, 8, ["--pipeline-costs", "auto", "leave it out"]),
        ({"pipeline_schedule": "auto", "pipeline_costs": (1.0, -1.0, 1.0)}, 8, ["1,-1,1", "1,1.2,0.8"]),
        ({"pipeline_memory_limit": 2.0}, 8, ["--pipeline-memory-limit", "auto", "leave it out"]),
        (
            {"overlap_moe_expert_parallel_comm": True},
            8,
            ["parallel-comm is for", "dualpipe-v, not 1f1b: set that, or leave it out"],
        ),
        (
            {"overlap_moe_expert_parallel_comm": True, "pipeline_schedule": "dualpipe-v"},
            8,
            ["--overlap-moe-expert-parallel-comm hides", "--expert-model-parallel-size 1 none travel: leave it out"],
        ),
        ({"moe_z_loss_coeff": -1.0}, 8, ["--moe-z-loss-coeff -1.0", "not be negative"]),
        ({"moe_expert_capacity_factor": 0.0}, 8, ["--moe-expert-capacity-factor 0.0", "above 0"]),
        ({"moe_token_drop_policy": "position"}, 8, ["policy position", "--moe-expert-capacity-factor"]),
        ({"moe_token_drop_level": "device"}, 8, ["level device", "--moe-expert-capacity-factor"]),
        ({"global_batch_size": 9}, 8, ["9", "multiple of 2 =", "size 1", "data parallel size 2", "8 or 10"]),
        ({"global_batch_size": 1}, 8, ["--global-batch-size 1 ", "use 2"]),
        ({"seq_length": 129}, 8, ["129", "size 2", "128 or 130"]),
        ({"seq_length": 2048}, 8, ["2048", "max_position_embeddings 1024"]),
        ({"lr_warmup_iters": 101}, 8, ["101", "--train-iters 100"]),
        ({"lr_warmup_iters": 50, "lr_decay_iters": 50}, 8, ["50", "--lr-decay-iters 50"]),
        ({"lr_decay_style": "wsd"}, 8, ["--lr-wsd-decay-iters", "100"]),
        ({"lr_decay_style": "wsd", "lr_wsd_decay_iters": 96, "lr_warmup_iters": 5}, 8, ["96", "95 steps"]),
        ({"min_lr": 1.0}, 8, ["--min-lr 1.0 is above --lr 0.00022"]),
        ({"distributed_backend": "nccl"}, 8, ["nccl", "gloo"]),
        ({"tokenizer_model": "/none/x.model"}, 8, ["/none/x.model"]),
        ({"data_path": ("/none/corpus",)}, 8, ["/none/corpus.idx and /none/corpus.bin"]),
        ({"data_path": ()}, 8, ["--data-path is missing"]),
        ({"data_path": ("0.5", "/none/a", "/none/b")}, 8, ["weights must stand before every prefix"]),
        ({"split": "90,x"}, 8, ["--split '90,x'", "969,30,1"]),
        (
            {"expert_model_parallel_size": 8},
            8,
            ["--expert-model-parallel-size 8", "the 4 ranks of a pipeline stage (8 ranks / pipeline 2)", "1, 2, 4"],
        ),
        (
            {"expert_model_parallel_size": 4, "tensor_model_parallel_size": 1, "global_batch_size": 6},
            12,
            ["4 doesn't divide the 6 ranks", "1, 2"],
        ),
        (
            {"expert_model_parallel_size": 3, "tensor_model_parallel_size": 1, "global_batch_size": 6},
            12,
            ["3 doesn't divide the model's 8 routed experts", "use one of 1, 2"],
        ),
        (
            {"context_parallel_size": 3, "seq_length": 132},
            8,
            ["8 ranks", "tensor 2 · pipeline 2 · context 3", "multiple of 12"],
        ),
        (
            {"context_parallel_size": 2, "seq_length": 130},
            8,
            ["--seq-length 130", "divisible by 4", "size 2", "4 chunks", "128 or 132", "aren't padded"],
        ),
        (
            {"context_parallel_size": 4, "tensor_model_parallel_size": 1, "seq_length": 132},
            8,
            ["--seq-length 132", "divisible by 8", "size 4", "8 chunks", "128 or 136"],
        ),
        ({"context_parallel_size": 2, "seq_length": 3}, 8, ["--seq-length 3", "divisible by 4", "use 4"]),
        ({"train_iters": 0, "lr_warmup_iters": 0, "lr_decay_style": "constant"}, 8, ["--train-iters 0", "at least 1"]),
        ({"lr": float("nan")}, 8, ["--lr nan must be a finite number"]),
        ({"lr": float("inf")}, 8, ["--lr inf must be a finite number"]),
        ({"min_lr": float("inf")}, 8, ["--min-lr inf must be a finite number"]),
        ({"clip_grad": float("-inf")}, 8, ["--clip-grad -inf must be a finite number"]),
        ({"adam_beta1": float("nan")}, 8, ["--adam-beta1 nan must be a finite number"]),
        ({"distributed_timeout_minutes": float("inf")}, 8, ["--distributed-timeout-minutes inf"]),
        ({"lr_decay_iters": 0}, 8, ["--lr-decay-iters 0 must be at least 1"]),
        ({"lr_decay_iters": -3, "lr_decay_style": "wsd"}, 8, ["--lr-decay-iters -3 must be at least 1"]),
        ({"adam_beta2": 1.0}, 8, ["--adam-beta2 1.0", "below 1"]),
        ({"micro_batch_size": 0}, 8, ["--micro-batch-size 0"]),
        ({"tensor_model_parallel_size": 0}, 8, ["--tensor-model-parallel-size 0"]),
        ({"recompute_modules": ("mlp",)}, 8, ["--recompute-modules mlp needs", "selective and it is none"]),
        (
            {"recompute_granularity": "selective", "recompute_modules": ("moe", "mla")},
            8,
            ["--recompute-modules mla: unknown", "core_attn mla_up_proj layernorm"],
        ),
        ({"resume": True, "overwrite": True}, 8, ["--resume and --overwrite"]),
        ({"loss_scale": 4.0}, 8, ["--loss-scale 4.0 needs --precision fp16", "it is fp32", "leave it out"]),
        ({"precision": "bf16", "hysteresis": 2}, 8, ["--hysteresis 2 needs --precision fp16", "it is bf16"]),
        ({"precision": "fp16", "initial_loss_scale": 1000.0}, 8, ["--initial-loss-scale 1000.0", "512 or 1024"]),
        ({"precision": "fp16", "loss_scale": -2.0}, 8, ["--loss-scale -2.0 must be a power of two"]),
        (
            {"precision": "fp16", "loss_scale": 2.0, "loss_scale_window": 9},
            8,
            ["--loss-scale-window 9 contradicts --loss-scale 2.0"],
        ),
        ({"precision": "fp16", "hysteresis": 0}, 8, ["--hysteresis 0 must be at least 1"]),
        (
            {"precision": "fp16", "min_loss_scale": 2.0**17},
            8,
            ["--min-loss-scale 131072.0 is above --initial-loss-scale 65536.0"],
        ),
        (
            {"exp_avg_sq_dtype": "bf16", "adam_beta2": 0.999},
            8,
            ["--exp-avg-sq-dtype bf16 with --adam-beta2 0.999", "a share of 0.001", "at most 0.9961, or fp32"],
        ),
        ({"optimizer": "sgd", "exp_avg_dtype": "bf16"}, 8, ["--exp-avg-dtype bf16 is for --optimizer adamw, not sgd"]),
    ],
)
def test_each_mistake_is_one_error_with_numbers_and_fix(
    arguments: Arguments, config: DeepSeekConfig, changed: dict[str, Any], world_size: int, parts: list[str]
) -> None:
    found = errors(arguments.replace(**changed), config, world_size)
    assert len(found) == 1, found
    missing = [part for part in parts if part not in found[0]]
    assert not missing, found[0]


def test_expert_parallel_sizes_that_fit_pass(arguments: Arguments, config: DeepSeekConfig) -> None:
    for ep in (2, 4):  # within tensor-parallel ranks, and across them
        validate(arguments.replace(expert_model_parallel_size=ep), config, 8)


def test_expert_parallel_needs_experts(arguments: Arguments, config: DeepSeekConfig) -> None:
    values = config.to_dict() | {"n_routed_experts": None, "num_nextn_predict_layers": 0}
    dense = DeepSeekConfig.from_dict(values)
    validate(arguments, dense, 8)
    (error,) = errors(arguments.replace(expert_model_parallel_size=2), dense)
    assert "--expert-model-parallel-size 2 needs routed experts" in error and "4 layers" in error and "use 1" in error


def test_all_errors_are_shown_at_once(arguments: Arguments, config: DeepSeekConfig) -> None:
    wrong = arguments.replace(global_batch_size=7, lr_warmup_iters=500, data_path=("/none/a",), seq_length=4097)
    found = errors(wrong, config)
    assert len(found) == 5
    with pytest.raises(ConfigurationError) as caught:
        validate(wrong, config, 8)
    assert all(f"- {error}" in str(caught.value) for error in found)


def test_only_the_half_that_is_missing_of_the_data_is_named(arguments: Arguments, config: DeepSeekConfig) -> None:
    Path(arguments.data.data_path[0] + ".idx").unlink()
    (error,) = errors(arguments, config)
    assert "corpus.idx not found" in error and ".bin not" not in error


def test_dense_layers_that_tensor_parallelism_cannot_split(arguments: Arguments, config: DeepSeekConfig) -> None:
    odd = dataclasses.replace(config, intermediate_size=513)
    (error,) = errors(arguments, odd)
    assert "intermediate_size 513" in error and "--tensor-model-parallel-size 2" in error
    validate(arguments, dataclasses.replace(odd, first_k_dense_replace=0), 8)


def test_an_earlier_run_is_refused(arguments: Arguments, config: DeepSeekConfig) -> None:
    run = Path(arguments.run.run_dir)
    run.mkdir()
    (run / "metrics.jsonl").touch()
    (error,) = errors(arguments, config)
    assert "--resume" in error and "--overwrite" in error and str(run) in error
    validate(arguments.replace(resume=True), config, 8)
    validate(arguments.replace(overwrite=True), config, 8)


def test_model_file_mistakes_name_the_file(tmp_path: Path) -> None:
    def message(path: str | None, **changed: Any) -> str:
        with pytest.raises(ConfigurationError) as caught:
            read_model_config(Arguments().replace(model=path, **changed))
        return str(caught.value)

    assert "--model is missing" in message(None)
    assert str(tmp_path / "none.json") in message(str(tmp_path / "none.json"))
    llama = tmp_path / "config.json"
    llama.write_text('{"model_type": "llama"}')
    assert str(llama) in message(str(llama)) and "'llama'" in message(str(llama))
    assert "deepseek_v3" in message(str(llama))
    llama.write_text("{")
    assert str(llama) in message(str(llama))
    groups = {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}
    llama.write_text(json.dumps(json.loads(TINY.read_text()) | groups))
    expected = "num_experts_per_tok 3 is above the 2 experts of topk_group 1 out of n_group 4 groups of 2: lower it"
    assert expected in message(str(llama))


def test_model_flags_change_the_configuration() -> None:
    plain = read_model_config(Arguments().replace(model=str(TINY)))
    changed = read_model_config(Arguments().replace(model=str(TINY), init_method_std=0.5, aux_loss_alpha=0.0))
    assert plain == DeepSeekConfig.from_file(TINY)
    assert changed == dataclasses.replace(plain, initializer_range=0.5, aux_loss_alpha=0.0)


def test_what_balances_experts_needs_experts_and_what_balances_groups_needs_groups(
    arguments: Arguments, config: DeepSeekConfig
) -> None:
    by_group = dict(moe_device_level_aux_loss_coeff=0.05, moe_comm_aux_loss_coeff=0.02, moe_token_drop_level="device")
    asked = arguments.replace(**by_group, moe_expert_capacity_factor=1.0, moe_z_loss_coeff=1e-3, aux_loss_alpha=0.1)
    validate(asked, config, 8)
    told = errors(asked, dataclasses.replace(config, n_group=1, topk_group=1))
    flags = (
        "--moe-device-level-aux-loss-coeff 0.05",
        "--moe-comm-aux-loss-coeff 0.02",
        "--moe-token-drop-level device",
    )
    assert [error.partition(" needs groups")[0] for error in told] == list(flags)
    assert all("n_group 1, topk_method noaux_tc" in error for error in told)
    v2 = DeepSeekConfig.from_file(TINY.with_name("tiny_v2.json"))
    assert len(errors(asked, dataclasses.replace(v2, n_group=4))) == 3  # greedy doesn't look at them
    dense = dataclasses.replace(config, first_k_dense_replace=4, num_nextn_predict_layers=0)
    told = errors(asked, dense)
    assert len(told) == 6 and all("needs experts and no layer of the model has any" in error for error in told)


def test_weights_to_start_from_are_a_directory_and_not_beside_a_run_to_go_on_with(
    arguments: Arguments, config: DeepSeekConfig, tmp_path: Path
) -> None:
    validate(arguments.replace(pretrained_checkpoint=str(tmp_path)), config, 8)
    (error,) = errors(arguments.replace(pretrained_checkpoint=str(tmp_path), load="runs/a"), config)
    assert "--load runs/a and --pretrained-checkpoint" in error and "exclude each other" in error
    (error,) = errors(arguments.replace(pretrained_checkpoint="nowhere"), config)
    assert "--pretrained-checkpoint nowhere is no directory" in error
