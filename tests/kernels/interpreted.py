"""Triton kernels in Triton's interpreter against the references: wire bytes, residuals and sums equal bit for bit.

Run by tests/kernels/test_triton.py in a process of its own: TRITON_INTERPRET has to be set before triton is imported,
and then holds for the whole process. Imports `kernels`. Sizes are few: a program takes 50 ms there.
"""

from __future__ import annotations

import threading

import pytest
import torch

from kernels import backend
from kernels.bucket_pack import bucket_pack, bucket_pack_reference
from kernels.quantize import quantize
from kernels.select_top import entries, scatter_sum, select_top
from kernels.sign_pack import sign_pack, sign_unpack
from kernels.wire import WireFormat
from tests.kernels.cases import DECODERS, DTYPES, Case, differences, draw

# Format, block, rows, blocks of a row: one block, a tile that isn't full, more than one; the smallest and the largest.
SHAPES = [
    ("int8", 256, 2, 17),
    ("int4", 256, 3, 5),
    ("fp8", 256, 1, 18),
    ("bf16", 256, 5, 3),
    ("int8", 32, 1, 129),
    ("int4", 32, 1, 1),
    ("fp8", 4096, 2, 1),
    ("int4", 4096, 1, 2),
    ("sign", 256, 5, 3),
    ("sign", 256, 1, 17),
    ("sign", 1024, 4, 1),
    ("sign", 4096, 1, 3),
]


def run_and_compare(case: Case) -> None:
    with backend.forced("triton"):
        run = backend.pick(case.op, "cpu")
    assert run is not None and run.__module__.startswith("kernels.triton_ops.")
    assert differences(case, run) == []


@pytest.mark.parametrize(("name", "block", "rows", "blocks"), SHAPES)
def test_encoding_and_decoding(name: str, block: int, rows: int, blocks: int) -> None:
    wire_format, m = WireFormat(name, block), block * blocks
    encoder, decoder = ("sign_pack", "sign_unpack") if name == "sign" else ("quantize", "dequantize")
    for residual in (None, torch.float32, torch.bfloat16):
        run_and_compare(Case(encoder, rows, m, wire_format, residual=residual))
    for op in (decoder, "decode_sum"):
        run_and_compare(Case(op, rows, m, wire_format))
    run_and_compare(Case("decode_sum_encode", rows, m, wire_format, residual=torch.bfloat16))


@pytest.mark.parametrize(("name", "block"), [("bf16", 256), ("int8", 256), ("fp8", 256), ("int4", 256), ("sign", 256)])
def test_a_residual_that_is_written_beside_the_one_read(name: str, block: int) -> None:
    wire_format, m = WireFormat(name, block), 3 * block
    x_rm, residual = draw(2, m, block), torch.randn(2, m).bfloat16()
    wire_rw = torch.zeros(2, wire_format.wire_bytes(m), dtype=torch.uint8)
    encode = sign_pack if name == "sign" else quantize
    with backend.forced("triton"):
        before, apart, wide = residual.clone(), torch.empty_like(residual), torch.empty_like(x_rm)
        encode(x_rm, wire_format, wire_rw, residual, apart)
        assert torch.equal(residual, before)
        encode(x_rm, wire_format, wire_rw, residual, wide)
        assert torch.equal(wide.bfloat16(), apart)
        encode(x_rm, wire_format, wire_rw, residual, residual)
        assert torch.equal(residual, apart)


@pytest.mark.parametrize("name", ["bf16", "int8", "fp8", "int4", "sign"])
def test_values_that_are_not_finite_are_counted_and_spoil_their_block_only(name: str) -> None:
    wire_format, m = WireFormat(name, 256), 1024
    x_rm = draw(2, m, 256)
    encode = sign_pack if name == "sign" else quantize
    decode = DECODERS["sign_unpack" if name == "sign" else "dequantize"]
    wire_rw = torch.zeros(2, wire_format.wire_bytes(m), dtype=torch.uint8)
    with backend.forced("triton"):
        encode(x_rm, wire_format, wire_rw)
        before = decode(wire_rw, wire_format, torch.empty(2, m))
        x_rm[0, 300], x_rm[0, 400], x_rm[1, 5] = float("nan"), float("-inf"), float("inf")
        assert encode(x_rm, wire_format, wire_rw)[2] == 3
        after = decode(wire_rw, wire_format, torch.empty(2, m))
    kept = torch.ones(2, 4, dtype=torch.bool)
    kept[0, 1] = kept[1, 0] = False
    assert torch.equal(before.view(2, 4, 256)[kept], after.view(2, 4, 256)[kept])


def test_a_word_of_zeros_decodes_to_no_negative_zero() -> None:
    """Even where its signs on the wire aren't 0, which no encoder writes."""
    wire_format = WireFormat("sign", 256)
    wire_rw = torch.zeros(1, wire_format.wire_bytes(256), dtype=torch.uint8)
    with backend.forced("triton"):
        sign_pack(torch.randn(1, 256), wire_format, wire_rw)
        _, mask, codes = wire_format.split(wire_rw, 256)
        mask &= 0b11111101
        codes.fill_(0xFF)
        assert (sign_unpack(wire_rw, wire_format, torch.empty(1, 256))[0, 32:64].view(torch.int32) == 0).all()


@pytest.mark.parametrize("residual", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "m", "k"), [(1, 1, 1), (3, 333, 7), (2, 5001, 77), (2, 8192, 8192)])
def test_the_largest_values(rows: int, m: int, k: int, residual: torch.dtype | None) -> None:
    run_and_compare(Case("select_top", rows, m, k=k, residual=residual))


@pytest.mark.parametrize(("rows", "m", "k"), [(1, 1, 1), (5, 333, 7), (2, 5001, 1025)])
def test_the_sum_of_entries(rows: int, m: int, k: int) -> None:
    run_and_compare(Case("scatter_sum", rows, m, k=k))


def test_a_place_outside_of_the_row_is_left_out() -> None:
    wire_rw = torch.zeros(1, 24, dtype=torch.uint8)
    values_rk, places_rk = entries(wire_rw)
    values_rk[0], places_rk[0] = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-1, 2, 4])
    out = torch.full((8,), 7.0)
    with backend.forced("triton"):
        scatter_sum(wire_rw, out[2:6])
    assert out.tolist() == [7, 7, 0, 0, 2, 0, 7, 7]


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_packing_tensors_of_any_length(source: torch.dtype, target: torch.dtype) -> None:
    run_and_compare(Case("bucket_pack", 1, 5003, dtype=source, out=target))
    # Full tiles at a multiple of 16 bytes take another path than all others.
    lengths = torch.randint(0, 60, (3,)).tolist()
    tensors = [torch.randn(n).to(source) for n in (0, 4096, 8, 0, 4099, *lengths, 0)]
    found, expected = (torch.empty(sum(x.numel() for x in tensors), dtype=target) for _ in range(2))
    with backend.forced("triton"):
        statistics = bucket_pack(tensors, found, 1 / 3)
    assert torch.allclose(statistics, bucket_pack_reference(tensors, expected, 1 / 3), rtol=1e-6, atol=0)
    assert torch.equal(found, expected)


def test_nothing_to_do() -> None:
    with backend.forced("triton"):
        assert bucket_pack([], torch.empty(0)).tolist() == [0, 0]
        assert bucket_pack([torch.empty(0)], torch.empty(0)).tolist() == [0, 0]
        empty = torch.empty(2, 0, dtype=torch.uint8)
        assert quantize(torch.empty(2, 0), WireFormat("int8"), empty).tolist() == [0, 0, 0]
        assert select_top(torch.empty(2, 0), empty).tolist() == [0, 0, 0]


def test_threads_at_the_same_time() -> None:
    """The lanes of a CPU run are threads; the interpreter serves one at a time."""
    failures = []

    def compare() -> None:
        try:
            for name in ("int8", "int4"):
                run_and_compare(Case("dequantize", 2, 1280, WireFormat(name)))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=compare) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
