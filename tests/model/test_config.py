"""config.json in, checked configuration out: published values, both rope forms, and what a bad file is told.

May import `model`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from model.config import DeepSeekConfig, YarnScaling

MODELS = Path(__file__).parents[2] / "configs" / "models"
ALL = ["deepseek_v2_lite", "deepseek_v2", "deepseek_v3", "tiny_v3", "tiny_v2"]
REMOVE = object()


def values_of(name: str = "tiny_v3", **changes: Any) -> dict[str, Any]:
    values = json.loads((MODELS / f"{name}.json").read_text())
    values.update(changes)
    return {key: value for key, value in values.items() if value is not REMOVE}


@pytest.mark.parametrize("name", ALL)
def test_a_configuration_survives_writing_and_reading(name: str, tmp_path: Path) -> None:
    config = DeepSeekConfig.from_file(MODELS / f"{name}.json")
    written = config.to_dict()
    for key, value in values_of(name).items():
        if key != "quantization_config":  # of the published file, not of what we write
            assert written[key] == value, key
    (tmp_path / "config.json").write_text(json.dumps(written))
    again = DeepSeekConfig.from_file(tmp_path / "config.json")
    assert again == config and again.extra["torch_dtype"] == "bfloat16"


def test_published_values() -> None:
    lite, v2, v3 = (DeepSeekConfig.from_file(MODELS / f"{name}.json") for name in ALL[:3])
    assert [c.num_hidden_layers for c in (lite, v2, v3)] == [27, 60, 61]
    assert [c.q_lora_rank for c in (lite, v2, v3)] == [None, 1536, 1536]
    assert [c.n_routed_experts for c in (lite, v2, v3)] == [64, 160, 256]
    assert [c.num_layers_with_mtp for c in (lite, v2, v3)] == [27, 60, 62]
    assert [c.aux_loss_kind for c in (lite, v2, v3)] == ["softmax", "softmax", "none"]
    assert [c.has_router_bias for c in (lite, v2, v3)] == [False, False, True]
    assert v3.rope_scaling == YarnScaling(40, 4096, 32, 1, 1.0, 1.0)
    assert v3.qk_head_dim == 192
    assert v3.extra["quantization_config"]["weight_block_size"] == [128, 128]


def test_layers_with_experts_follow_dense_first_and_frequency() -> None:
    config = DeepSeekConfig.from_dict(values_of(num_hidden_layers=9, first_k_dense_replace=3, moe_layer_freq=2))
    assert [i for i in range(config.num_layers_with_mtp) if config.is_moe_layer(i)] == [4, 6, 8, 9]  # 9 is MTP
    v3 = DeepSeekConfig.from_file(MODELS / "deepseek_v3.json")
    assert [i for i in range(62) if not v3.is_moe_layer(i)] == [0, 1, 2]


def test_a_model_without_experts_needs_none_of_their_keys() -> None:
    experts = ["n_shared_experts", "num_experts_per_tok", "n_group", "topk_group", "first_k_dense_replace"]
    experts += ["norm_topk_prob", "routed_scaling_factor", "moe_intermediate_size", "moe_layer_freq"]
    dense = dict.fromkeys(experts, REMOVE) | {"n_routed_experts": None, "num_nextn_predict_layers": 0}
    for name in ("tiny_v3", "tiny_v2"):
        config = DeepSeekConfig.from_dict(values_of(name, **dense))
        assert not any(config.is_moe_layer(layer) for layer in range(config.num_hidden_layers))
        assert DeepSeekConfig.from_dict(config.to_dict()) == config
    assert DeepSeekConfig.from_dict(values_of("tiny_v3", n_shared_experts=None)).n_shared_experts == 0
    with pytest.raises(ValueError, match="num_nextn_predict_layers 1 needs experts"):
        DeepSeekConfig.from_dict(values_of("tiny_v3", **dense | {"num_nextn_predict_layers": 1}))
    with pytest.raises(ValueError, match="missing keys: .*n_routed_experts"):  # forgotten is another thing than null
        DeepSeekConfig.from_dict(values_of("tiny_v3", **dense | {"n_routed_experts": REMOVE}))


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("n_groups", "n_group"),
        ("hiden_size", "hidden_size"),
        ("num_nextn_predict_layer", "num_nextn_predict_layers"),
        ("aux_loss_alfa", "aux_loss_alpha"),
        ("num_experts_per_token", "num_experts_per_tok"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_right_one(wrong: str, right: str) -> None:
    values = {key: value for key, value in values_of("tiny_v3").items() if key != right} | {wrong: 2}
    with pytest.raises(ValueError, match=f"unknown key {wrong}: did you mean {right}[?]"):
        DeepSeekConfig.from_dict(values)


def test_keys_that_nobody_here_knows_are_kept() -> None:
    others = {
        "torch_dtype": "bfloat16",
        "head_dim": 64,
        "qk_head_dim": 96,
        "router_aux_loss_coef": 0.1,
        "use_cache": True,
    }
    assert others.items() <= DeepSeekConfig.from_dict(values_of("tiny_v3", **others)).extra.items()


@pytest.mark.parametrize("name", ALL)
def test_both_rope_forms_give_the_same_configuration(name: str) -> None:
    old = values_of(name)
    scaling = old.pop("rope_scaling") or {"type": "default"}
    parameters = {"rope_type": scaling.pop("type"), "rope_theta": old.pop("rope_theta"), "attention_factor": None}
    new = DeepSeekConfig.from_dict({**old, "rope_parameters": {**parameters, **scaling}})
    assert new == DeepSeekConfig.from_dict(values_of(name))


def test_rope_forms_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="contradict"):
        DeepSeekConfig.from_dict(values_of(rope_parameters={"rope_type": "default", "rope_theta": 50000.0}))


@pytest.mark.parametrize("name", ALL)
def test_transformers_reads_what_we_write_and_we_read_what_it_writes(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = DeepSeekConfig.from_file(MODELS / f"{name}.json")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(theirs).__name__ == config.to_dict()["architectures"][0].replace("ForCausalLM", "Config")
    for field in dataclasses.fields(config):
        if field.name not in ("rope_scaling", "rope_theta", "extra"):
            assert getattr(theirs, field.name) == getattr(config, field.name), field.name
    theirs.save_pretrained(tmp_path / "again")
    again = DeepSeekConfig.from_file(tmp_path / "again" / "config.json")
    assert again == config


def test_missing_keys_are_listed_all_at_once() -> None:
    values = values_of(hidden_size=REMOVE, kv_lora_rank=REMOVE, q_lora_rank=REMOVE)
    with pytest.raises(ValueError, match="missing keys: hidden_size, q_lora_rank, kv_lora_rank$"):
        DeepSeekConfig.from_dict(values)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "llama"}, "model_type 'llama' isn't a DeepSeek model: give one of deepseek_v2, deepseek_v3"),
        ({"model_type": REMOVE}, "model_type None"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 is above the 4 experts of topk_group 2 out of n_group 4"),
        ({"n_group": 3}, "n_routed_experts 8 isn't divisible by n_group 3"),
        ({"topk_group": 5}, "topk_group 5 is above n_group 4"),
        ({"n_group": 8, "topk_group": 4}, "n_group 8 leaves 1 expert a group.*lower n_group to 4"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' isn't one of deepseek_v3's: use noaux_tc"),
        ({"topk_method": "best"}, "topk_method 'best'"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' isn't deepseek_v3's: use 'sigmoid'"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim 15 is odd"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings True isn't supported"),
        ({"attention_bias": True}, "attention_bias True isn't supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' isn't supported by this model: set it to 'silu'"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2 differs from num_attention_heads 4"),
        ({"hidden_size": 256.5}, "hidden_size 256.5 must be a whole number of at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0 must be a whole number of at least 1"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob 'yes' must be true or false"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps -1.0 must be a number of at least 0"),
        ({"moe_layer_freq": [1, 0]}, r"moe_layer_freq \[1, 0\] must be a whole number"),
        ({"seq_aux": False}, "seq_aux false with aux_loss_alpha 0.0001.*micro-batch size"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling type 'linear' isn't supported: use 'yarn'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "lacks original_max_position_embeddings"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 9, "low": 1}},
            "rope_scaling keys low aren't supported",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 0.5, "original_max_position_embeddings": 9}},
            "factor 0.5 would shrink",
        ),
    ],
)
def test_a_bad_configuration_is_refused_with_its_numbers(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        DeepSeekConfig.from_dict(values_of(**changes))
    (tmp_path / "bad.json").write_text(json.dumps(values_of(**changes)))
    with pytest.raises(ValueError, match="bad.json: "):
        DeepSeekConfig.from_file(tmp_path / "bad.json")


def test_greedy_looks_at_all_experts_whatever_the_groups_say() -> None:
    config = DeepSeekConfig.from_dict(values_of("tiny_v2", num_experts_per_tok=8, n_group=None, topk_group=None))
    assert (config.n_group, config.topk_group) == (1, 1)
    with pytest.raises(ValueError, match="num_experts_per_tok 9 is above the 8 experts"):
        dataclasses.replace(config, num_experts_per_tok=9)
    DeepSeekConfig.from_dict(values_of("tiny_v2", num_experts_per_tok=8, n_group=4, topk_group=1))


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{'vocab_size': 3}")
    with pytest.raises(ValueError, match="config.json: Expecting property name"):
        DeepSeekConfig.from_file(tmp_path / "config.json")
    with pytest.raises(FileNotFoundError):
        DeepSeekConfig.from_file(tmp_path / "nothing.json")
