"""Triton kernels in Triton's interpreter against the references: wire bytes, residuals and sums equal bit for bit.

Run by tests/kernels/test_triton.py in a process of its own: TRITON_INTERPRET has to be set before triton is imported,
and then holds for the whole process. Imports `kernels`. Random data, drawn fresh, with blocks of zeros and tiny values.
"""

from __future__ import annotations

import threading
from typing import get_args

import pytest
import torch

from kernels import backend, wire
from kernels.bucket_pack import DTYPES, bucket_pack
from kernels.decode_sum import decode_sum, decode_sum_encode
from kernels.quantize import dequantize, quantize
from kernels.select_top import scatter_sum, select_top
from kernels.sign_pack import sign_pack, sign_unpack
from kernels.wire import WireFormat

FORMATS = get_args(wire.FormatName)
# Format, block, rows, blocks in a row: one block, a tile not filled, more than a tile, the smallest and largest blocks.
SHAPES = [
    *(("int8", 256, *size) for size in ((1, 1), (3, 5), (2, 17))),
    *(("int4", 256, *size) for size in ((1, 1), (3, 5), (2, 19))),
    *(("fp8", 256, *size) for size in ((1, 1), (3, 5), (2, 18))),
    *(("sign", 256, *size) for size in ((1, 1), (3, 5), (2, 35))),
    *(("bf16", 256, *size) for size in ((1, 1), (5, 3), (2, 17))),
    ("int8", 32, 2, 129),
    ("int4", 32, 2, 3),
    ("fp8", 4096, 2, 1),
    ("int4", 4096, 1, 2),
    ("sign", 1024, 3, 9),
    ("sign", 4096, 1, 3),
]
# Dtypes of the residual that is read and of the one that is written.
RESIDUALS = [(None, None), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (None, torch.bfloat16)]


def draw(rows: int, m: int, block: int) -> torch.Tensor:
    """Values of many sizes, both zeros, whole blocks of zeros and below `TINY`, words of zeros."""
    x_rm = torch.randn(rows, m) * torch.exp2(torch.randint(-12, 12, (rows, m // block, 1)).float()).expand(
        -1, -1, block
    ).flatten(1)
    x_rm[torch.rand(rows, m) < 0.05] = -0.0
    blocks_rnb = x_rm.view(rows, -1, block)
    blocks_rnb[torch.rand(rows, m // block) < 0.15] = 0.0
    blocks_rnb[torch.rand(rows, m // block) < 0.1] *= 2.0**-120
    x_rm.view(rows, -1, 32)[torch.rand(rows, m // 32) < 0.1] = 0.0
    return x_rm


def same_bits(ours: torch.Tensor, reference: torch.Tensor) -> bool:
    return torch.equal(ours.contiguous().view(torch.uint8), reference.contiguous().view(torch.uint8))


def close(ours: torch.Tensor, reference: torch.Tensor) -> bool:
    """Statistics: squares to 1e-6, the count exactly."""
    return torch.allclose(ours[:2], reference[:2], rtol=1e-6, atol=0.0) and ours[-1] == reference[-1]


def both(run, *outputs: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What `run` returns on Triton and on the reference, each followed by copies of the outputs it wrote."""
    results = []
    for name in ("triton", "torch"):
        with backend.forced(name):
            for output in outputs:
                output.view(torch.uint8).random_()
            returned = run()
            results.append([returned, *(output.clone() for output in outputs)])
    return results[0], results[1]


def test_every_op_has_triton_kernels() -> None:
    with backend.forced("triton"):
        for op in backend.IMPLEMENTATIONS:
            chosen = backend.pick(op, "cpu")
            assert chosen is not None and chosen.__module__.startswith("kernels.triton_ops.")


@pytest.mark.parametrize(("name", "block", "rows", "blocks"), SHAPES)
def test_encoding_and_decoding(name: str, block: int, rows: int, blocks: int) -> None:
    wire_format, m = WireFormat(name, block), blocks * block
    x_rm = draw(rows, m, block)
    wire_rw = torch.zeros(rows, wire_format.wire_bytes(m), dtype=torch.uint8)
    encode, decode = (sign_pack, sign_unpack) if name == "sign" else (quantize, dequantize)
    for read, written in RESIDUALS:
        residual = None if read is None else draw(rows, m, block).to(read)
        new = None if written is None else torch.empty(rows, m, dtype=written)
        outputs = [*wire_format.split(wire_rw, m), *([] if new is None else [new])]
        ours, reference = both(lambda r=residual, n=new: encode(x_rm, wire_format, wire_rw, r, n), *outputs)
        if name == "sign":
            assert torch.allclose(ours[1], reference[1], rtol=1e-5, atol=0.0)
            assert all(same_bits(a, b) for a, b in zip(ours[2:4], reference[2:4], strict=True))
            with backend.forced("torch"):
                for to, of in zip(outputs, ours[1:4], strict=False):
                    to.copy_(of)
                decoded = sign_unpack(wire_rw, wire_format, torch.empty_like(x_rm))
            total = x_rm if residual is None else x_rm + residual.float()
            assert new is None or same_bits(ours[4], (total - decoded).to(new.dtype))
            assert torch.allclose(ours[0], reference[0], rtol=1e-4, atol=0.0)
        else:
            assert all(same_bits(a, b) for a, b in zip(ours[1:], reference[1:], strict=True))
            assert close(ours[0], reference[0])
    out_rm = torch.empty(rows, m)
    ours, reference = both(lambda: decode(wire_rw, wire_format, out_rm), out_rm)
    assert same_bits(ours[1], reference[1])


@pytest.mark.parametrize(("name", "block", "rows", "blocks"), SHAPES)
def test_decoding_and_summing(name: str, block: int, rows: int, blocks: int) -> None:
    wire_format, m = WireFormat(name, block), blocks * block
    wire_rw = torch.zeros(rows, wire_format.wire_bytes(m), dtype=torch.uint8)
    wire_w = torch.zeros(wire_format.wire_bytes(m), dtype=torch.uint8)
    with backend.forced("torch"):
        (sign_pack if name == "sign" else quantize)(draw(rows, m, block), wire_format, wire_rw)
    out_m = torch.empty(m)
    ours, reference = both(lambda: decode_sum(wire_rw, wire_format, out_m), out_m)
    assert same_bits(ours[1], reference[1])

    residual, new = draw(1, m, block)[0], torch.empty(m, dtype=torch.bfloat16)
    sections = wire_format.split(wire_w.unsqueeze(0), m)
    ours, reference = both(lambda: decode_sum_encode(wire_rw, wire_format, m, wire_w, residual, new), *sections, new)
    if name == "sign":
        assert torch.allclose(ours[1], reference[1], rtol=1e-5, atol=0.0)
        assert all(same_bits(a, b) for a, b in zip(ours[2:4], reference[2:4], strict=True))
    else:
        assert all(same_bits(a, b) for a, b in zip(ours[1:], reference[1:], strict=True))
        assert close(ours[0], reference[0])


@pytest.mark.parametrize("name", FORMATS)
def test_a_residual_updated_in_place(name: str) -> None:
    wire_format, m = WireFormat(name, 256), 768
    x_rm, residual = draw(2, m, 256), draw(2, m, 256).bfloat16()
    wire_rw = torch.zeros(2, wire_format.wire_bytes(m), dtype=torch.uint8)
    encode = sign_pack if name == "sign" else quantize
    with backend.forced("triton"):
        apart = torch.empty_like(residual)
        encode(x_rm, wire_format, wire_rw, residual, apart)
        encode(x_rm, wire_format, wire_rw, residual, residual)
    assert same_bits(residual, apart)


@pytest.mark.parametrize("name", FORMATS)
def test_values_that_are_not_finite_are_counted_and_spoil_their_block_only(name: str) -> None:
    wire_format, m = WireFormat(name, 256), 1024
    x_rm = draw(2, m, 256)
    encode, decode = (sign_pack, sign_unpack) if name == "sign" else (quantize, dequantize)
    wire_rw = torch.zeros(2, wire_format.wire_bytes(m), dtype=torch.uint8)
    before, after = torch.empty(2, m), torch.empty(2, m)
    with backend.forced("triton"):
        encode(x_rm, wire_format, wire_rw)
        decode(wire_rw, wire_format, before)
        x_rm[0, 300], x_rm[0, 400], x_rm[1, 5] = float("nan"), float("-inf"), float("inf")
        assert encode(x_rm, wire_format, wire_rw)[2] == 3
        decode(wire_rw, wire_format, after)
    kept = torch.ones(2, 4, dtype=torch.bool)
    kept[0, 1] = kept[1, 0] = False
    assert same_bits(before.view(2, 4, 256)[kept], after.view(2, 4, 256)[kept])


@pytest.mark.parametrize(("rows", "m", "k"), [(1, 1, 1), (2, 333, 7), (3, 5001, 77), (2, 8192, 8192)])
@pytest.mark.parametrize(("read", "written"), RESIDUALS)
def test_the_largest_values(rows: int, m: int, k: int, read, written) -> None:
    x_rm = torch.randn(rows, m) ** 5
    x_rm[torch.rand(rows, m) < 0.3] = 0.0
    if m > 4000:
        x_rm[0] = x_rm[0].sign()  # one bin: the first in the row are taken
    residual = None if read is None else torch.randn(rows, m).to(read)
    new = None if written is None else torch.empty(rows, m, dtype=written)
    wire_rw = torch.empty(rows, 8 * k, dtype=torch.uint8)
    outputs = [wire_rw, *([] if new is None else [new])]
    ours, reference = both(lambda: select_top(x_rm, wire_rw, residual, new), *outputs)
    assert all(same_bits(a, b) for a, b in zip(ours[1:], reference[1:], strict=True))
    assert close(ours[0], reference[0])
    out_m = torch.empty(m)
    ours, reference = both(lambda: scatter_sum(wire_rw, out_m), out_m)
    assert same_bits(ours[1], reference[1])


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_packing_tensors_of_any_length(source: torch.dtype, target: torch.dtype) -> None:
    lengths = torch.randint(0, 60, (5,)).tolist()
    tensors = [torch.randn(n).to(source) for n in (0, 1, 4096, 0, 4099, *lengths, 0)]
    tensors.append(torch.randn(3, 5).to(source))
    tensors[4][17] = float("inf")
    tensors[-1][2, 1] = float("nan")
    out_n = torch.empty(sum(x.numel() for x in tensors), dtype=target)
    ours, reference = both(lambda: bucket_pack(tensors, out_n, 1 / 3), out_n)
    assert ours[0][1] == reference[0][1] == 2
    finite = reference[1].isfinite()
    assert same_bits(ours[1][finite], reference[1][finite])
    assert torch.equal(ours[1].isnan(), reference[1].isnan())
    del tensors[4], tensors[-1]
    out_n = out_n[: sum(x.numel() for x in tensors)]
    ours, reference = both(lambda: bucket_pack(tensors, out_n, 1 / 3), out_n)
    assert same_bits(ours[1], reference[1]) and close(ours[0], reference[0])


def test_nothing_to_do() -> None:
    with backend.forced("triton"):
        assert bucket_pack([], torch.empty(0)).tolist() == [0, 0]
        assert bucket_pack([torch.empty(0)], torch.empty(0)).tolist() == [0, 0]
        empty = torch.empty(2, 0, dtype=torch.uint8)
        assert quantize(torch.empty(2, 0), WireFormat("int8"), empty).tolist() == [0, 0, 0]
        assert select_top(torch.empty(2, 0), empty).tolist() == [0, 0, 0]


def test_threads_at_the_same_time() -> None:
    """The lanes of a CPU run are threads; the interpreter serves one at a time."""
    wire_format, m = WireFormat("int8", 256), 1280
    inputs = [draw(2, m, 256) for _ in range(4)]
    wires = [torch.zeros(2, wire_format.wire_bytes(m), dtype=torch.uint8) for _ in inputs]
    failures = []

    def encode_often(x_rm: torch.Tensor, wire_rw: torch.Tensor) -> None:
        try:
            for _ in range(3):
                quantize(x_rm, wire_format, wire_rw.fill_(7))
        except Exception as failure:
            failures.append(failure)

    with backend.forced("triton"):
        threads = [threading.Thread(target=encode_often, args=pair) for pair in zip(inputs, wires, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    with backend.forced("torch"):
        for x_rm, wire_rw in zip(inputs, wires, strict=True):
            expected = torch.zeros_like(wire_rw)
            quantize(x_rm, wire_format, expected)
            ours, reference = (wire_format.split(wire, m) for wire in (wire_rw, expected))
            assert all(same_bits(a, b) for a, b in zip(ours, reference, strict=True))
