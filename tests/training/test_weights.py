"""The model in 16 bits beside a checkpoint: written from any layout and shared state, read into any other."""

from __future__ import annotations

import dataclasses
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from model.hf import hf_shapes
from model.microbatch import MicroBatch
from parallel.mesh import Layout, Mesh
from parallel.sharding import sharding_of, valid_part
from tests.layouts import Job, flags_of
from tests.test_pretrain import Ranks, lines_of, ranks, workplace  # noqa: F401 (fixtures)
from tests.training.sharded_state import SharedState
from tests.training.test_checkpoint import EIGHT, SMALL, assembled, assert_identical
from tests.training.test_checkpoint_zero import loaded_plain, random_state, state_of
from training import checkpoint, hf_files, weights
from training.convert import import_directory
from training.engine import Engine
from training.failures import ConfigurationError

LIMIT = 1 << 16
"""Bytes of a file: many files."""


def saved_random(job: Job, path: Path, seed: int = 7) -> Path:
    """A checkpoint of one rank with random masters, moments and router biases."""
    engine = Engine(job.model(), flags_of(job), Mesh.create(Layout()))
    random_state(engine, seed)
    return checkpoint.save(engine, path, checkpoint.Position(3, 12), "")


def save_weights(job: Job, source: str, target: str, shared: bool) -> int:
    """Load a checkpoint and write its 16-bit weights on this layout; at most so many bytes of what was read live."""
    mesh = Mesh.create(job.layout)
    engine = Engine(job.model(), flags_of(job), mesh)
    if shared:
        engine.optimizer = SharedState(engine.optimizer, mesh)
    checkpoint.load(engine, Path(source))
    if isinstance(engine.optimizer, SharedState):
        engine.optimizer.live_bytes = 0
    weights.save(engine, Path(target), LIMIT)
    if not isinstance(engine.optimizer, SharedState):
        return 0
    return engine.optimizer.live_bytes - 2 * engine.optimizer.largest_bytes


def load_weights(job: Job, source: str, shared: bool) -> dict[str, Any]:
    mesh = Mesh.create(job.layout)
    engine = Engine(job.model(), flags_of(job), mesh)
    if shared:
        engine.optimizer = SharedState(engine.optimizer, mesh)
    for name in engine.optimizer.parameters:  # what was there before must go, padding and moments included
        for moment in (None, *engine.optimizer.moments):
            engine.optimizer.write(name, torch.ones(engine.optimizer.read(name).shape), moment)
    weights.load_weights(engine, Path(source))
    padding = 0.0
    for name, parameter in engine.optimizer.parameters.items():
        block, sharding = engine.optimizer.read(name).detach().clone(), sharding_of(parameter)
        assert torch.equal(parameter.detach(), block.to(parameter.dtype)), name
        valid_part(block, sharding, mesh).zero_()
        padding += float(block.abs().sum())
    return {"state": state_of(engine), "padding": padding}


def rounded(saved: dict[str, np.ndarray], dtype: torch.dtype = torch.bfloat16) -> dict[str, np.ndarray]:
    """What a start from the weights has: masters rounded, moments zero, biases as they were."""
    expected = {}
    for name, value in saved.items():
        kind = name.split(".")[0]
        if kind == "None":
            expected[name] = torch.from_numpy(value).to(dtype).float().numpy()
        else:
            expected[name] = value if kind == "layers" else np.zeros_like(value)
    return expected


def logits_of(engine: Engine) -> torch.Tensor:
    """[s, b, V] for fixed tokens, of a model that is whole on this rank."""
    (stage,) = engine.stages.values()
    tokens = torch.randint(0, engine.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    batch = MicroBatch(tokens, tokens, torch.ones(tokens.shape), torch.arange(24).expand(2, -1))
    with torch.no_grad():
        return stage.lm_head(stage.norm(stage.hidden(None, batch)))


LAYOUTS = [
    pytest.param(2, Layout(tp=2, ep=2), False, id="tp2 ep2"),
    pytest.param(2, Layout(), True, id="dp2 shared"),
    pytest.param(8, EIGHT, True, marks=pytest.mark.full, id="tp2 pp2 dp2 ep2 shared"),
    pytest.param(4, Layout(pp=4), False, marks=pytest.mark.full, id="pp4"),
    pytest.param(4, Layout(tp=4), False, marks=pytest.mark.full, id="tp4"),
    pytest.param(4, Layout(cp=2, ep=4), True, marks=pytest.mark.full, id="cp2 ep4 shared"),
]


@pytest.mark.parametrize(("ranks_", "layout", "shared"), LAYOUTS)
def test_weights_of_any_layout_load_in_any_other_with_the_same_logits(
    run_ranks: Callable[..., Any], tmp_path: Path, ranks_: int, layout: Layout, shared: bool
) -> None:
    one = Job(overrides=SMALL, length=16)
    config = one.model()
    source = str(saved_random(one, tmp_path))
    saved = loaded_plain(one, source)
    target = tmp_path / "weights"
    held = run_ranks(ranks_, save_weights, Job(layout=layout, overrides=SMALL), source, str(target), shared)
    assert max(held) <= 0  # one parameter, and the one before it until its name is taken

    index = json.loads((target / hf_files.INDEX).read_text())
    assert index["weight_map"].keys() == hf_shapes(config).keys()  # Hugging Face's names, each once
    size = 0
    for name in set(index["weight_map"].values()):
        assert stat.S_IMODE((target / name).stat().st_mode) == stat.S_IMODE((target / "config.json").stat().st_mode)
        tensors = load_file(target / name)
        assert all(index["weight_map"][tensor] == name for tensor in tensors)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= LIMIT
        size += sum(tensor.nbytes for tensor in tensors.values())
        for tensor, value in tensors.items():
            assert value.dtype == (torch.float32 if "correction_bias" in tensor else torch.bfloat16)
    assert index["metadata"]["total_size"] == size

    expected = rounded(assembled([saved]))
    plain = Engine(config, flags_of(one), Mesh.create(Layout()))
    weights.load_weights(plain, target)
    assert_identical(assembled([{"state": state_of(plain)}]), expected)
    reference = Engine(config, flags_of(one), Mesh.create(Layout()))
    checkpoint.load(reference, Path(source))
    assert not torch.equal(logits_of(reference), logits_of(plain))
    for _, parameter in reference.named_parameters():
        parameter.data = parameter.data.bfloat16().float()
    assert torch.equal(logits_of(reference), logits_of(plain))

    job = Job(layout=layout, overrides=SMALL, flags={"precision": "bf16"})
    loaded = run_ranks(ranks_, load_weights, job, str(target), shared)
    assert_identical(assembled(loaded), expected)
    assert all(rank["padding"] == 0.0 for rank in loaded)


def test_a_checkpoint_has_its_weights_and_they_are_found(tmp_path: Path) -> None:
    job = Job(overrides=SMALL, flags={"save_16bit_weights": True})
    engine = Engine(job.model(), flags_of(job), Mesh.create(Layout()))
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoint.save(engine, checkpoints, checkpoint.Position(2, 8), "")
    step = checkpoint.save(engine, checkpoints, checkpoint.Position(4, 16), "")
    assert {path.name for path in step.iterdir()} >= {"weights", "meta.json", "config.yaml"}
    for place in (tmp_path / "run", checkpoints, step, step / "weights"):
        assert checkpoint.find_weights(place) == step / "weights"
    plain = Engine(job.model(), flags_of(Job()), Mesh.create(Layout()))
    checkpoint.save(plain, checkpoints, checkpoint.Position(6, 24), "")
    for place in (tmp_path / "run", checkpoints, checkpoints / "step_00000006"):
        assert checkpoint.find_weights(place) == checkpoints / "step_00000006"  # without them: its fp32 masters
    assert checkpoint.find_weights(step) == step / "weights"
    assert checkpoint.find(step) == step  # what --load takes: one step, or the newest of a run
    assert checkpoint.find(tmp_path / "run") == checkpoint.find(checkpoints) == checkpoints / "step_00000006"
    assert checkpoint.find(tmp_path) is None
    with pytest.raises(ConfigurationError, match="holds neither weights nor a complete checkpoint"):
        checkpoint.find_weights(tmp_path)


def test_weights_of_another_model_are_refused_before_anything_changes(tmp_path: Path) -> None:
    job = Job(overrides=SMALL)
    engine = Engine(job.model(), flags_of(job), Mesh.create(Layout()))
    directory = tmp_path / "weights"
    weights.save(engine, directory)
    other = Engine(dataclasses.replace(job.model(), n_routed_experts=16), flags_of(job), Mesh.create(Layout()))
    before = {name: p.detach().clone() for name, p in engine.named_parameters()}
    with pytest.raises(ConfigurationError, match="another model: n_routed_experts 8 there, 16 here"):
        weights.load_weights(other, directory)

    with safe_open(next(directory.glob("*.safetensors")), "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    del tensors["model.layers.1.mlp.experts.3.down_proj.weight"], tensors["model.norm.weight"]
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][1:].clone()
    tensors["model.layers.0.mlp.up.weight"] = torch.ones(3)
    broken = tmp_path / "broken"
    broken.mkdir()
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, broken / "model.safetensors")
    (broken / "config.json").write_text((directory / "config.json").read_text())
    with pytest.raises(ConfigurationError) as caught:
        weights.load_weights(engine, broken)
    for said in (
        "missing tensors (2):",
        "model.layers.1.mlp.experts.3.down_proj.weight",
        "model.norm.weight",
        "unknown tensors (1):",
        "model.layers.0.mlp.up.weight",
        "model.embed_tokens.weight is [202, 64], the configuration makes it [203, 64]",
    ):
        assert said in str(caught.value)
    assert all(torch.equal(before[name], p) for name, p in engine.named_parameters())
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        weights.load_weights(engine, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", ["tiny_v2", "tiny_v3"])
def test_transformers_computes_the_same_from_the_weights(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    job = Job(config=name, overrides=SMALL)
    source = saved_random(job, tmp_path)
    engine = Engine(job.model(), flags_of(job), Mesh.create(Layout()))
    checkpoint.load(engine, source)
    weights.save(engine, tmp_path / "weights", LIMIT)
    weights.load_weights(engine, tmp_path / "weights")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "weights", dtype=torch.float32, experts_implementation="eager", attn_implementation="eager"
    )
    tokens = torch.randint(0, engine.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(input_ids=tokens).logits.transpose(0, 1)
    torch.testing.assert_close(logits_of(engine), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_a_run_starts_from_the_weights_of_another(workplace: Path, ranks: Ranks) -> None:  # noqa: F811
    first, second = workplace / "first", workplace / "second"
    ranks.start(workplace, "--save-16bit-weights", "--run-dir", str(first))
    for code, out, err in ranks.finish():
        assert code == 0, out + err
    for start, refused in (("--load", "no complete checkpoint"), ("--pretrained-checkpoint", "neither weights nor")):
        ranks.start(workplace, start, str(workplace), "--run-dir", str(second), world=1)
        ((code, _, err),) = ranks.finish()
        assert code == 2 and refused in err
    tp2 = ("--tensor-model-parallel-size", "2", "--eval-interval", "1", "--lr", "0")
    ranks.start(workplace, *tp2, "--pretrained-checkpoint", str(first), "--run-dir", str(second))
    for code, out, err in ranks.finish():
        assert code == 0, out + err
    # The learning rate is zero: what is validated after step 1 is what the first run ended with, rounded.
    ended, started = lines_of(first / "metrics.jsonl")[-1], lines_of(second / "metrics.jsonl")[0]
    assert started["step"] == 1 and started["valid_loss"] == pytest.approx(ended["valid_loss"], rel=1e-3)

    # By way of tools/hf_checkpoint.py: from a checkpoint with nothing but weights, and in another layout.
    imported, third = workplace / "imported", workplace / "third"
    import_directory(checkpoint.find_weights(first), imported)
    pp2 = ("--pipeline-model-parallel-size", "2", "--eval-interval", "1", "--lr", "0")
    ranks.start(workplace, *pp2, "--pretrained-checkpoint", str(imported), "--run-dir", str(third))
    for code, out, err in ranks.finish():
        assert code == 0, out + err
    assert lines_of(third / "metrics.jsonl")[0]["valid_loss"] == pytest.approx(started["valid_loss"], rel=1e-5)
    ranks.start(workplace, "--load", str(imported), "--run-dir", str(workplace / "fourth"), world=1)
    ((code, _, err),) = ranks.finish()
    assert code == 2 and "holds weights alone" in err
