"""Gradients of the real model on real layouts: by hand under no_sync, and the norm, against one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed

from model.microbatch import set_denominators
from model.router import Router
from parallel.gradients import GradientReducer
from parallel.mesh import Layout, Mesh
from parallel.sharding import sharding_of, valid_part
from tests.layouts import Job, Shard, margin_of, microbatches_of_step, relative_errors, shards, whole
from training.arguments import Arguments
from training.engine import Engine

RunRanks = Callable[..., list[Any]]

# Small, with odd sizes where the layout allows: 211 ids don't divide by 2, so the last tp rank has a row of padding.
SMALL = {
    "vocab_size": 211,
    "hidden_size": 40,
    "intermediate_size": 44,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "initializer_range": 0.1,
}
REDUCING = ("world", "dp", "dp_cp", "stage", "edp", "copies")


@dataclass
class Gradients:
    """One rank's, of one step.

    gradients: as `tests.layouts.whole` takes them; calls: collectives by axis; margin: how far the router's closest
    choice was from another one.
    """

    gradients: dict[str, Shard]
    norm: float
    calls: dict[str, int]
    margin: float = float("inf")


def job_of(layout: Layout, seed: int, mtp: int) -> Job:
    return Job(layout, overrides={**SMALL, "num_nextn_predict_layers": mtp}, flags={"seed": seed}, length=24)


def engine_of(job: Job) -> Engine:
    layout = job.layout
    sizes = {"tensor_model_parallel_size": layout.tp, "pipeline_model_parallel_size": layout.pp}
    return Engine(job.model(), Arguments().replace(**sizes, **job.flags), Mesh.create(layout))


def collect(engine: Engine, calls: dict[str, int]) -> Gradients:
    tensors = {}
    for name, parameter in engine.named_parameters():
        tensors[name] = parameter.main_grad.clone()  # type: ignore[operator]
        tensors[name].sharding = sharding_of(parameter)
    norm = float(engine.reducer.norm())
    return Gradients(shards(tensors, engine.mesh), norm, calls)


def calls_by_axis(mesh: Mesh) -> dict[str, int]:
    names = {axis for axis, _ in mesh.ledger.entries}
    return {axis: mesh.ledger.calls(axis) for axis in sorted(names)}


def automatic(job: Job) -> Gradients:
    """A step's gradients by the engine, their padding then filled with what the norm must not see."""
    engine = engine_of(job)
    mesh = engine.mesh
    margins = [float("inf")]
    for router in engine.routers:

        def watched(
            scores_te: torch.Tensor, batches: int, router: Router = router, choose: Any = router._choose
        ) -> Any:
            margins.append(margin_of(router, scores_te))
            return choose(scores_te, batches)

        router._choose = watched  # type: ignore[method-assign]
    batches = microbatches_of_step(job, 0, job.model().vocab_size, mesh.dp.rank, mesh.dp.size)
    mesh.ledger.reset()
    engine.forward_backward(batches)
    calls = calls_by_axis(mesh)
    for parameter in engine.reducer.parameters:
        sharding = sharding_of(parameter)
        kept = valid_part(parameter.main_grad, sharding, mesh).clone()  # type: ignore[arg-type]
        parameter.main_grad.fill_(1e3)  # type: ignore[operator]
        valid_part(parameter.main_grad, sharding, mesh).copy_(kept)  # type: ignore[arg-type]
    return dataclasses.replace(collect(engine, calls), margin=min(margins))


def by_hand(job: Job) -> Gradients:
    """All micro-batches under `no_sync`, then torch.distributed itself, parameter by parameter."""
    engine = engine_of(job)
    mesh, reducer = engine.mesh, engine.reducer
    batches = microbatches_of_step(job, 0, job.model().vocab_size, mesh.dp.rank, mesh.dp.size)
    assert len(batches) > 1
    set_denominators(batches, job.model().num_mtp_layers, mesh)
    for stage in engine.stages.values():
        stage.train()
    schedule, shape = engine._schedule(len(batches), True), engine._shape(batches)
    reducer.zero()
    mesh.ledger.reset()
    with reducer.no_sync():
        engine.runtime.run(schedule, batches, shape, reducer)
    calls = calls_by_axis(mesh)
    for parameter in reducer.parameters:
        axes = [sharding_of(parameter).gradient_axis(mesh)]
        if sharding_of(parameter).pipeline_ranks:
            axes.append(mesh.copies(sharding_of(parameter).pipeline_ranks))
        for axis in axes:
            if axis.size > 1:
                torch.distributed.all_reduce(parameter.main_grad, group=axis.group)  # type: ignore[arg-type]
    return collect(engine, calls)


def on_one_rank(run_ranks: RunRanks, seed: int, mtp: int) -> tuple[int, dict[str, np.ndarray], Gradients]:
    """(seed, gradients by name, the rest) of the dense model, from the first seed that has no near tie of the router.

    Another layout's rounding, about 1e-7 of a score, may decide a nearer one otherwise.
    """
    while True:
        found = run_ranks(1, automatic, job_of(Layout(), seed, mtp))
        if found[0].margin > 1e-5:
            return seed, whole_gradients(found), found[0]
        seed += 1


def whole_gradients(found: list[Gradients]) -> dict[str, np.ndarray]:
    """Put together; raises where two ranks' copies differ in a bit."""
    return whole(found, "gradients")  # type: ignore[arg-type]


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], bound: float) -> None:
    errors = relative_errors(found, expected)
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= bound, f"gradient of {worst} is off by {errors[worst]:.1e}"


def test_no_sync_and_all_reduce_by_hand_give_the_automatic_gradients(run_ranks: RunRanks, seed: int) -> None:
    """TP2·DP2 with two micro-batches a rank. Inside no_sync only the model's own tensor-parallel collectives run."""
    seed, expected, _ = on_one_rank(run_ranks, seed, 1)
    job = job_of(Layout(tp=2), seed, mtp=1)
    automatically, manually = run_ranks(4, automatic, job), run_ranks(4, by_hand, job)
    assert_close(whole_gradients(manually), whole_gradients(automatically), 1e-6)
    assert_close(whole_gradients(manually), expected, 1e-5)
    for hand, auto in zip(manually, automatically, strict=True):
        assert {axis: hand.calls.get(axis, 0) for axis in REDUCING} == dict.fromkeys(REDUCING, 0)
        assert hand.calls.keys() == {"tp", "sequence"}
        # One message for the split parameters; one for experts and whole ones together, which have the same replicas.
        assert auto.calls["dp_cp"] == 1 and auto.calls.get("stage", 0) + auto.calls.get("edp", 0) == 1
        assert {axis: auto.calls[axis] for axis in hand.calls} == hand.calls
        assert hand.norm == pytest.approx(auto.norm, rel=1e-6)


def test_no_sync_on_data_parallel_ranks_has_no_collective_at_all(run_ranks: RunRanks, seed: int) -> None:
    seed, expected, _ = on_one_rank(run_ranks, seed, 1)
    job = job_of(Layout(), seed, mtp=1)
    manually = run_ranks(2, by_hand, job)
    assert [hand.calls for hand in manually] == [{}, {}]
    assert_close(whole_gradients(manually), expected, 1e-5)


@pytest.mark.parametrize("mtp", [0, 1])
def test_the_norm_counts_every_value_once(run_ranks: RunRanks, seed: int, mtp: int) -> None:
    """TP2·PP2, with MTP also two copies of the embedding. Padding, filled with 1e3 before, doesn't count."""
    seed, expected, alone = on_one_rank(run_ranks, seed, mtp)
    found = run_ranks(4, automatic, job_of(Layout(tp=2, pp=2), seed, mtp))
    assembled = whole_gradients(found)  # the copies of the embedding are bit-identical
    assert_close(assembled, expected, 1e-5)
    dense = float(np.sqrt(sum(np.square(x, dtype=np.float64).sum() for x in assembled.values())))
    for gradients in found:
        assert gradients.norm == pytest.approx(dense, rel=1e-6)
        assert gradients.norm == pytest.approx(alone.norm, rel=1e-5)
    assert ("copies" in found[0].calls) == (mtp == 1)
    holders = [sum("embed_tokens.weight" in part.gradients for part in found), len(found)]
    assert holders == ([4, 4] if mtp else [2, 4])


def one_expert_idle(seed: int) -> tuple[list[str], float]:
    """On each rank all tokens choose the same two experts: nobody waits for the idle ones' gradients."""
    job = job_of(Layout(), seed, mtp=0)
    engine = engine_of(job)
    mesh: Mesh = engine.mesh
    for router in engine.routers:
        router.e_score_correction_bias.fill_(-10.0)
        router.e_score_correction_bias[4 * mesh.rank : 4 * mesh.rank + 2] = 10.0
    reducer: GradientReducer = engine.reducer
    engine.forward_backward(microbatches_of_step(job, 0, job.model().vocab_size, mesh.dp.rank, mesh.dp.size))
    moved = [
        f"{name} {expert}"
        for name, parameter in reducer.named
        if "experts.down_proj" in name and "shared" not in name
        for expert in range(8)
        if parameter.main_grad[expert].any()  # type: ignore[index]
    ]
    return moved, float(reducer.norm())


def test_experts_without_tokens_on_a_rank_get_the_other_ranks_gradient(run_ranks: RunRanks, seed: int) -> None:
    (moved, norm), (moved_too, norm_too) = run_ranks(2, one_expert_idle, seed)
    assert moved == moved_too and norm == norm_too
    assert moved == [f"layers.{layer}.mlp.experts.down_proj {e}" for layer in (1, 2) for e in (0, 1, 4, 5)]


def orders(seed: int) -> list[list[str]]:
    """The model's parts as backward completes them, and as buckets hold them."""
    engine = engine_of(job_of(Layout(), seed, mtp=1))
    names = {parameter: name for name, parameter in engine.named_parameters()}
    done: list[str] = []
    for parameter, name in names.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: done.append(name))
    engine.forward_backward(microbatches_of_step(job_of(Layout(), seed, mtp=1), 0, 211, 0, 4))
    order = [names[parameter] for bucket in engine.reducer.buckets for parameter in bucket.parameters]

    def place(name: str) -> str:
        return name.split(".")[1] if name.startswith("layers.") else name.split(".")[0]

    return [list(dict.fromkeys(place(name) for name in names)) for names in (done, order)]


def test_buckets_come_in_the_order_in_which_backward_completes_them(run_ranks: RunRanks, seed: int) -> None:
    """Block by block, multi-token prediction's first: the head and the final norm wait for the main loss."""
    ((done, order),) = run_ranks(1, orders, seed)
    assert done == order == ["3", "lm_head", "norm", "2", "1", "0", "embed_tokens"]
