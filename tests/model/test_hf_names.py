"""Names and shapes of Hugging Face's checkpoints, and reading a directory into shards: complete, exact, or refused.

May import `model` and `parallel`. Directories are written here; that transformers writes the same names is tested too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import model.hf
from model.config import DeepSeekConfig
from model.hf import HFDirectory, global_shapes, hf_repeats, hf_shapes, hf_tensors, load_hf_directory, to_hf
from parallel.mesh import Axis
from parallel.sharding import Sharding, shard_slice
from tests.model.hf_oracle import save as save_transformers
from tests.model.hf_oracle import tiny_config, transformers_model, under_global_names

MODELS = Path(__file__).parents[2] / "configs" / "models"
V3 = tiny_config("deepseek_v3", num_nextn_predict_layers=2, moe_intermediate_size=5, n_shared_experts=2)
V2 = tiny_config("deepseek_v2", q_lora_rank=None, first_k_dense_replace=0, moe_intermediate_size=7)
DENSE = tiny_config("deepseek_v3", first_k_dense_replace=3, n_shared_experts=0)
CONFIGS = pytest.mark.parametrize("config", [V3, V2, DENSE], ids=["v3", "v2", "dense"])


class FakeStage(nn.Module):
    """Shards of the whole model, split as the layers split them (and experts over ep), full of NaN until loaded."""

    def __init__(self, config: DeepSeekConfig, mesh: Any, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.mesh, self.tensors = mesh, {}
        for name, shape in global_shapes(config).items():
            sharding = split_of(name, shape)
            local = list(shape)
            if sharding.split_dim is not None:
                local[sharding.split_dim] = -(-local[sharding.split_dim] // sharding.axis_of(mesh).size)
            self.tensors[name] = nn.Parameter(torch.full(local, torch.nan, dtype=dtype))
            self.tensors[name].sharding = sharding

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.tensors.items() if not name.endswith("correction_bias"))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        yield "inv_freq", torch.zeros(3)  # a stage has buffers that no file holds
        yield from ((name, p.data) for name, p in self.tensors.items() if name.endswith("correction_bias"))


def split_of(name: str, shape: tuple[int, ...]) -> Sharding:
    """Every way a layer splits: rows, columns, the middle of [2, I, H], experts, and not at all."""
    if ".experts." in name:
        return Sharding(0, "ep", shape[0], expert=True)
    if name.endswith(("q_proj.weight", "q_b_proj.weight", "kv_b_proj.weight", "embed_tokens.weight", "lm_head.weight")):
        return Sharding(0, "tp", shape[0])
    if ".shared_experts." not in name and name.endswith("gate_up_proj.weight"):
        return Sharding(1, "tp", shape[1])
    if name.endswith(("o_proj.weight", "down_proj.weight")) and ".shared_experts." not in name:
        return Sharding(1, "tp", shape[1])
    return Sharding()


def mesh_of(tp: int = 1, tp_rank: int = 0, ep: int = 1, ep_rank: int = 0) -> Any:
    """As much of a mesh as reading needs: no communication takes part in it."""
    return SimpleNamespace(tp=Axis("tp", tuple(range(tp)), tp_rank), ep=Axis("ep", tuple(range(ep)), ep_rank))


def random_model(config: DeepSeekConfig, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in global_shapes(config).items()}


def write_directory(tensors: dict[str, Tensor], directory: Path, shards: int = 3) -> dict[str, str]:
    """Safetensors in `shards` files with an index, neighbours in different files; returns the index's map."""
    weight_map = {
        name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(sorted(tensors))
    }
    for file in set(weight_map.values()):
        held = {name: t.contiguous().clone() for name, t in tensors.items() if weight_map[name] == file}
        save_file(held, directory / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return weight_map


def load_all(directory: Path, config: DeepSeekConfig, tp: int, ep: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every rank's shards put together again; asserts that padding is zero and that replicas are equal."""
    whole = {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in global_shapes(config).items()}
    for tp_rank in range(tp):
        for ep_rank in range(ep):
            mesh = mesh_of(tp, tp_rank, ep, ep_rank)
            stage = FakeStage(config, mesh, dtype)
            load_hf_directory(directory, stage, config, mesh)
            for name, tensor in stage.tensors.items():
                place: tuple[slice, ...] = ()
                if (dim := tensor.sharding.split_dim) is not None:
                    axis = tensor.sharding.axis_of(mesh)
                    part = shard_slice(tensor.sharding.full_size, axis.size, axis.rank)
                    place = (slice(None),) * dim + (part,)
                    size = part.stop - part.start
                    assert not tensor.narrow(dim, size, tensor.shape[dim] - size).count_nonzero(), name
                    tensor = tensor.narrow(dim, 0, size)
                target = whole[name][place]
                assert target.isnan().all() or torch.equal(target, tensor.data), name
                target.copy_(tensor.data)
    return whole


@pytest.mark.parametrize(
    "name, tensors, parameters",
    [("deepseek_v2_lite", 5291, 15_706_484_224), ("deepseek_v3", None, 671_026_419_200)],
)
def test_counts_of_the_published_models(name: str, tensors: int | None, parameters: int) -> None:
    shapes = hf_shapes(DeepSeekConfig.from_file(MODELS / f"{name}.json"))
    main = [math.prod(shape) for name, shape in shapes.items() if not name.startswith("model.layers.61.")]
    assert sum(main) == parameters
    assert tensors is None or len(shapes) == tensors


@CONFIGS
def test_pieces_cover_every_element_once(config: DeepSeekConfig) -> None:
    names = []
    for name, shape in global_shapes(config).items():
        covered = torch.zeros(shape)
        for piece in hf_tensors(name, config):
            assert covered[piece.where].shape == hf_shapes(config)[piece.hf_name]
            covered[piece.where] += 1
            names.append(piece.hf_name)
        assert covered.min() == covered.max() == 1, name
    assert len(names) == len(set(names)) == len(hf_shapes(config))


@pytest.mark.parametrize("q_lora_rank", [None, 25])
@pytest.mark.parametrize("model_type, dense", [("deepseek_v2", 0), ("deepseek_v3", 2)])
def test_names_and_weights_are_those_that_transformers_saves(
    model_type: str, dense: int, q_lora_rank: int | None, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    config = tiny_config(model_type, first_k_dense_replace=dense, q_lora_rank=q_lora_rank, n_shared_experts=2)
    theirs = transformers_model(config, seed=3)
    save_transformers(theirs, tmp_path)
    saved: dict[str, tuple[int, ...]] = {}
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            saved |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    assert saved == hf_shapes(config)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = load_all(tmp_path, config, tp=2, ep=2, dtype=torch.float32)
    expected = under_global_names({**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}, config)
    for name, tensor in loaded.items():
        assert torch.equal(tensor, expected[name]), name


@CONFIGS
@pytest.mark.parametrize("tp, ep", [(1, 1), (2, 1), (3, 2), (1, 8)])
def test_round_trip_is_exact_in_any_split(config: DeepSeekConfig, tp: int, ep: int, tmp_path: Path) -> None:
    whole = random_model(config, seed=tp)
    hf = dict(to_hf(whole.items(), config))
    assert hf.keys() == hf_shapes(config).keys() | hf_repeats(config).keys()
    write_directory(hf, tmp_path)
    loaded = load_all(tmp_path, config, tp, ep, torch.float32)
    for name, tensor in whole.items():
        assert torch.equal(loaded[name], tensor), name


def test_one_file_in_bf16_fills_fp32_and_bf16_parameters_exactly(tmp_path: Path) -> None:
    whole = random_model(V2, seed=5, dtype=torch.bfloat16)
    save_file({name: t.contiguous().clone() for name, t in to_hf(whole.items(), V2)}, tmp_path / "model.safetensors")
    for dtype in (torch.float32, torch.bfloat16):
        for name, tensor in load_all(tmp_path, V2, 2, 1, dtype).items():
            assert tensor.dtype == dtype and torch.equal(tensor, whole[name].to(dtype)), name


def test_large_tensors_come_in_chunks_that_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = random_model(V3, seed=6)
    write_directory(dict(to_hf(whole.items(), V3)), tmp_path)
    heights = []
    read_from = HFDirectory.read_from

    def counted(self: HFDirectory, file: Any, name: str, part: tuple[slice, ...]) -> Tensor:
        heights.append(math.prod(at.stop - at.start for at in part))
        return read_from(self, file, name, part)

    monkeypatch.setattr(model.hf, "_CHUNK_BYTES", 4 * 200)
    monkeypatch.setattr(HFDirectory, "read_from", counted)
    loaded = load_all(tmp_path, V3, 2, 1, torch.float32)
    assert max(heights) <= 200
    for name, tensor in whole.items():
        assert torch.equal(loaded[name], tensor), name


def test_mtp_repeats_are_written_and_ignored_when_read(tmp_path: Path) -> None:
    whole = random_model(V3, seed=7)
    hf = dict(to_hf(whole.items(), V3))
    for layer in (3, 4):
        assert torch.equal(hf[f"model.layers.{layer}.embed_tokens.weight"], whole["embed_tokens.weight"])
        assert torch.equal(hf.pop(f"model.layers.{layer}.shared_head.head.weight"), whole["lm_head.weight"])
        hf[f"model.layers.{layer}.embed_tokens.weight"] = torch.full((203, 72), torch.nan)
    write_directory(hf, tmp_path)
    assert torch.equal(load_all(tmp_path, V3, 1, 1, torch.float32)["embed_tokens.weight"], whole["embed_tokens.weight"])


@pytest.mark.parametrize("tp", [1, 3])
def test_fp8_blocks_equal_a_scalar_reference(tp: int, tmp_path: Path) -> None:
    rows, columns = 16, 5  # smaller than the tensors, and dividing neither them nor their shards
    config = DeepSeekConfig.from_dict(
        {**V3.to_dict(), "quantization_config": {"quant_method": "fp8", "weight_block_size": [rows, columns]}}
    )
    hf = dict(to_hf(random_model(config, seed=8).items(), config))
    expected = dict(hf)
    chosen = ("model.layers.1.self_attn.", "model.layers.2.mlp.", "model.layers.0.mlp.", "lm_head.")
    for name in [name for name, t in hf.items() if t.ndim == 2 and name.startswith(chosen) and "gate.w" not in name]:
        quantised = hf[name].mul(30).to(torch.float8_e4m3fn)
        scale = torch.rand(math.ceil(quantised.shape[0] / rows), math.ceil(quantised.shape[1] / columns)) * 0.1
        hf[name], hf[f"{name}_scale_inv"] = quantised, scale
        values = quantised.float().tolist()
        expected[name] = torch.tensor(  # one product in fp32 for each value
            [
                [float(torch.tensor(v) * scale[i // rows, j // columns]) for j, v in enumerate(row)]
                for i, row in enumerate(values)
            ]
        )
    weight_map = write_directory(hf, tmp_path)
    assert any(weight_map[name] != weight_map.get(f"{name}_scale_inv", weight_map[name]) for name in hf)
    loaded = dict(to_hf(load_all(tmp_path, config, tp, 2, torch.float32).items(), config))
    for name in hf_shapes(config):
        assert torch.equal(loaded[name], expected[name]), name


def test_everything_wrong_is_listed_at_once_and_nothing_is_changed(tmp_path: Path) -> None:
    hf = dict(to_hf(random_model(V3, seed=9).items(), V3))
    hf["model.norm.weight"] = torch.zeros(5)
    del hf["model.layers.2.mlp.experts.7.up_proj.weight"]
    hf["model.layers.9.input_layernorm.weight"] = torch.zeros(72)
    hf["lm_head.weight"] = hf["lm_head.weight"].to(torch.float8_e4m3fn)
    hf["model.layers.1.mlp.gate.weight"] = torch.zeros(8, 72, dtype=torch.int32)
    weight_map = write_directory(hf, tmp_path, shards=40)
    gone = weight_map["model.layers.0.self_attn.o_proj.weight"]
    (tmp_path / gone).unlink()
    stage = FakeStage(V3, mesh_of())
    with pytest.raises(ValueError) as caught:
        load_hf_directory(tmp_path, stage, V3, mesh_of())
    lines = {line.strip() for line in str(caught.value).splitlines()}
    assert lines == {
        f"{tmp_path} doesn't hold the model of its configuration:",
        "missing shard files (1):",
        gone,
        "missing tensors (2):",
        "model.layers.2.mlp.experts.7.up_proj.weight",
        "lm_head.weight_scale_inv",
        "wrong shapes (1):",
        "model.norm.weight is [5], the configuration makes it [72]",
        "wrong dtypes (1):",
        "model.layers.1.mlp.gate.weight is I32, not one of F64, F32, F16, BF16, F8_E4M3",
        "unknown tensors (1):",
        "model.layers.9.input_layernorm.weight",
    }
    assert all(tensor.isnan().all() for tensor in stage.tensors.values())


def test_a_directory_of_another_model_is_summed_up(tmp_path: Path) -> None:
    write_directory(dict(to_hf(random_model(V2, seed=10).items(), V2)), tmp_path)
    with pytest.raises(ValueError, match=r"missing tensors \(\d+\)[\s\S]*… and \d+ more") as caught:
        HFDirectory(tmp_path, V3)
    assert len(str(caught.value).splitlines()) < 200


def test_scales_of_another_shape_or_without_fp8_are_refused(tmp_path: Path) -> None:
    hf = dict(to_hf(random_model(V2, seed=11).items(), V2))
    hf["lm_head.weight"] = hf["lm_head.weight"].to(torch.float8_e4m3fn)
    hf["lm_head.weight_scale_inv"] = torch.ones(1, 1)
    hf["model.embed_tokens.weight_scale_inv"] = torch.ones(2, 1)
    write_directory(hf, tmp_path)
    with pytest.raises(ValueError) as caught:
        HFDirectory(tmp_path, V2)
    assert r"lm_head.weight_scale_inv is [1, 1], blocks of [128, 128] make it [2, 1]" in str(caught.value)
    assert "unknown tensors (1):\n    model.embed_tokens.weight_scale_inv" in str(caught.value)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    weight_map = write_directory(dict(to_hf(random_model(V2, seed=12).items(), V2)), tmp_path)
    broken = tmp_path / weight_map["lm_head.weight"]
    broken.write_bytes(broken.read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"unreadable files \(1\):\n    {broken.name}") as caught:
        HFDirectory(tmp_path, V2)
    assert "missing tensors" not in str(caught.value)  # nobody knows yet
    (tmp_path / "model.safetensors.index.json").unlink()
    broken.rename(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors can't be read"):
        HFDirectory(tmp_path, V2)


def test_a_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has neither model.safetensors.index.json nor model.safetensors"):
        HFDirectory(tmp_path, V2)
    (tmp_path / "model.safetensors.index.json").write_text("[1]")
    with pytest.raises(ValueError, match="isn't an index of safetensors"):
        HFDirectory(tmp_path, V2)


def test_a_stage_of_another_configuration_is_refused(tmp_path: Path) -> None:
    write_directory(dict(to_hf(random_model(V2, seed=13).items(), V2)), tmp_path)
    other = FakeStage(tiny_config("deepseek_v2", q_lora_rank=None, v_head_dim=9), mesh_of())
    with pytest.raises(ValueError, match="kv_b_proj.weight is .* built from another one"):
        load_hf_directory(tmp_path, other, V2, mesh_of())
    assert all(tensor.isnan().all() for tensor in other.tensors.values())


def test_names_and_shapes_that_the_model_lacks_are_not_exported() -> None:
    with pytest.raises(ValueError, match="layers.0.mlp.gate.e_score_correction_bias isn't a tensor"):
        list(to_hf([("layers.0.mlp.gate.e_score_correction_bias", torch.zeros(8))], V2))
    with pytest.raises(ValueError, match=r"norm.weight is \[36\], the whole tensor is \[72\]"):
        list(to_hf([("norm.weight", torch.zeros(36))], V2))
