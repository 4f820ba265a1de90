"""The bytes that a rank sends in one training step, by axis, equal a formula in the model's sizes.

What `parallel/comm.py` counts is what the best algorithm sends, whichever way a backend takes: on gloo a gather, a
reduce-scatter and a small all-reduce are exchanges inside, and are counted as what they stand for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallel.mesh import Layout, Mesh
from tests.layouts import Job, flags_of, microbatches_of_step
from training.engine import Engine
from training.precision import DTYPES

CASES = {
    "v3 cp2-tp2-pp2": (
        8,
        Job(
            layout=Layout(tp=2, cp=2, pp=2),
            overrides={"num_hidden_layers": 3, "num_nextn_predict_layers": 2},
            flags={"pipeline_layers": (2, 1)},
            global_batch=6,
            micro_batch=2,
            length=24,
        ),
    ),
    "v3 ep4-tp2-cp2": (
        8,
        Job(
            layout=Layout(tp=2, cp=2, ep=4),
            overrides={"num_hidden_layers": 3},
            global_batch=4,
            micro_batch=1,
            length=24,
        ),
    ),
    "v2 cp3-tp2 in bf16": (
        6,
        Job(
            layout=Layout(tp=2, cp=3),
            config="tiny_v2",
            overrides={"num_hidden_layers": 2},
            flags={"precision": "bf16"},
            global_batch=2,
            length=24,
        ),
    ),
}


@dataclasses.dataclass
class Sent:
    """What one rank did in a step: its place on every axis, bytes by axis, rows of its tokens to each rank of ep."""

    place: dict[str, int]
    by_axis: dict[str, int]
    rows: list[int]


def sent_in_a_step(job: Job) -> Sent:
    """Runs on every rank of a pool."""
    mesh = Mesh.create(job.layout)
    config = job.model()
    engine = Engine(config, flags_of(job), mesh)
    chosen: list[torch.Tensor] = []
    for router in engine.routers:

        def recorded(scores_te: torch.Tensor, batches: int, choose: Any = router._choose) -> Any:
            routing = choose(scores_te, batches)
            chosen.append(routing.expert_tk.flatten())
            return routing

        router._choose = recorded  # type: ignore[method-assign]
    mesh.ledger.reset()
    engine.train_step(microbatches_of_step(job, 0, config.vocab_size, mesh.dp.rank, mesh.dp.size), lr=0.1)
    target = torch.cat(chosen) // (config.n_routed_experts // mesh.ep.size)
    rows = [int((target == rank).sum()) for rank in range(mesh.ep.size)]
    return Sent(mesh.coordinates(), {axis: mesh.ledger.bytes(axis) for axis, _ in mesh.ledger.entries}, rows)


def formula(job: Job, ranks: int, stage: int, leaving: int, coming: int) -> dict[str, int]:
    """What one of `ranks` sends on pipeline stage `stage`, but for gradients. Counted in values, then in bytes.

    leaving, coming: rows of its tokens to experts of other ranks, and of their tokens to its own experts.
    """
    config = job.model()
    layout, h = job.layout, config.hidden_size
    tp, cp, pp, ep = layout.tp, layout.cp, layout.pp, layout.ep
    value = DTYPES[flags_of(job).training.precision].itemsize
    passes = job.global_batch // job.micro_batch * tp * cp * pp // ranks
    # A token's place in the sequence is on one of cp · tp ranks; `context` tokens of a micro-batch are in a tp group.
    context = job.length * job.micro_batch // cp
    tokens = context // tp

    first, last = stage == 0, stage == pp - 1
    counts = flags_of(job).parallel.pipeline_layers or (config.num_hidden_layers,)
    layers = range(sum(counts[:stage]), sum(counts[: stage + 1]))
    depths = config.num_mtp_layers if last else 0
    attentions = len(layers) + depths
    experts = sum(config.is_moe_layer(layer) for layer in layers) + depths
    dense = attentions - experts
    embeddings, heads = first + depths, (1 + depths if last else 0)

    # A gather sends each of a rank's values to size - 1 others, and so does the reduce-scatter that is its gradient.
    keys = config.kv_lora_rank + config.qk_rope_head_dim
    latents = (config.q_lora_rank or h) + keys
    over_tp = attentions * (latents + h) + dense * 2 * h + (embeddings + heads) * h
    over_cp = attentions * keys
    # An all-reduce sends 2 · (size - 1) / size: of the largest logit, and of the sum and the target's logit, in fp32.
    entropy = heads * 2 * 3 * context * 4 * (tp - 1) // tp
    # Of the choices that each sequence made of each expert, for the auxiliary loss, in fp32.
    choices = job.micro_batch * config.n_routed_experts
    auxiliary = round(2 * choices * 4 * (cp * tp - 1) / (cp * tp))
    # A row travels with its weight, comes back without; so do the gradients, the other way. Before, ranks tell each
    # other in int64 how many rows there are for each expert.
    numbers = passes * experts * config.n_routed_experts * 8 * (ep - 1) // ep
    expected = {
        "ep": (leaving * (h + 1) + coming * h + leaving * h + coming * (h + 1)) * value + numbers,
        "tp": passes * (2 * over_tp * tokens * value * (tp - 1) + entropy),
        "cp": passes * 2 * over_cp * context * value * (cp - 1),
        "activations": 0 if last else passes * tokens * h * value,
        "gradients": 0 if first else passes * tokens * h * value,
        "sequence": passes * experts * auxiliary,
    }
    if pp > 1 and config.num_mtp_layers and (first or last):  # copies of the embedding, on two pipeline ranks
        expected["copies"] = -(-config.vocab_size // tp) * h * 4
    return {axis: sent for axis, sent in expected.items() if sent}


@pytest.mark.parametrize("case", CASES)
def test_bytes_sent_in_a_step_are_those_of_the_formula(run_ranks: Callable[..., Any], case: str) -> None:
    ranks, job = CASES[case]
    found = run_ranks(ranks, sent_in_a_step, job)
    of_gradients_and_numbers = {"dp", "dp_cp", "stage", "edp", "world", "pp"}
    for rank, sent in enumerate(found):
        first = rank - sent.place["ep"]  # ep ranks are neighbours
        here = sent.place["ep"]
        leaving = sum(sent.rows) - sent.rows[here]
        coming = sum(found[first + peer].rows[here] for peer in range(job.layout.ep) if peer != here)
        assert job.layout.ep == 1 or min(leaving, coming) > 0
        by_axis = {axis: size for axis, size in sent.by_axis.items() if axis not in of_gradients_and_numbers}
        assert by_axis == formula(job, ranks, sent.place["pp"], leaving, coming), sent.place
