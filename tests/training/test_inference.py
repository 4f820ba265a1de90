"""A model alone from a checkpoint or a directory, on any layout; its perplexity; what is refused before."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.generation import Decoder, generate
from model.microbatch import MicroBatch
from model.sampling import Sampling
from parallel.mesh import Layout, Mesh
from tests.layouts import Job, flags_of
from tests.training.test_checkpoint import SMALL
from tests.training.test_weights import saved_random
from training import checkpoint, weights
from training.engine import Engine
from training.evaluation import Windows, evaluate
from training.failures import ConfigurationError
from training.hf_files import INDEX
from training.inference import ModelSource, Request, load_model
from training.inference_arguments import InferenceArguments

JOB = Job(overrides=SMALL)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]


def fresh_ids(length: int) -> np.ndarray:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    return np.random.RandomState(seed).randint(0, JOB.model().vocab_size, length)


def used(source: str, ids: np.ndarray, windows: tuple[int, int], layouts: list[Layout]) -> list[Any]:
    """On every rank and layout: tokens that the model goes on with, nats and count of a text."""
    found = []
    for layout in layouts:
        model = load_model(ModelSource.find(Path(source)), Mesh.create(layout))
        continued: list[list[int]] = []
        if layout.cp == 1:
            decoder = Decoder(model.config, model.stage, model.mesh, model.dtype)
            continued = list(generate(decoder, PROMPTS, 6, Sampling()))
        found.append((continued, *evaluate(model, Windows(ids, *windows), 2)))
    return found


@torch.no_grad()
def nats_of(stage: Any, ids: np.ndarray) -> torch.Tensor:
    """Of every token but the first, each predicted from all before it, by plain torch: [len(ids) - 1]."""
    tokens = torch.from_numpy(ids[:-1]).unsqueeze(0)
    batch = MicroBatch(tokens, tokens, torch.ones(tokens.shape), torch.arange(tokens.shape[1]).unsqueeze(0))
    logits = stage.lm_head(stage.norm(stage.hidden(None, batch)))[:, 0]
    return torch.nn.functional.cross_entropy(logits, torch.from_numpy(ids[1:]), reduction="none")


def check_layouts(run_ranks: Callable[..., Any], tmp_path: Path, ranks: int, layouts: list[Layout]) -> None:
    path = saved_random(JOB, tmp_path)
    ids, cut = fresh_ids(75), (16, 12)
    (expected,) = used(str(path), ids, cut, [Layout()])
    for found in run_ranks(ranks, used, str(path), ids, cut, layouts):
        for layout, (continued, nats, tokens) in zip(layouts, found, strict=True):
            assert continued == (expected[0] if layout.cp == 1 else []), layout
            assert tokens == expected[2] == 74
            assert nats == pytest.approx(expected[1], rel=1e-5), layout


def test_a_checkpoint_of_one_rank_is_used_on_any_layout(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    check_layouts(run_ranks, tmp_path, 2, [Layout(tp=2), Layout(pp=2), Layout(ep=2), Layout(cp=2)])


@pytest.mark.full
def test_a_checkpoint_is_used_on_products_of_layouts(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    check_layouts(run_ranks, tmp_path, 4, [Layout(tp=2, pp=2), Layout(ep=4), Layout(cp=2, pp=2), Layout(tp=2, ep=2)])
    check_layouts(run_ranks, tmp_path / "8", 8, [Layout(tp=2, pp=2, ep=4), Layout(cp=2, tp=2, pp=2, ep=2)])


def test_the_model_is_the_checkpoints_and_that_of_its_weights(tmp_path: Path) -> None:
    path = saved_random(JOB, tmp_path / "run" / "checkpoints")
    engine = Engine(JOB.model(), flags_of(JOB), Mesh.create(Layout()))
    checkpoint.load(engine, path)
    weights.save(engine, tmp_path / "weights")
    for given in (tmp_path / "run", path.parent, path):
        source = ModelSource.find(given)
        assert (source.path, source.is_checkpoint) == (path, True)
    stage = load_model(ModelSource.find(tmp_path / "run"), Mesh.create(Layout())).stage
    trained = dict(engine.stages[0].state_dict())
    for name, tensor in stage.state_dict().items():
        assert torch.equal(tensor, trained[name]), name
    half = load_model(ModelSource.find(tmp_path / "weights"), Mesh.create(Layout()), torch.bfloat16).stage
    again = load_model(ModelSource.find(path), Mesh.create(Layout()), torch.bfloat16).stage
    for name, tensor in half.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
        assert tensor.dtype == (torch.float32 if "correction_bias" in name else torch.bfloat16)


def test_windows_predict_every_token_once_with_what_is_before_it_in_the_window(tmp_path: Path) -> None:
    model = load_model(ModelSource.find(saved_random(JOB, tmp_path)), Mesh.create(Layout()))
    ids = fresh_ids(50)
    for length, stride in ((50, 50), (49, 49), (16, 16), (16, 5), (7, 1), (24, 23)):
        windows = Windows(ids, length, stride)
        expected, done = 0.0, 0
        for number in range(len(windows)):
            part = ids[number * stride : number * stride + length + 1]
            new = number * stride + len(part) - 1 - done
            expected += float(nats_of(model.stage, part)[-new:].sum())
            done += new
        assert done == 49
        reported: list[int] = []
        nats, tokens = evaluate(model, windows, 3, reported.append)
        assert tokens == 49 and nats == pytest.approx(expected, rel=1e-5)
        assert reported[-1] == len(windows)
    for wrong, said in (((ids[:1], 8, 8), "1 tokens has nothing"), ((ids, 8, 9), "stride 9 must be from 1 to the 8")):
        with pytest.raises(ValueError, match=said):
            Windows(*wrong)


def refused(said: str, load: Path, **flags: Any) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Request.check(InferenceArguments(str(load), **flags), needs_tokenizer=False)


def test_what_is_wrong_is_told_from_headers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved_random(JOB, tmp_path / "run" / "checkpoints")
    monkeypatch.setattr("training.inference.load_model", None)
    refused("no-such is no directory", tmp_path / "no-such")
    refused("holds no complete checkpoint and no safetensors", tmp_path)
    refused("tokenizer-model .* does not exist", path, tokenizer_model=str(tmp_path / "no.model"))
    refused("--context-parallel-size 2 splits a sequence", path, context_parallel_size=2)
    refused("1 ranks can't be laid out as tensor 2", path, tensor_model_parallel_size=2)
    refused("--expert-model-parallel-size 0 must be at least 1", path, expert_model_parallel_size=0)
    monkeypatch.setenv("WORLD_SIZE", "3")
    refused("--tensor-model-parallel-size 3 doesn't divide", path, tensor_model_parallel_size=3)
    monkeypatch.delenv("WORLD_SIZE")
    other = tmp_path / "other.json"
    other.write_text(json.dumps(JOB.model().to_dict() | {"n_routed_experts": 16}))
    refused("of another model: n_routed_experts 8 there, 16 here", path, model=str(other))
    with pytest.raises(ConfigurationError, match="--tokenizer-model is missing: neither is there one beside"):
        Request.check(InferenceArguments(str(path)))

    meta = json.loads((path / checkpoint.META).read_text())
    meta["model"] |= {"hidden_size": meta["model"]["hidden_size"] + 2, "num_nextn_predict_layers": 3}
    (path / checkpoint.META).write_text(json.dumps(meta))
    refused(r"(?s)doesn't hold the model of its configuration:.*embed_tokens.weight is \[203, 64\].* is missing", path)
    (path / checkpoint.META).write_text("{")
    refused("is no complete checkpoint", path)


def test_a_directory_of_weights_with_faults_is_refused_whole(tmp_path: Path) -> None:
    engine = Engine(JOB.model(), flags_of(JOB), Mesh.create(Layout()))
    weights.save(engine, tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "gone.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    refused("(?s)--load .*missing shard files.*gone.safetensors", tmp_path)


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary(tmp_path: Path) -> None:
    model = load_model(ModelSource.find(saved_random(JOB, tmp_path)), Mesh.create(Layout()))
    model.stage.lm_head.weight.zero_()
    nats, tokens = evaluate(model, Windows(fresh_ids(30), 8, 8), 2)
    assert nats / tokens == pytest.approx(math.log(model.config.vocab_size), rel=1e-6)
