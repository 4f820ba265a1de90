"""Logits and every gradient equal transformers', in fp32, on one rank, on TP2·PP2 and on TP2·PP2·EP2.

May import `model` and `parallel`. Weights travel as a user's do: transformers saves a directory, each of our ranks
loads its shards from it. Tolerance, per tensor: ‖Δ‖ ≤ 1e-5·‖reference‖, or 1e-7 of the norm over all gradients.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import DeepSeekConfig
from model.deepseek import DeepSeekStage, build_stages
from model.hf import global_shapes, load_hf_directory
from model.microbatch import MicroBatch, set_denominators
from model.options import ModelOptions
from parallel.comm import gather_objects
from parallel.gradients import GradientReducer
from parallel.mesh import Layout, Mesh
from parallel.pipeline.make import make_schedule
from parallel.pipeline.runtime import PipelineRuntime
from parallel.sharding import global_slice, sharding_of, valid_part
from tests.model import hf_oracle
from tests.model.hf_oracle import YARN, Oracle, tiny_config

RunRanks = Callable[..., list[Any]]

# q LoRA and not, YaRN and not, 1 and 4 groups, 0 to 3 dense layers first, top-k 2 to 4, widths of all kinds.
V2_GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
CASES = {
    "v3": tiny_config("deepseek_v3"),
    "v3-no-q-lora-yarn-dense-2": tiny_config(
        "deepseek_v3", q_lora_rank=None, rope_scaling=YARN, first_k_dense_replace=2, num_hidden_layers=4
    ),
    "v3-one-group-dense-0-two-shared": tiny_config(
        "deepseek_v3", n_group=1, topk_group=1, first_k_dense_replace=0, n_shared_experts=2, num_experts_per_tok=2
    ),
    "v3-yarn-unnormalised-odd-experts": tiny_config(
        "deepseek_v3", rope_scaling=YARN, norm_topk_prob=False, n_routed_experts=12, n_group=4, moe_intermediate_size=35
    ),
    "v3-wide-values-all-dense": tiny_config("deepseek_v3", first_k_dense_replace=3, v_head_dim=21, q_lora_rank=31),
    "v2": tiny_config("deepseek_v2", first_k_dense_replace=0),
    "v2-lite-shaped": tiny_config("deepseek_v2", q_lora_rank=None, rope_scaling=YARN, n_shared_experts=2),
    "v2-groups-scaled-dense-2": tiny_config(
        "deepseek_v2", **V2_GROUPS, routed_scaling_factor=4.0, first_k_dense_replace=2, rope_scaling=YARN
    ),
    "v2-groups-no-q-lora-top-4": tiny_config("deepseek_v2", **V2_GROUPS, q_lora_rank=None, num_experts_per_tok=4),
}


MTP = tiny_config("deepseek_v3", num_nextn_predict_layers=2, rope_scaling=YARN)


class Sample:
    """Four sequences with random masks, in equal micro-batches."""

    def __init__(self, config: DeepSeekConfig, seed: int, length: int = 40) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.sequences = torch.randint(0, config.vocab_size, (4, length + 1), generator=generator)
        self.loss_mask = (torch.rand((4, length), generator=generator) < 0.8).float()
        self.length = length

    def microbatches(self, number: int) -> list[MicroBatch]:
        positions = torch.arange(self.length).expand(4 // number, -1)
        parts = (x.chunk(number) for x in (self.sequences[:, :-1], self.sequences[:, 1:], self.loss_mask))
        return [MicroBatch(tokens, labels, mask, positions) for tokens, labels, mask in zip(*parts, strict=True)]


def forward_backward(
    directory: Path, config: DeepSeekConfig, sample: Sample, layout: Layout, number: int
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """On every rank: whole logits [b, s, V] of the main head and each MTP depth, whole gradients by global name."""
    mesh = Mesh.create(layout)
    schedule = make_schedule("1f1b", layout.pp, number)
    stages = build_stages(config, mesh, schedule.placement, ModelOptions(), seed=1)
    for stage in stages.values():
        load_hf_directory(directory, stage, config, mesh)
    named = [(name, p) for stage in stages.values() for name, p in stage.named_parameters()]
    reducer = GradientReducer(named, mesh)
    batches = sample.microbatches(number)
    set_denominators(batches, config.num_mtp_layers, mesh)
    logits = capture_logits(stages)
    shape = torch.Size((sample.length // layout.tp, 4 // number, config.hidden_size))
    PipelineRuntime(mesh, stages, torch.float32).run(schedule, batches, shape, reducer)
    reducer.finish()

    parts = []
    for name, p in named:
        block = valid_part(p.main_grad, sharding_of(p), mesh)  # type: ignore[attr-defined]
        parts.append((name, place_of(p, mesh), block))
    gathered = gather_objects((logits, parts), mesh.world)
    heads = 1 + config.num_mtp_layers  # each micro-batch passes all of them
    by_rank = [logits for logits, _ in gathered if logits]
    whole_logits = [
        torch.cat([torch.cat(logits[head::heads], dim=1) for logits in by_rank], dim=-1).transpose(0, 1)
        for head in range(heads)
    ]
    return whole_logits, assemble(config, [parts for _, parts in gathered])


def capture_logits(stages: dict[int, DeepSeekStage]) -> list[Tensor]:
    """Filled during forward with what this rank's head computes, [s, b, V_local] at a time; empty without the head."""
    logits: list[Tensor] = []
    for stage in stages.values():
        if stage.last:
            stage.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output.detach()))
    return logits


def place_of(parameter: Tensor, mesh: Mesh) -> tuple[slice, ...]:
    """Where this rank's block lies in the whole tensor."""
    sharding = sharding_of(parameter)
    return (*[slice(None)] * (sharding.split_dim or 0), global_slice(sharding, mesh))


def assemble(config: DeepSeekConfig, ranks: list[list[tuple[str, tuple[slice, ...], Tensor]]]) -> dict[str, Tensor]:
    """Whole tensors from all ranks' blocks; asserts that replicas are equal and that nothing is missing."""
    shapes = {name: shape for name, shape in global_shapes(config).items() if not name.endswith("correction_bias")}
    whole = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for parts in ranks:
        for name, place, block in parts:
            target = whole[name][place]
            assert target.isnan().all() or torch.equal(target, block), f"ranks disagree about {name}"
            target.copy_(block)
    assert not [name for name, tensor in whole.items() if tensor.isnan().any()]
    return whole


def errors(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """Each tensor's ‖Δ‖/‖reference‖, where ‖reference‖ counts as at least 1e-2 of the norm over all tensors.

    So 1e-5 bounds what is asked for: relative to the tensor, or 1e-7 of the global norm.
    """
    assert ours.keys() == reference.keys()
    total = torch.stack([tensor.norm() for tensor in reference.values()]).norm()
    return {
        name: ((ours[name] - tensor).norm() / torch.maximum(tensor.norm(), 1e-2 * total)).item()
        for name, tensor in reference.items()
    }


def check_parity(oracle: Oracle, directory: Path, seed: int, run_ranks: RunRanks | None, ep: int = 1) -> None:
    """Compares one rank, or with `run_ranks` TP2·PP2 and two micro-batches, against the directory's oracle."""
    config, sample = oracle.config, Sample(oracle.config, seed)
    scaling = ModelOptions().mtp_loss_scaling_factor
    expected_logits, expected = hf_oracle.logits_and_gradients(oracle, sample.sequences, sample.loss_mask, scaling)
    if run_ranks is None:
        logits, gradients = forward_backward(directory, config, sample, Layout(), 1)
    else:
        logits, gradients = run_ranks(4, forward_backward, directory, config, sample, Layout(tp=2, pp=2, ep=ep), 2)[0]
    found = errors(gradients, expected)
    for head, (ours, theirs) in enumerate(zip(logits, expected_logits, strict=True)):
        found |= errors({f"logits {head}": ours[:, : theirs.shape[1]]}, {f"logits {head}": theirs})
    print(f"max relative error {max(found.values()):.1e} ({max(found, key=found.__getitem__)})")
    wrong = {name: f"{error:.1e}" for name, error in found.items() if not error <= 1e-5}
    assert not wrong, f"seed {seed}, {config}"


def saved_oracle(config: DeepSeekConfig, seed: int, directory: Path) -> Oracle:
    model = hf_oracle.transformers_model(config, seed)
    hf_oracle.save(model, directory)
    return Oracle(config, model)


@pytest.fixture(autouse=True)
def _transformers() -> None:
    pytest.importorskip("transformers")


@pytest.mark.parametrize("name", CASES)
def test_one_rank_equals_transformers(name: str, tmp_path: Path) -> None:
    seed = list(CASES).index(name)
    check_parity(saved_oracle(CASES[name], seed, tmp_path), tmp_path, seed, None)


@pytest.mark.parametrize("name", CASES)
def test_tensor_pipeline_and_expert_parallel_ranks_equal_transformers(
    name: str, tmp_path: Path, run_ranks: RunRanks
) -> None:
    seed = 100 + list(CASES).index(name)
    check_parity(saved_oracle(CASES[name], seed, tmp_path), tmp_path, seed, run_ranks, ep=2)


@pytest.mark.parametrize("parallel", [False, True], ids=["one rank", "TP2·PP2"])
def test_mtp_equals_transformers_mtp_layers(parallel: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Two depths, loaded by transformers from a directory that we export; embedding and head have gradients of both."""
    hf_oracle.save_exported(hf_oracle.random_weights(MTP, seed=21), MTP, tmp_path)
    run_ranks = request.getfixturevalue("run_ranks") if parallel else None
    check_parity(Oracle.from_directory(MTP, tmp_path), tmp_path, 22, run_ranks)


@pytest.mark.parametrize("name", ["v3-no-q-lora-yarn-dense-2", "v2-lite-shaped"])
def test_packed_documents_equal_transformers_on_each_alone(name: str, tmp_path: Path) -> None:
    config = CASES[name]
    oracle = saved_oracle(config, 31, tmp_path)
    lengths = [1, 14, 25]
    tokens = Sample(config, 32, length=39).sequences[:1]
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).unsqueeze(0)
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    mesh = Mesh.create(Layout())
    stage = build_stages(config, mesh, (0,), ModelOptions(), seed=1)[0]
    load_hf_directory(tmp_path, stage, config, mesh)
    with torch.no_grad():
        batch = MicroBatch(tokens, tokens, torch.ones(tokens.shape), positions, documents)
        ours = stage.lm_head(stage.norm(stage.hidden(None, batch)))
        theirs = [oracle.main(input_ids=document).logits[0] for document in tokens.split(lengths, dim=1)]
    assert max(errors({"logits": ours[:, 0]}, {"logits": torch.cat(theirs)}).values()) <= 1e-5


def drawn_config(draw: random.Random) -> DeepSeekConfig:
    """Any shape that both transformers and tp 2 · pp 2 accept."""
    v3 = draw.random() < 0.6
    groups = draw.choice([1, 2, 4])
    per_group = draw.randint(2, 5)
    kept = draw.randint(1, groups)
    layers = draw.randint(2, 4)
    even = 1 if v3 else 2  # transformers' V2 needs even widths before the rotated values
    return tiny_config(
        "deepseek_v3" if v3 else "deepseek_v2",
        vocab_size=draw.randint(50, 300),
        hidden_size=4 * draw.randint(10, 25),
        intermediate_size=2 * draw.randint(10, 60),
        moe_intermediate_size=draw.randint(5, 50),
        num_hidden_layers=layers,
        first_k_dense_replace=draw.randint(0, layers),
        num_attention_heads=draw.choice([2, 4]),
        q_lora_rank=draw.choice([None, draw.randint(8, 40)]),
        kv_lora_rank=even * draw.randint(5, 15),
        qk_nope_head_dim=even * draw.randint(3, 10),
        qk_rope_head_dim=2 * draw.randint(1, 6),
        v_head_dim=draw.randint(5, 24),
        n_routed_experts=groups * per_group,
        n_group=groups,
        topk_group=kept,
        topk_method="noaux_tc" if v3 else draw.choice(["greedy", "group_limited_greedy"]),
        num_experts_per_tok=draw.randint(2, kept * per_group),
        n_shared_experts=draw.randint(1, 3),
        norm_topk_prob=v3 and draw.random() < 0.7,
        routed_scaling_factor=draw.choice([1.0, 2.5]),
        rope_scaling=draw.choice([None, YARN]),
        rope_theta=draw.choice([10000.0, 500.0]),
    )


@pytest.mark.full
@pytest.mark.parametrize("parallel", [False, True], ids=["one rank", "TP2·PP2"])
@pytest.mark.parametrize("attempt", range(15))
def test_freshly_drawn_configurations_equal_transformers(
    attempt: int, parallel: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    seed = random.SystemRandom().randrange(2**31)  # in the message of a failure
    config = drawn_config(random.Random(seed))
    run_ranks = request.getfixturevalue("run_ranks") if parallel else None
    check_parity(saved_oracle(config, seed, tmp_path), tmp_path, seed, run_ranks)
