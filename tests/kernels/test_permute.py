"""Dispatch to experts and back against the index_add formulation, forward and backward."""

from __future__ import annotations

import pytest
import torch

from kernels.permute import combine, dispatch, expert_order

# tokens, choices, experts, hidden
SIZES = [(17, 2, 8, 5), (1, 3, 4, 7), (13, 1, 3, 6), (33, 6, 6, 1), (0, 2, 4, 3), (9, 2, 64, 3)]


def choose(tokens: int, choices: int, experts: int) -> torch.Tensor:
    """[t, k], as top-k gives them: no expert twice for one token, in no order."""
    return torch.rand(tokens, experts).topk(choices).indices


@pytest.mark.parametrize("t, k, e, h", SIZES)
def test_rows_are_sorted_by_expert_and_each_choice_knows_its_row(t: int, k: int, e: int, h: int) -> None:
    expert = choose(t, k, e)
    order, place = expert_order(expert)
    sorted_experts = expert.flatten()[order]
    assert (sorted_experts.diff() >= 0).all()
    assert torch.equal(order[place.flatten()], torch.arange(t * k))
    for number in range(e):  # stable: within an expert, tokens keep their order
        assert (order[sorted_experts == number].diff() > 0).all()


@pytest.mark.parametrize("dropping", ["none", "a third", "all"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("t, k, e, h", SIZES)
def test_there_and_back_equals_index_add(t: int, k: int, e: int, h: int, dtype: torch.dtype, dropping: str) -> None:
    expert = choose(t, k, e)
    kept = {"none": None, "a third": torch.rand(t, k) > 1 / 3, "all": torch.zeros(t, k, dtype=torch.bool)}[dropping]
    order, place = expert_order(expert, kept)
    r = len(order)
    assert r == (t * k if kept is None else int(kept.sum()))
    assert kept is None or kept.flatten()[order].all()
    assert (expert.flatten()[order].diff() >= 0).all()
    inputs = (torch.randn(t, h).to(dtype), torch.randn(r, h).to(dtype), torch.randn(t, k).to(dtype))
    grads = torch.randn(r, h).to(dtype), torch.randn(t, h).to(dtype), torch.randn(r).to(dtype)

    x, factor, weight = (i.clone().requires_grad_() for i in inputs)
    rows, row_weight = dispatch(x, weight, order, place, kept)
    rows_before = rows.detach().clone()
    mixed = combine(rows * factor * row_weight.unsqueeze(-1), order, place, kept)
    torch.autograd.backward([rows, mixed, row_weight], [g.clone() for g in grads])

    x_ref, factor_ref, weight_ref = (i.double().requires_grad_() for i in inputs)
    token = order // k
    rows_ref = x_ref.index_select(0, token)
    row_weight_ref = weight_ref.flatten()[order]
    weighted = rows_ref * factor_ref * row_weight_ref.unsqueeze(-1)
    mixed_ref = torch.zeros(t, h, dtype=torch.float64).index_add(0, token, weighted)
    torch.autograd.backward([rows_ref, mixed_ref, row_weight_ref], [g.double() for g in grads])

    bound = 1e-12 if dtype == torch.float64 else 3e-2
    pairs = {
        "rows": (rows_before, rows_ref),
        "output": (mixed, mixed_ref),
        "gradient of x": (x.grad, x_ref.grad),
        "gradient of the rows": (factor.grad, factor_ref.grad),
        "gradient of the weights": (weight.grad, weight_ref.grad),
    }
    for name, (found, expected) in pairs.items():
        assert found is not None and expected is not None and found.dtype == dtype, name
        assert found.shape == expected.shape, name
        assert (found.double() - expected).norm() <= bound * expected.norm(), name


def test_gradients_pass_a_numerical_check() -> None:
    order, place = expert_order(choose(5, 3, 4))
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(15, 2, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: dispatch(x, w, order, place), (x, w))
    assert torch.autograd.gradcheck(lambda y: combine(y, order, place), y)
    kept = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0], [1, 1, 0]], dtype=torch.bool)
    order, place = expert_order(choose(5, 3, 4), kept)
    y = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: dispatch(x, w, order, place, kept), (x, w))
    assert torch.autograd.gradcheck(lambda y: combine(y, order, place, kept), y)


def test_the_same_input_gives_the_same_bits_whatever_the_other_tokens_chose() -> None:
    """A token's sum runs over its choices in their order, so it depends on that token alone."""
    t, k, e, h = 29, 4, 8, 11
    expert = choose(t, k, e)
    values = torch.randn(t, k, h)  # of token t's choice k, whatever row that is

    def run(expert: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        order, place = expert_order(expert)
        mixed = combine(values.flatten(0, 1)[order], order, place)
        x = torch.zeros(t, h, requires_grad=True)
        dispatch(x, torch.zeros(t, k), order, place)[0].backward(values.flatten(0, 1)[order])
        assert x.grad is not None
        return mixed, x.grad

    other = choose(t, k, e)
    other[0] = expert[0]
    for first, again, elsewhere in zip(run(expert), run(expert), run(other), strict=True):
        assert torch.equal(first, again)
        assert torch.equal(first, elsewhere)
