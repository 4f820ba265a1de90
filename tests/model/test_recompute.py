"""Recomputation: the same numbers to the bit, nothing computed more than twice, and the memory that shapes promise."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import model.attention
import model.mlp
import model.moe
from model.config import DeepSeekConfig
from model.deepseek import DeepSeekStage, build_stages
from model.microbatch import MicroBatch, set_denominators
from model.mlp import DenseMLP, SharedExpert
from model.moe import MoE
from model.options import ModelOptions
from model.router import routers
from parallel.gradients import GradientReducer
from parallel.mesh import Layout, Mesh
from parallel.recompute import discard, recomputed
from parallel.weight_gradient import WeightGradientQueue, adds_its_gradient
from tests.layouts import CONFIGS
from training.arguments import DEEPSEEK, DEEPSEEK_RECOMPUTES, RECOMPUTE_MODULES, TrainingArguments

NONE = ModelOptions()
CASES = {name: ModelOptions(recompute="selective", recompute_modules=(name,)) for name in RECOMPUTE_MODULES}
CASES["all but moe"] = ModelOptions(
    recompute="selective", recompute_modules=tuple(name for name in RECOMPUTE_MODULES if name != "moe")
)
CASES["all"] = ModelOptions(recompute="selective", recompute_modules=RECOMPUTE_MODULES)
CASES[DEEPSEEK] = ModelOptions(recompute="selective", recompute_modules=DEEPSEEK_RECOMPUTES)
CASES["full"] = ModelOptions(recompute="full")

SEQUENCE, SEQUENCES = 48, 2


def tiny(version: str) -> DeepSeekConfig:
    """One dense layer, one with experts, and MTP's."""
    config = DeepSeekConfig.from_file(CONFIGS / f"tiny_{version}.json")
    return dataclasses.replace(config, num_hidden_layers=2, hidden_size=64, intermediate_size=160, vocab_size=150)


def build(config: DeepSeekConfig, mesh: Mesh, options: ModelOptions, dtype: torch.dtype) -> DeepSeekStage:
    stage = build_stages(config, mesh, (0,), options, seed=1)[0]
    for parameter in stage.parameters():
        parameter.data = parameter.data.to(dtype)
    return stage


def batch_of(config: DeepSeekConfig, mesh: Mesh, seed: int, documents: bool = False) -> MicroBatch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (SEQUENCES, SEQUENCE + 1), generator=generator)
    positions = torch.arange(SEQUENCE).expand(SEQUENCES, -1)
    batch = MicroBatch(tokens[:, :-1], tokens[:, 1:], torch.ones(SEQUENCES, SEQUENCE), positions)
    batch.documents = positions // 20 if documents else None
    set_denominators([batch], config.num_mtp_layers, mesh)
    return batch


def numbers(stage: DeepSeekStage, batch: MicroBatch) -> dict[str, torch.Tensor]:
    """Loss, gradients, reported losses and the routers' counts of one forward and backward pass."""
    loss = stage(None, batch)
    loss.backward()
    found = {f"gradient of {name}": x.grad for name, x in stage.named_parameters() if x.grad is not None}
    found |= {f"reported {name}": x for name, x in batch.losses.items()}
    return found | {f"load {gate.layer}": gate.load_e for gate in routers([stage])} | {"loss": loss.detach()}


def differing(version: str, dtype: torch.dtype, seed: int) -> tuple[dict[str, list[str]], dict[str, tuple[int, int]]]:
    """Runs on each rank, split by tp and ep: by case what isn't the same to the bit, and added calls on tp and ep."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    config, mesh = tiny(version), Mesh.create(Layout(tp=world, ep=world))

    def run(options: ModelOptions) -> dict[str, torch.Tensor]:
        # V2 with documents: attention then has a mask.
        return numbers(build(config, mesh, options, dtype), batch_of(config, mesh, seed, documents=version == "v2"))

    expected = run(NONE)
    plain = [mesh.ledger.calls(axis) for axis in ("tp", "ep")]
    assert "reported aux" in expected
    if mesh.tp.is_first and version == "v3":
        assert "reported mtp_1" in expected
    wrong, added = {}, {}
    for name, options in CASES.items():
        mesh.ledger.reset()
        found = run(options)
        assert found.keys() == expected.keys()
        wrong[name] = [key for key in expected if not torch.equal(found[key], expected[key])]
        added[name] = (mesh.ledger.calls("tp") - plain[0], mesh.ledger.calls("ep") - plain[1])
    return wrong, added


@pytest.fixture
def seed() -> int:
    drawn = int(torch.seed() % 2**31)
    print(f"seed {drawn}")
    return drawn


@pytest.mark.parametrize(
    ("version", "dtype"), [("v3", torch.float32), ("v3", torch.bfloat16), ("v2", torch.float32)], ids=str
)
def test_loss_and_gradients_are_the_same_to_the_bit(version: str, dtype: torch.dtype, seed: int) -> None:
    wrong, _ = differing(version, dtype, seed)
    assert wrong == {name: [] for name in CASES}


@pytest.mark.parametrize("version", ["v3", "v2"])
def test_loss_and_gradients_are_the_same_over_tensor_and_expert_parallel_ranks(
    run_ranks: Callable[..., Any], version: str, seed: int
) -> None:
    for wrong, added in run_ranks(2, differing, version, torch.float32, seed):
        assert wrong == {name: [] for name in CASES}
        # A dense layer's input is gathered again; of whole blocks also latents, and a sum before what is kept last.
        blocks = tiny(version).num_layers_with_mtp
        again = {"mlp": 1, "all but moe": 1, "all": 1, "full": 2 * blocks + 1}
        # Rows travel again, and what weighs them; the router's counts are kept, so ranks needn't tell them again.
        rows = {name: 3 * (blocks - 1) for name in ("moe", "all", "full")}
        assert added == {name: (again.get(name, 0), rows.get(name, 0)) for name in CASES}


TWICE = {
    "core_attn": {"attention"},
    "mla_up_proj": {"q_b_proj", "kv_b_proj"},
    "layernorm": {"input_layernorm", "post_attention_layernorm", "q_a_layernorm", "kv_a_layernorm", "enorm", "hnorm"},
    "mlp": {"mlp", "dense_act"},
    "mlp_act": {"dense_act", "shared_act"},
    "moe": {"moe", "gate", "experts", "moe_act", "shared_experts", "shared_act"},
    "moe_act": {"moe_act"},
    "shared_experts": {"shared_experts", "shared_act"},
}
MTP_NORMS = {"enorm", "hnorm"}  # outside of the block
COUNTED = set().union(*TWICE.values(), {"self_attn", "q_a_proj", "o_proj"})


@contextmanager
def counted(stage_of: Callable[[], DeepSeekStage]) -> Iterator[tuple[DeepSeekStage, Counter[str]]]:
    """A stage and the number of forward passes of its parts; by kind, over all layers."""
    runs: Counter[str] = Counter()

    def count(name: str | Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            runs[name if isinstance(name, str) else name(*args)] += 1
            return function(*args)

        return wrapped

    def whose(gate_up: torch.Tensor) -> str:
        """Dense layers are wider than shared experts."""
        return "dense_act" if gate_up.shape[-1] == 2 * stage.config.intermediate_size else "shared_act"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.attention, "attention", count("attention", model.attention.attention))
        patch.setattr(model.moe, "swiglu", count("moe_act", model.moe.swiglu))
        patch.setattr(model.mlp, "swiglu", count(whose, model.mlp.swiglu))
        stage = stage_of()
        for path, module in stage.named_modules():
            kind = "moe" if isinstance(module, MoE) else path.rpartition(".")[2]
            if path.endswith("shared_experts.gate_up_proj"):  # a shared expert's halves are called apart
                kind = "shared_experts"
            if kind in COUNTED and not isinstance(module, SharedExpert):
                # Before, not after: a second run ends inside its last module.
                module.register_forward_pre_hook(lambda *_, kind=kind: runs.update([kind]))
        yield stage, runs


@pytest.mark.parametrize("case", CASES)
def test_what_is_recomputed_runs_twice_a_micro_batch_and_the_rest_once(case: str, seed: int) -> None:
    config, mesh = tiny("v3"), Mesh.create(Layout())
    twice = (
        COUNTED - MTP_NORMS if case == "full" else set().union(*(TWICE[name] for name in CASES[case].recompute_modules))
    )
    with counted(lambda: build(config, mesh, CASES[case], torch.float32)) as (stage, runs):
        blocks, micro_batches = config.num_layers_with_mtp, 2
        dense = sum(isinstance(module, DenseMLP) for module in stage.modules())
        layers = {kind: blocks for kind in COUNTED} | {kind: dense for kind in TWICE["mlp"]}
        layers |= {kind: blocks - dense for kind in TWICE["moe"]}
        layers |= {kind: config.num_mtp_layers for kind in MTP_NORMS}
        for index in range(micro_batches):
            stage(None, batch_of(config, mesh, seed + index)).backward()
        assert runs == {kind: micro_batches * layers[kind] * (2 if kind in twice else 1) for kind in COUNTED}

        runs.clear()
        with torch.no_grad():
            evaluated = stage(None, batch_of(config, mesh, seed))
        assert runs == layers
    assert torch.equal(evaluated, build(config, mesh, NONE, torch.float32)(None, batch_of(config, mesh, seed)))


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages made inside that still live, whoever holds them."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        owned = [x for weight in stage.parameters() for x in (weight, getattr(weight, "main_grad", weight))]
        self.known = {StorageWeakRef(x.untyped_storage()).cdata for x in owned}
        self.made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                weak = StorageWeakRef(tensor.untyped_storage())
                if weak.cdata not in self.known:
                    self.made.setdefault(weak.cdata, weak)
        return result

    def total(self) -> int:
        alive = [torch.UntypedStorage._new_with_weak_ptr(weak.cdata) for weak in self.made.values()]
        return sum(storage.nbytes() for storage in alive if storage is not None)


def kept_after_forward(config: DeepSeekConfig, options: ModelOptions, dtype: torch.dtype = torch.float32) -> int:
    """Bytes that wait for the backward pass."""
    mesh = Mesh.create(Layout())
    stage, batch = build(config, mesh, options, dtype), batch_of(config, mesh, seed=1)
    with LiveBytes(stage) as live:
        loss = stage(None, batch)
        kept = live.total()
    assert loss.requires_grad
    return kept


def test_recomputation_frees_what_shapes_promise() -> None:
    config, tokens, float32 = tiny("v3"), SEQUENCE * SEQUENCES, 4
    blocks, dense, sparse = 3, 1, 2
    rows, inner = tokens * config.num_experts_per_tok, config.moe_intermediate_size
    heads, mtp = config.num_attention_heads, 2 * config.hidden_size
    values = {
        "layernorm": tokens
        * (blocks * (2 * config.hidden_size + config.kv_lora_rank + (config.q_lora_rank or 0)) + mtp),
        "mla_up_proj": blocks * tokens * heads * (2 * config.qk_head_dim + config.v_head_dim),
        "core_attn": blocks * tokens * heads * SEQUENCE,  # probabilities; a longer sequence keeps half of the square
        "mlp_act": tokens * (dense * config.intermediate_size + sparse * config.shared_intermediate_size),
        "mlp": dense * tokens * 3 * config.intermediate_size,
        "moe_act": sparse * rows * inner,
        "shared_experts": sparse * tokens * 3 * config.shared_intermediate_size,
    }
    values[DEEPSEEK] = sum(values[name] for name in DEEPSEEK_RECOMPUTES)
    values["all but moe"] = sum(values[name] for name in RECOMPUTE_MODULES if name not in ("moe", "mlp_act"))
    without = kept_after_forward(config, NONE)
    freed = {name: without - kept_after_forward(config, options) for name, options in CASES.items()}
    assert {name: freed[name] for name in values} == {name: count * float32 for name, count in values.items()}

    # Copied tokens and all activations, and a few numbers a token and expert of the router.
    experts = sparse * (rows * (config.hidden_size + 3 * inner) + tokens * 3 * config.shared_intermediate_size)
    router = sparse * tokens * 4 * config.n_routed_experts
    assert experts * float32 < freed["moe"] < (experts + router) * float32
    assert freed["all"] == freed["all but moe"] + freed["moe"] - freed["moe_act"] - freed["shared_experts"]

    # With full recomputation one more layer costs its input and its routing.
    deeper = dataclasses.replace(config, num_hidden_layers=3)
    more = kept_after_forward(deeper, CASES["full"]) - kept_after_forward(config, CASES["full"])
    assert 0 <= more - tokens * config.hidden_size * float32 <= tokens * 8 * config.n_routed_experts


def test_weight_gradients_that_are_put_off_see_what_was_recomputed_and_free_it(seed: int) -> None:
    config, mesh = tiny("v3"), Mesh.create(Layout())
    expected = numbers(build(config, mesh, NONE, torch.float32), batch_of(config, mesh, seed))
    for case, options in {"none": NONE, **CASES}.items():
        stage, batch = build(config, mesh, options, torch.float32), batch_of(config, mesh, seed)
        reducer = GradientReducer(stage.named_parameters(), mesh)
        queue = WeightGradientQueue(stage.parameters())
        with LiveBytes(stage) as live:
            with queue.collect() as collected:
                found = numbers(stage, batch)
            assert len(collected) == sum(adds_its_gradient(weight) for weight in stage.parameters()), case
            waiting = live.total()
            queue.run(collected)
            assert live.total() < 0.01 * waiting, case  # reported losses, counts, the router's choice
        reducer.finish()
        found |= {f"gradient of {name}": weight.main_grad for name, weight in stage.named_parameters()}
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == [], case


def test_discarded_outputs_are_back_for_every_consumer_and_freed_after_the_last() -> None:
    x = torch.randn(5, 3, requires_grad=True)
    weight = torch.randn(3, 3, requires_grad=True)
    calls = []

    def make() -> list[torch.Tensor]:
        calls.append(1)
        return [torch.sin(x), torch.cos(x)]

    def loss(forget: bool) -> torch.Tensor:
        a, b = make()
        out = (a @ weight) * (a.flatten() * b.flatten()).view(5, 3) + b**2
        if forget:
            discard([a, b], make, consumed=out)
            assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes() == 0
        return (out**2).sum()

    expected = torch.autograd.grad(loss(forget=False), [x, weight])
    calls.clear()
    total = loss(forget=True)
    for retain in (True, False):
        found = torch.autograd.grad(total, [x, weight], retain_graph=retain)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert len(calls) == 2


def test_deepseeks_list_is_one_word_of_the_flag() -> None:
    def modules(*names: str) -> tuple[str, ...]:
        return TrainingArguments(recompute_granularity="selective", recompute_modules=names).recomputed

    assert set(modules(DEEPSEEK)) == {"layernorm", "mla_up_proj", "mlp_act", "moe_act"}
    assert set(modules(DEEPSEEK, "core_attn", "moe_act")) == {*DEEPSEEK_RECOMPUTES, "core_attn"}
    assert modules() == ("core_attn",)


def test_without_gradients_nothing_is_discarded_or_wrapped() -> None:
    x = torch.randn(4)
    with torch.no_grad():
        discard([x], lambda: [x], consumed=x)
        assert torch.equal(recomputed(torch.sin, x), torch.sin(x))
    discard([x], lambda: [x], consumed=x)
    assert x.untyped_storage().nbytes() == 16
