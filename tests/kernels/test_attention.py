"""Attention and the heads that go into it, against their references, at sizes around the blocks' borders."""

from __future__ import annotations

import pytest
import torch

from kernels import attention as module
from kernels.attention import attention, attention_reference
from kernels.latent_heads import latent_heads, latent_heads_reference, rotate


def heads(length: int, width: int, value: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v and the output's gradient, for two sequences of three heads."""
    shapes = [(length, 2, 3, width), (length, 2, 3, width), (length, 2, 3, value), (length, 2, 3 * value)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def run(op: object, inputs: list[torch.Tensor], *rest: object) -> list[torch.Tensor]:
    *leaves, grad = (x.detach().clone() for x in inputs)
    for leaf in leaves:
        leaf.requires_grad_()
    out = op(*leaves, *rest)  # type: ignore[operator]
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("width, value", [(12, 8), (5, 5), (3, 7)])
def test_blocks_equal_softmax_over_the_whole_triangle(length: int, width: int, value: int) -> None:
    inputs = heads(length, width, value)

    def direct(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = 0.3 * torch.einsum("sbnx,tbnx->bnst", q, k)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        p = scores.masked_fill(future, -torch.inf).softmax(-1)
        return torch.einsum("bnst,tbnv->sbnv", p, v).flatten(-2)

    for found, expected in zip(run(attention, inputs, 0.3), run(direct, inputs), strict=True):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "length, size, ends",
    [(200, 70, ()), (65, 1, ()), (300, 66, (99, 300)), (128, 32, (32, 128)), (90, 7, (80, 7, 44)), (200, 150, (200,))],
)
def test_pieces_of_the_queries_have_their_rows_of_the_whole(length: int, size: int, ends: tuple[int, ...]) -> None:
    """By blocks, by torch's kernels, and within a mask: outputs, and gradients as if other rows had none."""
    q, k, v, grad = heads(length, 6, 4)
    rows = torch.cat([torch.arange(end - size, end) for end in ends or (length,)])
    expected = run(attention, [q, k, v, torch.zeros_like(grad).index_copy_(0, rows, grad[rows])], 0.7)
    expected[:2] = [x[rows] for x in expected[:2]]
    mask = (rows[:, None] >= torch.arange(length)).expand(2, 1, -1, -1)
    pieces = [q[rows], k, v, grad[rows]]
    for op, given in ((attention, None), (attention_reference, None), (attention, mask)):
        for found, wanted in zip(run(op, pieces, 0.7, given, ends), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", [70, 1030])
def test_every_path_gives_the_same(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = heads(length, 6, 4, torch.float32)
    whole = torch.ones(length, length, dtype=torch.bool).tril().expand(2, 1, length, length)
    expected = run(attention_reference, inputs, 0.4)
    for found in (run(attention, inputs, 0.4), run(attention, inputs, 0.4, whole)):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_mask_keeps_documents_apart() -> None:
    q, k, v, _ = heads(10, 6, 4)
    first = torch.arange(10) < 4
    mask = ((first[:, None] == first[None]) & torch.ones(10, 10, dtype=torch.bool).tril()).expand(2, 1, 10, 10)
    whole = attention(q, k, v, 1.0, mask)
    torch.testing.assert_close(whole[4:], attention(q[4:], k[4:], v[4:], 1.0))


@pytest.mark.parametrize("multiplies", [True, False])
def test_long_sequences_and_16_bits_leave_memory_to_flash_attention(
    multiplies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "product_dtype", lambda x: x.dtype if multiplies else torch.float32)
    taken: list[torch.Size] = []
    monkeypatch.setattr(module, "attention_reference", lambda q, *rest: taken.append(q.shape) or q.flatten(-2))
    for inputs in (heads(1025, 2, 2, torch.float32), heads(8, 2, 2, torch.bfloat16)):
        attention(*inputs[:3], 1.0)
    assert [shape[0] for shape in taken] == ([1025, 8] if multiplies else [1025])


@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)], ids=str)
def test_16_bits_with_scores_beyond_the_range_of_fp16(dtype: torch.dtype, bound: float) -> None:
    inputs = tuple(x.to(dtype) for x in heads(70, 64, 8, torch.float32))
    inputs = (40 * inputs[0], 40 * inputs[1], *inputs[2:])  # products before the scale: up to 1600 · 64
    found, expected = (run(attention, kind, 1e-4) for kind in (inputs, tuple(x.double() for x in inputs)))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype and (a.double() - b).norm() <= bound * b.norm()


@pytest.mark.parametrize("plain, rotated, value", [(11, 6, 13), (32, 16, 32), (1, 2, 1)])
@pytest.mark.parametrize("queries", [7, 3])
@pytest.mark.parametrize(
    "dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=str
)
def test_latent_heads_equal_their_reference(
    plain: int, rotated: int, value: int, queries: int, dtype: torch.dtype, bound: float
) -> None:
    s, b, n = 7, 2, 3
    q = torch.randn(queries, b, n * (plain + rotated)).to(dtype)
    kv, k_pe = torch.randn(s, b, n * (plain + value)).to(dtype), torch.randn(s, b, rotated).to(dtype)
    rotations = []
    for length in (queries, s):
        angles = torch.rand(length, b, 1, rotated // 2) * 6
        rotations.append(torch.complex(angles.cos(), angles.sin()))
    sizes = ((queries, plain + rotated), (s, plain + rotated), (s, value))
    grads = [torch.randn(length, b, n, width).to(dtype) for length, width in sizes]

    def outputs_and_gradients(op: object, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).clone().detach().requires_grad_() for x in (q, kv, k_pe)]
        # A fresh result as a linear layer gives: the op changes it in place.
        outputs = op(leaves[0] * 1.0, leaves[1], leaves[2], *rotations, n)  # type: ignore[operator]
        torch.autograd.backward(
            outputs, [grad.to(dtype).transpose(0, 2).contiguous().transpose(0, 2) for grad in grads]
        )
        return [*(x.detach() for x in outputs), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    found = outputs_and_gradients(latent_heads, dtype)
    expected = outputs_and_gradients(latent_heads_reference, torch.float32)
    assert len(found) == len(expected) == 6
    for a, b_ in zip(found, expected, strict=True):
        assert a.dtype == dtype and a.shape == b_.shape
        assert (a.float() - b_).norm() <= bound * b_.norm()


def test_rotation_keeps_lengths_and_undoes_itself() -> None:
    x = torch.randn(4, 2, 3, 8)
    angles = torch.rand(4, 2, 1, 4)
    rotation = torch.complex(angles.cos(), angles.sin())
    turned = rotate(x, rotation)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(rotate(turned, rotation.conj()), x)
