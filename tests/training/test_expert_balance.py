"""Losses, counts and biases that balance experts, of whole steps: the same in any layout, counted once, told to all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallel.comm import gather_objects
from parallel.mesh import Layout, Mesh
from tests.layouts import Job, flags_of, microbatches_of_step, relative_errors, train, whole
from training.engine import Engine

# As heavy as the main loss, so that a fault in one of them is one in the gradient.
LOSSES = {
    "moe_device_level_aux_loss_coeff": 0.5,
    "moe_comm_aux_loss_coeff": 0.3,
    "moe_z_loss_coeff": 0.1,
}
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "aux_loss_alpha": 0.4}


def test_all_losses_and_their_gradients_are_the_same_in_any_layout(run_ranks: Callable[..., Any]) -> None:
    """tiny_v2 on tp2·pp2 with one sequence a micro-batch, with recomputation, and on one rank with two."""
    common = dict(config="tiny_v2", overrides=GROUPS, steps=2)
    flags = {"optimizer": "sgd", **LOSSES}
    one = [train(Job(micro_batch=2, flags=flags, **common))]
    four = run_ranks(
        4, train, Job(layout=Layout(tp=2, pp=2), flags=flags | {"recompute_granularity": "full"}, **common)
    )
    assert list(one[0].losses[0]) == ["lm", "aux", "device", "communication", "z"]
    assert min(one[0].losses[0].values()) > 0.1
    errors = relative_errors(whole(four, "first_gradients"), whole(one, "first_gradients"))
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= 1e-5, f"gradient of {worst} is off by {errors[worst]:.2e}"
    for curve in four:
        for losses, expected in zip(curve.losses, one[0].losses, strict=True):
            assert losses == pytest.approx(expected, rel=1e-5)
        assert curve.loads[0] == one[0].loads[0] and list(curve.loads[0]) == [1, 2, 3]


@pytest.mark.parametrize("changed", [{}, {"micro_batch": 2}, {"micro_batch": 4}, {"recompute_granularity": "full"}])
def test_biases_move_by_the_global_batchs_counts_and_validation_counts_nothing(changed: dict[str, Any]) -> None:
    """Of every MoE layer, MTP's among them: b += rate · sign(mean − load), after each of two steps."""
    job = Job(micro_batch=changed.get("micro_batch", 1), flags={k: v for k, v in changed.items() if k != "micro_batch"})
    engine = Engine(job.model(), flags_of(job), Mesh.create(Layout()))
    assert engine.moe_layers == [router.layer for router in engine.routers] == [1, 2, 3, 4]
    expected = torch.zeros(4, 8)
    for step in range(2):
        batches = [microbatches_of_step(job, step + i, engine.config.vocab_size, 0, 1) for i in (0, 7)]
        result = engine.train_step(batches[0], 1e-3)
        assert (result.expert_loads.sum(-1) == 4 * 48 * 2).all()
        assert torch.equal(torch.stack([router.load_e for router in engine.routers]), result.expert_loads)
        mean = 4 * 48 * 2 / 8
        expected += 0.001 * (mean - result.expert_loads.float()).sign()
        assert result.max_violations == pytest.approx((result.expert_loads.amax(-1) / mean - 1).tolist())
        assert result.dropped_share == 0 and result.sent_bytes == {}
        engine.evaluate(batches[1])
        assert torch.equal(torch.stack([router.load_e for router in engine.routers]), result.expert_loads)
    biases = torch.stack([router.e_score_correction_bias for router in engine.routers])
    assert torch.equal(biases, expected) and biases.abs().amax(-1).min() > 0


def steps_with_ledger(job: Job) -> list[tuple[Any, dict[str, int], dict[int, list[int]]]]:
    """On each rank, of two steps with a validation between: the result, all ranks' bytes by the ledger, counters."""
    mesh = Mesh.create(job.layout)
    engine = Engine(job.model(), flags_of(job), mesh)
    vocab = engine.config.vocab_size
    found: list[Any] = []
    report = engine._reported

    def counted(*arguments: Any) -> Any:
        sent: defaultdict[str, int] = defaultdict(int)
        for (axis, _), entry in mesh.ledger.entries.items():
            sent[axis] += entry.bytes
        at_report.update(sent)
        return report(*arguments)

    engine._reported = counted  # type: ignore[method-assign]
    for step in range(2):
        mesh.ledger.reset()
        at_report: dict[str, int] = {}
        result = engine.train_step(microbatches_of_step(job, 0, vocab, mesh.dp.rank, mesh.dp.size), 0.0)
        total: defaultdict[str, int] = defaultdict(int)
        for sent in gather_objects(at_report, mesh.world):
            for axis, count in sent.items():
                total[{"activations": "pp", "gradients": "pp"}.get(axis, axis)] += count
        own = {router.layer: [*router.load_e.tolist(), router.dropped.item()] for router in engine.routers}
        found.append((result, {axis: count for axis, count in total.items() if count}, own))
        engine.evaluate(microbatches_of_step(job, step, vocab, mesh.dp.rank, mesh.dp.size))
    return found


def test_every_rank_knows_what_all_ranks_sent_chose_and_dropped(run_ranks: Callable[..., Any]) -> None:
    """In each of two steps of the same batch and weights, whose counts begin anew."""
    flags = {"optimizer": "sgd", "router_bias_update_rate": 0.0, "moe_expert_capacity_factor": 1.0}
    ranks = run_ranks(4, steps_with_ledger, Job(layout=Layout(tp=2, pp=2), flags=flags))
    for step in range(2):
        results, totals, counts = zip(*(found[step] for found in ranks), strict=True)
        assert all(result.sent_bytes == totals[0] for result in results)
        assert totals[0].keys() == {"tp", "pp", "stage", "sequence", "world", "copies"}
        # On two columns of ranks: 4 micro-batches of [48/2, 1, 256] in fp32, there and back; from each rank the counts
        # of 4 layers. What connects channels before the first step isn't in it, nor the validation.
        assert totals[0]["pp"] == 2 * (2 * 4 * 24 * 256 * 4 + 2 * 4 * 9 * 8)
        assert {axis: totals[0][axis] for axis in totals[0].keys() - {"pp"}}.items() <= ranks[0][0][1].items()
        summed = defaultdict(lambda: [0] * 9)
        for own in counts:
            for layer, numbers in own.items():
                summed[layer] = [a + b for a, b in zip(summed[layer], numbers, strict=True)]
        assert results[0].dropped.tolist() == ranks[0][0][0].dropped.tolist()
        for result in results:
            assert result.expert_loads.tolist() == [summed[layer][:8] for layer in (1, 2, 3, 4)]
            assert result.dropped.tolist() == [summed[layer][8] for layer in (1, 2, 3, 4)]
            assert result.expert_loads.sum(-1).tolist() == [4 * 48 * 2] * 4 and 0 < result.dropped_share < 1
