"""Kernels in CUDA C++ against the references, bit for bit, on a CPU (cuda_on_cpu.h): every thread of them runs.

Sizes end within a thread block, blocks are smaller and larger than a warp's values, rows and residuals vary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from kernels import cuda
from kernels.decode_sum import decode_sum_encode_reference, decode_sum_reference
from kernels.quantize import quantize_reference
from kernels.sign_pack import sign_pack_reference, sign_unpack_reference
from kernels.wire import FormatName, WireFormat
from tests.kernels import emulated_cuda

pytestmark = pytest.mark.skipif(emulated_cuda.compiler() is None, reason="no C++ compiler")

# (format, block, blocks of a row): one value a thread block short, over, and less than a warp.
SHAPES: list[tuple[FormatName, int, int]] = [
    ("bf16", 32, 1),
    ("bf16", 256, 9),
    ("int8", 32, 131),
    ("int8", 256, 17),
    ("int8", 4096, 2),
    ("fp8", 64, 3),
    ("fp8", 1024, 5),
    ("int4", 32, 257),
    ("int4", 256, 1),
    ("int4", 4096, 3),
    ("sign", 256, 1),
    ("sign", 256, 19),
    ("sign", 1024, 5),
    ("sign", 4096, 2),
]


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with emulated_cuda.emulated():
        yield


def values(rows: int, m: int) -> torch.Tensor:
    """Of very different sizes, with zeros singly, by words, by words but one, and values that count as zero."""
    x_rm = torch.randn(rows, m) * torch.exp(4 * torch.randn(rows, m // 32, 1)).expand(-1, -1, 32).reshape(rows, m)
    x_rm[torch.rand(rows, m) < 0.05] = 0.0
    empty = torch.rand(rows, m // 32) < 0.2
    x_rm[empty.repeat_interleave(32, dim=1)] = 0.0
    x_rm.view(rows, -1, 32)[torch.rand(rows, m // 32) < 0.2, torch.randint(32, ())] = torch.randn(())
    x_rm[:, : m // 3] *= torch.tensor([1.0, 1e-33]).repeat_interleave(-(-rows // 2))[:rows, None]
    return x_rm


def residual(kind: torch.dtype | None, *shape: int) -> torch.Tensor | None:
    return None if kind is None else torch.randn(*shape).to(kind)


def wire_of(x_rm: torch.Tensor, wire_format: WireFormat) -> torch.Tensor:
    wire_rw = torch.zeros(x_rm.shape[0], wire_format.wire_bytes(x_rm.shape[1]), dtype=torch.uint8)
    (sign_pack_reference if wire_format.name == "sign" else quantize_reference)(x_rm, wire_format, wire_rw)
    return wire_rw


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def scale_is_near(mine: torch.Tensor, reference: torch.Tensor, wire_format: WireFormat, m: int) -> None:
    """The scale of signs is a sum in another order; the rest of the wire is the same. Makes scales the same too."""
    ours, theirs = (wire_format.split(wire, m)[0] for wire in (mine, reference))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0)
    theirs.copy_(ours)


@pytest.mark.parametrize("rows", [1, 4, 7])
@pytest.mark.parametrize(("name", "block", "blocks"), SHAPES)
def test_the_sum_of_rows_equals_the_reference(name: FormatName, block: int, blocks: int, rows: int) -> None:
    wire_format, m = WireFormat(name, block), block * blocks
    wire_rw = wire_of(values(rows, m), wire_format)
    mine, reference = torch.full((m,), torch.nan), torch.empty(m)
    cuda.decode_sum(wire_rw, wire_format, mine)
    assert same_bits(mine, decode_sum_reference(wire_rw, wire_format, reference))


@pytest.mark.parametrize("kind", [None, torch.float32, torch.bfloat16], ids=["none", "fp32", "bf16"])
@pytest.mark.parametrize(("name", "block", "blocks"), SHAPES)
def test_the_encoded_sum_equals_the_reference(
    name: FormatName, block: int, blocks: int, kind: torch.dtype | None
) -> None:
    wire_format, m, rows = WireFormat(name, block), block * blocks, 3
    wire_rw = wire_of(values(rows, m), wire_format)
    before, after = residual(kind, m), residual(kind, m)
    mine_w = torch.zeros(wire_rw.shape[1], dtype=torch.uint8)
    statistics = cuda.decode_sum_encode(wire_rw, wire_format, m, mine_w, before, after)
    expected_w, expected_after = torch.zeros_like(mine_w), residual(kind, m)
    expected = decode_sum_encode_reference(wire_rw, wire_format, m, expected_w, before, expected_after)
    torch.testing.assert_close(statistics, expected, rtol=1e-6, atol=0.0)
    if name == "sign":
        scale_is_near(mine_w[None], expected_w[None], wire_format, m)
        if after is not None:
            sum_m = decode_sum_reference(wire_rw, wire_format, torch.empty(m)) + before.float()
            carried_1m = sign_unpack_reference(mine_w[None], wire_format, torch.empty(1, m))
            expected_after = (sum_m - carried_1m[0]).to(kind)
    assert same_bits(mine_w, expected_w)
    assert same_bits(after, expected_after)


@pytest.mark.parametrize("kind", [None, torch.float32, torch.bfloat16], ids=["none", "fp32", "bf16"])
@pytest.mark.parametrize(("block", "blocks", "rows"), [(256, 1, 1), (256, 33, 2), (1024, 5, 3), (4096, 1, 2)])
def test_packed_signs_equal_the_reference(block: int, blocks: int, rows: int, kind: torch.dtype | None) -> None:
    wire_format, m = WireFormat("sign", block), block * blocks
    x_rm, kept = values(rows, m), residual(kind, rows, m)
    total_rm = x_rm if kept is None else x_rm + kept.float()
    expected_rw = torch.zeros(rows, wire_format.wire_bytes(m), dtype=torch.uint8)
    expected = sign_pack_reference(x_rm, wire_format, expected_rw, kept)
    wire_rw = torch.zeros_like(expected_rw)
    statistics = cuda.sign_pack(x_rm, wire_format, wire_rw, kept, kept)  # the residual in place
    torch.testing.assert_close(statistics, expected, rtol=1e-6, atol=0.0)
    scale_is_near(wire_rw, expected_rw, wire_format, m)
    assert same_bits(wire_rw, expected_rw)
    carried_rm = cuda.sign_unpack(wire_rw, wire_format, torch.full_like(x_rm, torch.nan))
    assert same_bits(carried_rm, sign_unpack_reference(wire_rw, wire_format, torch.empty_like(x_rm)))
    if kept is not None:
        assert same_bits(kept, (total_rm - carried_rm).to(kind))


@pytest.mark.parametrize("name", ["bf16", "int8", "fp8", "int4", "sign"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_is_counted_and_spoils_its_block_only(name: FormatName, bad: float) -> None:
    wire_format, m = WireFormat(name, 256), 1024
    x_rm = torch.randn(2, m)
    x_rm[1, 300] = bad
    wire_rw = torch.zeros(2, wire_format.wire_bytes(m), dtype=torch.uint8)
    if name == "sign":
        assert cuda.sign_pack(x_rm, wire_format, wire_rw)[2] == 1
        out_rm = cuda.sign_unpack(wire_rw, wire_format, torch.empty_like(x_rm))
        clean_rm = sign_unpack_reference(wire_of(x_rm, wire_format), wire_format, torch.empty_like(x_rm))
        good = torch.arange(m) // 256 != 1
        torch.testing.assert_close(out_rm[:, good], clean_rm[:, good], rtol=1e-6, atol=0.0)
    wire_rw = wire_of(x_rm, wire_format)
    if name != "bf16":
        wire_format.split(wire_rw, m)[0][1, 1] = bad  # as another rank's encoder may have left it
    sums = decode_sum_reference(wire_rw, wire_format, torch.empty(m))
    encoded_w = torch.empty(wire_rw.shape[1], dtype=torch.uint8)
    assert cuda.decode_sum_encode(wire_rw, wire_format, m, encoded_w)[2] == (~sums.isfinite()).sum()
    good = torch.arange(m) // 256 != 1
    assert torch.equal(cuda.decode_sum(wire_rw, wire_format, torch.empty(m))[good], sums[good])
    again = decode_sum_reference(encoded_w[None], wire_format, torch.empty(m))
    assert again[good].isfinite().all()


def test_empty_rows_launch_nothing() -> None:
    wire_format = WireFormat("int8")
    empty = torch.empty(3, 0, dtype=torch.uint8)
    assert cuda.decode_sum(empty, wire_format, torch.empty(0)).shape == (0,)
    assert cuda.decode_sum_encode(empty, wire_format, 0, empty[0]).tolist() == [0.0, 0.0, 0.0]
    assert cuda.sign_pack(torch.empty(3, 0), WireFormat("sign"), empty).tolist() == [0.0, 0.0, 0.0]
    assert cuda.sign_unpack(empty, WireFormat("sign"), torch.empty(3, 0)).shape == (3, 0)


def test_a_tensor_that_begins_between_16_bytes_is_refused() -> None:
    wire_format = WireFormat("int8")
    wire_rw, out_m = torch.zeros(1, wire_format.wire_bytes(256), dtype=torch.uint8), torch.empty(257)[1:]
    with pytest.raises(ValueError, match="decode_sum: out begins 4 bytes after"):
        cuda.decode_sum(wire_rw, wire_format, out_m)


def test_an_error_of_cuda_has_its_words_and_the_op() -> None:
    call = functools.partial(cuda.call, cuda.SOURCES[0], "decode_sum", torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"decode_sum on cpu: CUDA says .* \(error 1\)"):
        call(9, None, 0, cuda.Layout.of(WireFormat("int8"), 256), None)
