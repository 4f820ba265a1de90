"""Trains a tiny model on any layout and returns what layouts are compared by.

Used by the layout-invariance tests of every room. The functions that run on the ranks of a pool live here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model.config import DeepSeekConfig
from model.microbatch import MicroBatch
from model.router import Router
from parallel.mesh import Layout, Mesh
from parallel.sharding import sharding_of, valid_part
from training.arguments import Arguments
from training.engine import Engine

CONFIGS = Path(__file__).parent.parent / "configs" / "models"


@dataclass(frozen=True)
class Job:
    """What is trained: the model, the layout, the flags; everything that decides the numbers.

    favour: added to every token's scores where experts are chosen, by expert: makes a batch unbalanced.
    """

    layout: Layout = Layout()
    config: str = "tiny_v3"
    overrides: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    steps: int = 10
    global_batch: int = 4
    micro_batch: int = 1
    length: int = 48
    lr: float = 0.0
    favour: tuple[float, ...] = ()

    def model(self) -> DeepSeekConfig:
        return dataclasses.replace(DeepSeekConfig.from_file(CONFIGS / f"{self.config}.json"), **self.overrides)


@dataclass
class Shard:
    """One rank's part of a tensor: part number `index` along `split_dim`, which is None for a whole one."""

    tensor: np.ndarray
    split_dim: int | None
    index: int


@dataclass
class Curve:
    """One rank's record of a run. first_*: of step 1; loads, margins: by layer, for every step; dropped: shares."""

    losses: list[dict[str, float]]
    norms: list[float]
    initial: dict[str, Shard]
    first_gradients: dict[str, Shard]
    final: dict[str, Shard]
    loads: list[dict[int, list[int]]]
    margins: list[dict[int, float]]
    biases: dict[int, list[float]]
    dropped: list[float] = field(default_factory=list)


def flags_of(job: Job) -> Arguments:
    """The command line's arguments for this job."""
    return Arguments().replace(
        tensor_model_parallel_size=job.layout.tp,
        pipeline_model_parallel_size=job.layout.pp,
        context_parallel_size=job.layout.cp,
        expert_model_parallel_size=job.layout.ep,
        **job.flags,
    )


def tokens_of_step(job: Job, step: int, vocab: int) -> torch.Tensor:
    """[global batch, s + 1] of a text with something to learn: few frequent tokens, often followed by their double."""
    generator = torch.Generator().manual_seed(1000 + step)
    weights = 1.0 / torch.arange(1, vocab + 1, dtype=torch.float64) ** 1.3
    shape = (job.global_batch, job.length + 1)
    tokens = torch.multinomial(weights, shape[0] * shape[1], replacement=True, generator=generator).view(shape)
    follow = torch.rand(shape, generator=generator) < 0.5
    for i in range(1, shape[1]):
        tokens[:, i] = torch.where(follow[:, i], (2 * tokens[:, i - 1] + 1) % vocab, tokens[:, i])
    return tokens


def microbatches_of_step(job: Job, step: int, vocab: int, dp_rank: int, dp_size: int) -> list[MicroBatch]:
    """This dp rank's micro-batches; a seventh of the labels is masked, unevenly over sequences."""
    tokens = tokens_of_step(job, step, vocab)
    mask = torch.rand(tokens[:, 1:].shape, generator=torch.Generator().manual_seed(step)) > 1 / 7
    mask[0] &= torch.arange(job.length) % 2 == 0
    batches = []
    for first in range(dp_rank * job.micro_batch, job.global_batch, dp_size * job.micro_batch):
        rows = slice(first, first + job.micro_batch)
        positions = torch.arange(job.length).expand(job.micro_batch, -1)
        batches.append(MicroBatch(tokens[rows, :-1], tokens[rows, 1:], mask[rows].float(), positions))
    return batches


def shards(tensors: dict[str, torch.Tensor], mesh: Mesh) -> dict[str, Shard]:
    """This rank's valid part of every tensor (each carries, or stands for, an annotated parameter)."""
    found = {}
    for name, tensor in tensors.items():
        sharding = sharding_of(tensor)
        part = valid_part(tensor, sharding, mesh).detach().float().numpy().copy()
        axis = sharding.axis_of(mesh)
        found[name] = Shard(part, sharding.split_dim, 0 if axis is None else axis.rank)
    return found


def margin_of(router: Router, scores_te: torch.Tensor) -> float:
    """How far the closest token is from another choice: the least gap between the last kept and the first left out."""
    config = router.config
    choice = scores_te + router.e_score_correction_bias if config.has_router_bias else scores_te
    gaps = []
    if config.topk_method != "greedy" and config.n_group > 1:
        grouped = choice.unflatten(-1, (config.n_group, -1))
        worth = grouped.topk(2, -1).values.sum(-1) if config.has_router_bias else grouped.amax(-1)
        if config.topk_group < config.n_group:
            best = worth.topk(config.topk_group + 1, -1).values
            gaps.append((best[:, -2] - best[:, -1]).min())
        kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(-1, worth.topk(config.topk_group, -1).indices, True)
        choice = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)
    if config.num_experts_per_tok < config.n_routed_experts:
        best = choice.topk(config.num_experts_per_tok + 1, -1).values
        gaps.append((best[:, -2] - best[:, -1]).min())
    return float(torch.stack(gaps).min()) if gaps else float("inf")


def train(job: Job) -> Curve:
    """Runs on every rank of a pool: `job.steps` steps on `job.layout`."""
    mesh = Mesh.create(job.layout)
    config = job.model()
    arguments = flags_of(job)
    engine = Engine(config, arguments, mesh)
    margins: dict[int, float] = {}

    def watch(router: Router) -> None:
        choose = router._choose

        def recorded(scores_te: torch.Tensor, batches: int) -> Any:
            if job.favour:
                scores_te = scores_te + torch.tensor(job.favour)
            margins[router.layer] = min(margins.get(router.layer, float("inf")), margin_of(router, scores_te))
            return choose(scores_te, batches)

        router._choose = recorded  # type: ignore[method-assign]

    for router in engine.routers:
        watch(router)

    parameters = dict(engine.named_parameters())
    curve = Curve([], [], shards(parameters, mesh), {}, {}, [], [], {})
    lr = job.lr or (1e-3 if arguments.optimizer.optimizer == "adamw" else 0.1)
    for step in range(job.steps):
        margins.clear()
        batches = microbatches_of_step(job, step, config.vocab_size, mesh.dp.rank, mesh.dp.size)
        if step == 0:
            engine.forward_backward(batches)
            gradients = {}
            for name, parameter in parameters.items():
                gradients[name] = parameter.main_grad.clone()
                gradients[name].sharding = parameter.sharding
            curve.first_gradients = shards(gradients, mesh)
            batches = microbatches_of_step(job, step, config.vocab_size, mesh.dp.rank, mesh.dp.size)
        result = engine.train_step(batches, lr)
        curve.losses.append(result.losses)
        curve.norms.append(result.grad_norm)
        curve.loads.append(dict(zip(engine.moe_layers, result.expert_loads.tolist(), strict=True)))
        curve.margins.append(dict(margins))
        curve.dropped.append(result.dropped_share)
        if step == 0:
            for router in engine.routers:
                curve.biases[router.layer] = router.e_score_correction_bias.tolist() if config.has_router_bias else []
    curve.final = shards(parameters, mesh)
    return curve


def whole(curves: list[Curve], kind: str) -> dict[str, np.ndarray]:
    """Every tensor put together from its shards; all copies of the same part must be bit-identical."""
    parts: dict[str, dict[int, np.ndarray]] = {}
    splits: dict[str, int | None] = {}
    for rank, curve in enumerate(curves):
        for name, shard in getattr(curve, kind).items():
            seen = parts.setdefault(name, {}).setdefault(shard.index, shard.tensor)
            splits[name] = shard.split_dim
            if not np.array_equal(seen, shard.tensor):
                raise AssertionError(f"{kind} {name}: rank {rank}'s copy differs from another rank's")
    return {
        name: by_rank[0]
        if splits[name] is None
        else np.concatenate([by_rank[i] for i in sorted(by_rank)], splits[name])
        for name, by_rank in parts.items()
    }


def relative_errors(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """‖Δ‖ / ‖reference‖ of every tensor; of one whose reference is zero, 0 or infinite."""
    assert found.keys() == expected.keys(), f"only on one side: {sorted(found.keys() ^ expected.keys())}"
    errors = {}
    for name, reference in expected.items():
        assert found[name].shape == reference.shape, f"{name}: {found[name].shape} for {reference.shape}"
        difference = float(np.linalg.norm((found[name].astype(np.float64) - reference).ravel()))
        norm = float(np.linalg.norm(reference.astype(np.float64).ravel()))
        errors[name] = difference / norm if norm else (np.inf if difference else 0.0)
    return errors
