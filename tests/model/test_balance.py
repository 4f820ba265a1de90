"""Balance losses against sums written out by hand, and dropping on scores that one can follow. One rank."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from model.balance import Balance, within_budget
from model.config import DeepSeekConfig
from model.microbatch import Denominators, MicroBatch
from model.moe import MoE
from model.options import ModelOptions
from model.router import Router
from parallel.mesh import Layout, Mesh
from parallel.recompute import recomputed
from tests.layouts import CONFIGS

MESH = Mesh.create(Layout())
BALANCE = Balance(device_alpha=0.05, communication_alpha=0.02, z_coefficient=0.001)


@pytest.fixture
def seed() -> int:
    seed = int(torch.randint(2**31, ()).item())
    print("seed", seed)
    torch.manual_seed(seed)
    return seed


def model(name: str = "tiny_v3") -> DeepSeekConfig:
    config = DeepSeekConfig.from_file(CONFIGS / f"{name}.json")
    groups = dict(n_group=4, topk_group=2, n_routed_experts=12, num_experts_per_tok=3, hidden_size=20)
    if name == "tiny_v2":
        groups["topk_method"] = "group_limited_greedy"
    return dataclasses.replace(config, **groups, aux_loss_alpha=0.003)


def batch_of(sequences: int, length: int, whole: int) -> MicroBatch:
    """A micro-batch of a global batch of `whole` sequences."""
    tokens = torch.zeros(sequences, length, dtype=torch.int64)
    batch = MicroBatch(tokens, tokens, torch.ones_like(tokens, dtype=torch.float32), tokens)
    batch.denominators = Denominators(torch.tensor(1.0), (), torch.tensor(float(whole), dtype=torch.float64))
    return batch


def router_of(config: DeepSeekConfig, balance: Balance) -> Router:
    router = Router(config, MESH, 1, balance)
    torch.nn.init.normal_(router.weight)
    return router


def expected_losses(config: DeepSeekConfig, logits_te: torch.Tensor, choice_tk: list[list[int]], b: int, whole: int):
    """The papers' sums, a sequence, an expert and a token at a time. Token i of sequence j is row i·b + j."""
    e, k, d, m = config.n_routed_experts, config.num_experts_per_tok, config.n_group, config.topk_group
    score_te = logits_te.sigmoid() if config.scoring_func == "sigmoid" else logits_te.softmax(-1)
    share_te = score_te / score_te.sum(-1, keepdim=True)
    losses = dict.fromkeys(("aux", "device", "communication"), torch.zeros((), dtype=torch.float64))
    for sequence in range(b):
        rows = range(sequence, len(choice_tk), b)
        s = len(rows)
        f = [e / (k * s) * sum(choice_tk[row].count(i) for row in rows) for i in range(e)]
        p = [sum(share_te[row, i] for row in rows) / s for i in range(e)]
        members = [range(group * e // d, (group + 1) * e // d) for group in range(d)]
        losses["aux"] = losses["aux"] + 0.003 * sum(f[i] * p[i] for i in range(e)) / whole
        for experts in members:
            share = sum(p[i] for i in experts)
            mean = sum(f[i] for i in experts) / len(experts)
            sent = d / (m * s) * sum(any(i in experts for i in choice_tk[row]) for row in rows)
            losses["device"] = losses["device"] + 0.05 * mean * share / whole
            losses["communication"] = losses["communication"] + 0.02 * sent * share / whole
    squares = sum(logits.exp().sum().log() ** 2 for logits in logits_te)
    return losses | {"z": 0.001 * squares / (whole * len(choice_tk) / b)}


@pytest.mark.parametrize("name", ["tiny_v2", "tiny_v3"])
def test_losses_and_their_gradient_are_the_papers_sums(name: str, seed: int) -> None:
    config = model(name)
    router = router_of(config, BALANCE)
    batch = batch_of(sequences=3, length=7, whole=5)
    x_lbh = torch.randn(7, 3, 20)
    _, routing, auxiliary = router(x_lbh, batch)
    assert auxiliary is not None
    auxiliary.backward()

    weight = router.weight.detach().double().requires_grad_()
    logits_te = x_lbh.double().flatten(0, 1) @ weight.T
    expected = expected_losses(config, logits_te, routing.expert_tk.tolist(), 3, 5)
    assert list(batch.losses) == list(expected) == BALANCE.loss_names(config)
    for loss, value in expected.items():
        assert batch.losses[loss].item() == pytest.approx(value.item(), rel=1e-5), loss
    sum(expected.values()).backward()
    assert torch.allclose(router.weight.grad.double(), weight.grad, rtol=1e-4, atol=1e-7)


def test_only_the_losses_with_a_weight_are_there_and_count() -> None:
    config = dataclasses.replace(model(), aux_loss_alpha=0.0)
    router = router_of(config, Balance(z_coefficient=0.1))
    batch = batch_of(2, 5, 2)
    _, routing, _ = router(torch.randn(5, 2, 20), batch)
    assert list(batch.losses) == ["z"] and routing.sequence_counts_be is None
    plain = router_of(config, Balance())
    assert plain(torch.randn(5, 2, 20), batch_of(2, 5, 2))[2] is None


# Rows are tokens, columns their choices.
EXPERTS = torch.tensor([[0, 1], [0, 1], [0, 2], [1, 0]])
WEIGHTS = torch.tensor([[0.2, 0.9], [0.5, 0.5], [0.5, 0.1], [0.6, 0.4]])


@pytest.mark.parametrize(
    ("weights", "budget", "kept"),
    [
        # Expert 0 gets 0.2, 0.5, 0.5, 0.4 and of equal weights keeps the earlier; expert 1 gets 0.9, 0.5, 0.6.
        (WEIGHTS, 1, [[0, 1], [1, 0], [0, 1], [0, 0]]),
        (WEIGHTS, 2, [[0, 1], [1, 0], [1, 1], [1, 0]]),
        (WEIGHTS, 3, [[0, 1], [1, 1], [1, 1], [1, 1]]),
        (WEIGHTS, 4, [[1, 1], [1, 1], [1, 1], [1, 1]]),
        (None, 1, [[1, 1], [0, 0], [0, 1], [0, 0]]),
        (None, 2, [[1, 1], [1, 1], [0, 1], [0, 0]]),
    ],
)
def test_a_budget_keeps_the_heaviest_or_the_first(
    weights: torch.Tensor | None, budget: int, kept: list[list[int]]
) -> None:
    assert within_budget(EXPERTS, weights, 3, budget).int().tolist() == kept


def test_when_all_tokens_want_one_expert_it_takes_its_share() -> None:
    config = dataclasses.replace(model(), n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=1)
    expert_tk, weights_tk = torch.full((12, 1), 2), torch.rand(12, 1)
    kept = Balance(capacity_factor=1.0).kept(config, expert_tk, weights_tk)
    assert kept.sum() == 3 and weights_tk[kept].min() > weights_tk[~kept].max()
    assert Balance(capacity_factor=1e-3).kept(config, expert_tk, weights_tk).sum() == 1
    assert Balance(capacity_factor=1.1).kept(config, expert_tk, weights_tk).sum() == 4
    last = Balance(capacity_factor=1.0, drop_policy="position").kept(config, expert_tk, weights_tk)
    assert last.flatten().tolist() == [True] * 3 + [False] * 9


def test_a_device_drops_by_its_groups_budget(seed: int) -> None:
    config = model()  # groups of three experts
    expert_tk = torch.tensor([[0, 1, 2], [1, 2, 3], [0, 2, 5], [9, 10, 11]])
    weights_tk = torch.rand(4, 3)
    kept = Balance(capacity_factor=1.0, drop_level="device").kept(config, expert_tk, weights_tk)  # 3 of 12 each
    first = (expert_tk < 3) & kept
    assert first.sum() == 3 and weights_tk[first].min() > weights_tk[(expert_tk < 3) & ~kept].max()
    assert kept[expert_tk >= 3].all()


def run(
    balance: Balance, seed: int, training: bool = True, again: bool = False
) -> tuple[MoE, MicroBatch, torch.Tensor]:
    """An MoE layer's forward and backward with the same numbers for every balance."""
    torch.manual_seed(seed)
    moe = MoE(model(), MESH, 1, ModelOptions(balance=balance)).train(training)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    batch, x_lbh = batch_of(3, 7, 3), torch.randn(7, 3, 20, requires_grad=True)
    out_lbh = recomputed(moe, x_lbh, batch) if again else moe(x_lbh, batch)
    out_lbh.square().sum().backward()
    return moe, batch, torch.cat([out_lbh.detach().flatten(), x_lbh.grad.flatten(), moe.gate.weight.grad.flatten()])


def test_a_large_capacity_is_dropless_to_the_bit_and_a_small_one_isnt(seed: int) -> None:
    plain, batch, expected = run(Balance(), seed)
    assert batch.routing[1].kept_tk is None
    moe, batch, found = run(Balance(capacity_factor=12.0), seed)
    assert batch.routing[1].kept_tk.all() and torch.equal(found, expected) and moe.gate.dropped.item() == 0
    moe, batch, found = run(Balance(capacity_factor=0.5), seed)
    assert not torch.equal(found, expected)
    assert moe.gate.load_e.tolist() == plain.gate.load_e.tolist()  # what was chosen, dropped or not
    routing = batch.routing[1]
    rows_e = routing.traffic.ends_u.diff(prepend=torch.zeros(1, dtype=torch.int32))
    assert rows_e.tolist() == [int(routing.kept_tk[routing.expert_tk == e].sum()) for e in range(12)]
    assert rows_e.max() <= math.ceil(0.5 * 63 / 12)
    assert moe.gate.dropped.item() == 63 - rows_e.sum() > 0


def test_only_training_drops_and_counts(seed: int) -> None:
    _, batch, expected = run(Balance(), seed, training=False)
    moe, batch, found = run(Balance(capacity_factor=0.5), seed, training=False)
    assert batch.routing[1].kept_tk is None and torch.equal(found, expected)
    assert moe.gate.load_e.sum() == moe.gate.dropped == 0


def test_recomputation_drops_the_same_and_counts_once(seed: int) -> None:
    balance = dataclasses.replace(BALANCE, capacity_factor=0.5)
    once, batch, expected = run(balance, seed)
    twice, again, found = run(balance, seed, again=True)
    assert torch.equal(found, expected)
    assert torch.equal(once.gate.load_e, twice.gate.load_e) and torch.equal(once.gate.dropped, twice.gate.dropped)
    assert batch.losses == again.losses and list(batch.losses) == ["aux", "device", "communication", "z"]
