"""Logits and every gradient equal transformers', in fp32, on one rank and on TP2·PP2.

May import `model` and `parallel`. Weights travel as a user's do: transformers saves a directory, each of our ranks
loads its shards from it. Tolerance, per tensor: ‖Δ‖ ≤ 1e-5·‖reference‖, or 1e-7 of the norm over all gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import DeepSeekConfig
from model.deepseek import DeepSeekStage, ModelOptions, build_stages
from model.hf import global_shapes, load_hf_directory
from model.microbatch import MicroBatch, set_denominators
from parallel.comm import gather_objects
from parallel.gradients import GradientReducer
from parallel.mesh import Layout, Mesh
from parallel.pipeline.runtime import PipelineRuntime
from parallel.pipeline.schedule import make_schedule
from parallel.sharding import global_slice, sharding_of, valid_part
from tests.model import hf_oracle
from tests.model.hf_oracle import YARN, tiny_config

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


class Sample:
    """Four sequences with random masks, in `microbatches` equal parts."""

    def __init__(self, config: DeepSeekConfig, seed: int, length: int = 40) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, config.vocab_size, (4, length), generator=generator)
        self.labels = torch.randint(0, config.vocab_size, (4, length), generator=generator)
        self.loss_mask = (torch.rand((4, length), generator=generator) < 0.8).float()

    def microbatches(self, number: int) -> list[MicroBatch]:
        positions = torch.arange(self.tokens.shape[1]).expand(4 // number, -1)
        parts = (x.chunk(number) for x in (self.tokens, self.labels, self.loss_mask))
        return [MicroBatch(tokens, labels, mask, positions) for tokens, labels, mask in zip(*parts, strict=True)]


def forward_backward(
    directory: Path, config: DeepSeekConfig, sample: Sample, tp: int, pp: int, number: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """On every rank: whole logits [b, s, V] of all micro-batches, and whole gradients by global name."""
    mesh = Mesh.create(Layout(tp=tp, pp=pp))
    schedule = make_schedule("1f1b", pp, number)
    stages = build_stages(config, mesh, schedule.placement, ModelOptions(), seed=1)
    for stage in stages.values():
        load_hf_directory(directory, stage, config, mesh)
    named = [(name, p) for stage in stages.values() for name, p in stage.named_parameters()]
    reducer = GradientReducer(named, mesh)
    batches = sample.microbatches(number)
    set_denominators(batches, config.num_mtp_layers, mesh)
    logits = capture_logits(stages)
    shape = torch.Size((sample.tokens.shape[1] // tp, 4 // number, config.hidden_size))
    PipelineRuntime(mesh, stages, torch.float32).run(schedule, batches, shape, reducer)
    reducer.finish()

    parts = [(name, split_place(p, mesh), valid_part(p.main_grad, sharding_of(p), mesh)) for name, p in named]  # type: ignore[attr-defined]
    gathered = gather_objects((torch.cat(logits, dim=1).transpose(0, 1) if logits else None, parts), mesh.world)
    whole_logits = torch.cat([part for part, _ in gathered if part is not None], dim=-1)
    return whole_logits, assemble(config, [parts for _, parts in gathered])


def capture_logits(stages: dict[int, DeepSeekStage]) -> list[Tensor]:
    """Filled, during forward, with this rank's logits [s, b, V_local] of each micro-batch; empty without the head."""
    logits: list[Tensor] = []
    for stage in stages.values():
        if stage.last:
            stage.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output.detach()))
    return logits


def split_place(parameter: Tensor, mesh: Mesh) -> tuple[slice, ...]:
    """Where this rank's block lies in the whole tensor."""
    sharding = sharding_of(parameter)
    return (*[slice(None)] * (sharding.split_dim or 0), global_slice(sharding, mesh))


def assemble(config: DeepSeekConfig, ranks: list[list[tuple[str, tuple[slice, ...], Tensor]]]) -> dict[str, Tensor]:
    """Whole tensors from all ranks' blocks; asserts that replicas are equal and that nothing is missing."""
    whole = {name: torch.full(shape, torch.nan) for name, shape in global_shapes(config).items()}
    for parts in ranks:
        for name, place, block in parts:
            target = whole[name][place]
            assert target.isnan().all() or torch.equal(target, block), f"ranks disagree about {name}"
            target.copy_(block)
    whole = {name: tensor for name, tensor in whole.items() if not name.endswith("correction_bias")}
    assert not [name for name, tensor in whole.items() if tensor.isnan().any()]
    return whole


def errors(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """Each tensor's ‖Δ‖/‖reference‖; where the reference all but vanishes, ‖Δ‖ against 1e-2 of the norm over all.

    So that 1e-5 bounds both: relative for each tensor, or 1e-7 of the global norm.
    """
    assert ours.keys() == reference.keys()
    total = torch.stack([tensor.norm() for tensor in reference.values()]).norm()
    return {
        name: ((ours[name] - tensor).norm() / torch.maximum(tensor.norm(), 1e-2 * total)).item()
        for name, tensor in reference.items()
    }


def check_parity(config: DeepSeekConfig, seed: int, directory: Path, run_ranks: RunRanks | None) -> None:
    """Compares one rank, or with `run_ranks` TP2·PP2 with two micro-batches, against transformers."""
    sample = Sample(config, seed)
    theirs = hf_oracle.transformers_model(config, seed)
    hf_oracle.save(theirs, directory)
    expected_logits, expected = hf_oracle.logits_and_gradients(
        theirs, config, sample.tokens, sample.labels, sample.loss_mask
    )
    if run_ranks is None:
        logits, gradients = forward_backward(directory, config, sample, 1, 1, 1)
    else:
        logits, gradients = run_ranks(4, forward_backward, directory, config, sample, 2, 2, 2)[0]
    found = errors({"logits": logits}, {"logits": expected_logits}) | errors(gradients, expected)
    print(f"max relative error {max(found.values()):.1e} ({max(found, key=found.__getitem__)})")
    wrong = {name: f"{error:.1e}" for name, error in found.items() if not error <= 1e-5}
    assert not wrong, f"seed {seed}, {config}"


@pytest.fixture(autouse=True)
def _transformers() -> None:
    pytest.importorskip("transformers")


@pytest.mark.parametrize("name", CASES)
def test_one_rank_equals_transformers(name: str, tmp_path: Path) -> None:
    check_parity(CASES[name], list(CASES).index(name), tmp_path, None)


@pytest.mark.parametrize("name", CASES)
def test_tensor_and_pipeline_parallel_ranks_equal_transformers(name: str, tmp_path: Path, run_ranks: RunRanks) -> None:
    check_parity(CASES[name], 100 + list(CASES).index(name), tmp_path, run_ranks)
