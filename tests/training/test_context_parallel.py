"""Sequences split over ranks: what a border between chunks could spoil has one rank's losses, gradients and counts.

Documents, positions that restart, labels of MTP, and a rank without any label that counts; with recomputation and
deferred weight gradients. Whole curves are in `test_expert_parallel`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from model.attention import document_mask
from model.microbatch import MicroBatch
from parallel.context import chunk_spans
from parallel.mesh import Axis, Layout, Mesh
from tests.layouts import Job, Shard, flags_of, microbatches_of_step, relative_errors, shards, whole
from training.engine import Engine


@dataclasses.dataclass
class Result:
    """Of one global batch. losses: trained on, then of an evaluation; own_tokens: that counted in this rank's part."""

    losses: list[dict[str, float]]
    gradients: dict[str, Shard]
    loads: list[list[int]]
    own_tokens: float


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_mask_of_documents_has_this_ranks_rows_only(ranks: int) -> None:
    length = 4 * 2 * ranks
    documents = torch.randint(0, 2, (3, length)).cumsum(1)
    seen = (documents[:, :, None] == documents[:, None]) & torch.ones(length, length, dtype=torch.bool).tril()
    for rank in range(ranks):
        rows = [i for start, end in chunk_spans(length, ranks, rank) for i in range(start, end)]
        mask = document_mask(documents, Axis("cp", tuple(range(ranks)), rank))
        assert mask.shape == (3, 1, length // ranks, length)
        assert torch.equal(mask[:, 0], seen[:, rows])


def documents_of_step(job: Job, vocab: int, mesh: Mesh) -> list[MicroBatch]:
    """Documents that end at, before and after chunks' borders; rank 0 of cp 2 has no label that counts."""
    batches = microbatches_of_step(job, 0, vocab, mesh.dp.rank, mesh.dp.size)
    place = torch.arange(job.length)
    for i, batch in enumerate(batches):
        starts = torch.zeros(job.length, dtype=torch.long)
        starts[torch.tensor([job.length // 4, 5 + 3 * i, job.length // 2 - 1, job.length - 1])] = 1
        documents = starts.cumsum(0).expand_as(batch.tokens)
        begins = torch.where(starts.bool() | (place == 0), place, 0).cummax(0).values
        batch.documents, batch.positions = documents, (place - begins).expand_as(batch.tokens)
        for start, end in chunk_spans(job.length, 2, 0):
            batch.loss_mask[:, start:end] = 0.0
    return batches


def one_batch(job: Job) -> Result:
    mesh = Mesh.create(job.layout)
    config = job.model()
    engine = Engine(config, flags_of(job), mesh)
    batches = documents_of_step(job, config.vocab_size, mesh)
    own = 0.0
    for batch in batches:
        for start, end in chunk_spans(job.length, mesh.cp.size, mesh.cp.rank):
            own += float(batch.loss_mask[:, start:end].sum())
    result = engine.train_step(batches, lr=0.0)
    gradients = {}
    for name, parameter in engine.named_parameters():
        gradients[name] = parameter.main_grad.clone()
        gradients[name].sharding = parameter.sharding
    evaluated, _ = engine.evaluate(documents_of_step(job, config.vocab_size, mesh))
    return Result([result.losses, evaluated], shards(gradients, mesh), result.expert_loads.tolist(), own)


@pytest.mark.parametrize(
    "flags",
    [
        {
            "pipeline_schedule": "zb-h1",
            "recompute_granularity": "selective",
            "recompute_modules": ("mla_up_proj", "layernorm"),
        },
        {"recompute_granularity": "full"},
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mla_up_proj")},
    ],
    ids=["deferred weight gradients", "full", "attention"],
)
def test_documents_restarted_positions_and_a_rank_without_labels(
    run_ranks: Callable[..., Any], flags: dict[str, Any]
) -> None:
    """Under deferred weight gradients, and with what is recomputed."""
    plain = {"optimizer": "sgd", "clip_grad": 0.0}
    job = Job(overrides={"num_hidden_layers": 2, "num_nextn_predict_layers": 2}, flags=plain, micro_batch=2, length=40)
    (expected,) = run_ranks(1, one_batch, job)
    layout = Layout(cp=2, pp=2) if "pipeline_schedule" in flags else Layout(cp=2)
    found = run_ranks(2 * layout.pp, one_batch, dataclasses.replace(job, layout=layout, flags={**plain, **flags}))
    assert [result.own_tokens > 0 for result in found] == [False, True] * layout.pp
    assert all(expected.losses[0][name] > 0 for name in ("lm", "mtp_1", "mtp_2", "aux"))
    for result in found:
        for losses, wanted in zip(result.losses, expected.losses, strict=True):
            assert losses == pytest.approx(wanted, rel=1e-5)
        assert layout.pp > 1 or result.loads == expected.loads
    errors = relative_errors(whole(found, "gradients"), whole([expected], "gradients"))
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= 1e-5, f"gradient of {worst} is off by {errors[worst]:.2e}"
