"""Gradient codecs: what their references promise, as properties, and every implementation that runs here against them.

Shapes: r rows, m values of a row (`kernels/wire.py`).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import backend
from kernels.bucket_pack import bucket_pack
from kernels.decode_sum import decode_sum, decode_sum_encode
from kernels.quantize import dequantize, fp8_codes, fp8_values, quantize
from kernels.select_top import ENTRY_BYTES, entries, scatter_sum, select_top
from kernels.sign_pack import sign_pack, sign_unpack
from kernels.wire import TINY, WireFormat
from tests.kernels.cases import REFERENCES, Case, cases, differences, draw, spoilt, usable

NAMES = ("bf16", "int8", "fp8", "int4", "sign")
formats = st.builds(WireFormat, st.sampled_from(NAMES), st.sampled_from((256, 1024))) | st.builds(
    WireFormat, st.sampled_from(NAMES[:4]), st.sampled_from((32, 128, 4096))
)
residual_dtypes = st.sampled_from((None, torch.float32, torch.bfloat16))
few = settings(max_examples=60)


def encode(
    x_rm: torch.Tensor, wire_format: WireFormat, residual_rm: torch.Tensor | None = None, **new: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Wire and statistics."""
    wire_rw = torch.zeros(x_rm.shape[0], wire_format.wire_bytes(x_rm.shape[1]), dtype=torch.uint8)
    op = sign_pack if wire_format.name == "sign" else quantize
    return wire_rw, op(x_rm, wire_format, wire_rw, residual_rm, **new)


def decode(wire_rw: torch.Tensor, wire_format: WireFormat, m: int) -> torch.Tensor:
    op = sign_unpack if wire_format.name == "sign" else dequantize
    return op(wire_rw, wire_format, torch.empty(wire_rw.shape[0], m))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@few
@given(formats, st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**31))
def test_decoded_values_are_as_close_as_the_format_allows(f: WireFormat, rows: int, blocks: int, seed: int) -> None:
    torch.manual_seed(seed)
    x_rm = draw(rows, m := f.block * blocks, f.block)
    with backend.forced("torch"):
        wire_rw, statistics = encode(x_rm, f)
        decoded_rm = decode(wire_rw, f, m)
    x, decoded = (t.double().unflatten(1, (-1, f.block)) for t in (x_rm, decoded_rm))
    amax = x.abs().amax(-1, keepdim=True)
    scaled = f.name in ("int8", "fp8", "int4")
    if f.name == "sign":
        words = x.unflatten(-1, (-1, 32))
        some = (words != 0).any(-1, keepdim=True).expand(words.shape).flatten(-2)
        mean = x.abs().sum(-1, keepdim=True) / some.sum(-1, keepdim=True).clamp(min=1)
        expected = torch.where(some & (mean >= TINY), torch.where(x < 0, -mean, mean), 0.0)
        assert torch.allclose(decoded, expected, rtol=1e-5, atol=0)
    else:
        half_step = {
            "bf16": x.abs() * 2.0**-8 + 2.0**-134,
            "int8": amax / 254,
            "int4": amax / 14,
            "fp8": torch.maximum(x.abs() * 2.0**-4, amax / 448 * 2.0**-10),
        }[f.name]
        bound = torch.where((amax < TINY) & scaled, amax, half_step * (1 + 1e-5))
        assert ((x - decoded).abs() <= bound).all()
        if scaled:
            assert (decoded[(amax < TINY).expand_as(x)] == 0).all()
            at_most = amax * (1 + 1e-6)
            assert (decoded.abs() <= at_most).all(), "nothing grows beyond its block's largest"
    expected_squares = [x.square().sum(), (x_rm - decoded_rm).double().square().sum()]
    assert torch.allclose(statistics[:2], torch.stack(expected_squares), rtol=1e-6, atol=0) and statistics[2] == 0


@few
@given(formats, st.integers(1, 5), st.integers(1, 3), residual_dtypes, st.integers(0, 2**31))
def test_what_is_sent_and_what_is_kept_is_all_there_was(
    f: WireFormat, rows: int, blocks: int, dtype: torch.dtype | None, seed: int
) -> None:
    torch.manual_seed(seed)
    x_rm = draw(rows, m := f.block * blocks, f.block)
    residual_rm = None if dtype is None else torch.randn_like(x_rm).to(dtype)
    with backend.forced("torch"):
        new_rm = torch.empty_like(x_rm)
        wire_rw, statistics = encode(x_rm, f, residual_rm, new_residual_rm=new_rm)
        decoded_rm = decode(wire_rw, f, m)
        total_rm = x_rm if residual_rm is None else x_rm + residual_rm.float()
        assert ((decoded_rm.double() + new_rm.double() - total_rm.double()).abs() <= new_rm.abs() * 2.0**-23).all()
        # The same tensor for both, a bf16 one, or none: the same bytes and the same error.
        for kept in (torch.float32, torch.bfloat16):
            if residual_rm is not None and residual_rm.dtype == kept:
                both_rm = residual_rm.clone()
                again_rw, again = encode(x_rm, f, both_rm, new_residual_rm=both_rm)
            else:
                both_rm = torch.empty_like(x_rm, dtype=kept)
                again_rw, again = encode(x_rm, f, residual_rm, new_residual_rm=both_rm)
            assert torch.equal(wire_rw, again_rw) and torch.equal(statistics, again)
            assert same_bits(both_rm, new_rm.to(kept))
        assert torch.equal(encode(x_rm, f, residual_rm)[0], wire_rw)


@few
@given(formats, st.integers(1, 5), st.integers(1, 3), residual_dtypes, st.integers(0, 2**31))
def test_a_sum_of_rows_is_that_of_decoded_rows_in_order(
    f: WireFormat, rows: int, blocks: int, dtype: torch.dtype | None, seed: int
) -> None:
    torch.manual_seed(seed)
    x_rm = draw(rows, m := f.block * blocks, f.block)
    residual_m = None if dtype is None else torch.randn(m).to(dtype)
    with backend.forced("torch"):
        wire_rw, _ = encode(x_rm, f)
        sum_m = decode_sum(wire_rw, f, torch.empty(m))
        expected_m = torch.zeros(m)
        for row_m in decode(wire_rw, f, m):
            expected_m += row_m
        assert same_bits(sum_m, expected_m)
        wire_w, new_m = torch.zeros_like(wire_rw[0]), torch.empty(m)
        statistics = decode_sum_encode(wire_rw, f, m, wire_w, residual_m, new_m)
        new_1m = torch.empty(1, m)
        residual_1m = None if residual_m is None else residual_m.unsqueeze(0)
        expected_rw, expected = encode(sum_m.unsqueeze(0), f, residual_1m, new_residual_rm=new_1m)
        assert torch.equal(wire_w, expected_rw[0]) and same_bits(new_m, new_1m[0])
        assert torch.equal(statistics, expected)


def bins(x: torch.Tensor) -> torch.Tensor:
    return (x.contiguous().view(torch.int32) & 0x7FFFFFFF) >> 20


@few
@given(st.integers(1, 4), st.integers(1, 700), st.data(), residual_dtypes)
def test_top_k_takes_the_largest_bins_and_the_first_of_the_last(
    rows: int, m: int, data: Any, dtype: torch.dtype | None
) -> None:
    k = data.draw(st.integers(1, m) | st.just(m))
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    kind = data.draw(st.sampled_from(("plain", "ties", "equal", "zeros", "not finite")))
    x_rm = {"equal": torch.full((rows, m), -1.25), "zeros": torch.zeros(rows, m)}.get(kind, torch.randn(rows, m))
    x_rm = x_rm.mul(2).round() if kind == "ties" else x_rm
    x_rm[:, ::7] *= -0.0
    if kind == "not finite":
        x_rm[:, m // 2] = torch.nan
        x_rm[:, m // 3] = torch.inf
    residual_rm = None if dtype is None else (torch.randn(rows, m) * (kind == "plain")).to(dtype)
    wire_rw, new_rm = torch.zeros(rows, ENTRY_BYTES * k, dtype=torch.uint8), torch.empty(rows, m)
    with backend.forced("torch"):
        statistics = select_top(x_rm, wire_rw, residual_rm, new_rm)
        again_rw = torch.zeros_like(wire_rw)
        select_top(x_rm, again_rw, residual_rm)
        assert torch.equal(wire_rw, again_rw)
        total_rm = x_rm if residual_rm is None else x_rm + residual_rm.float()
        for row, (values_k, places_k) in enumerate(zip(*entries(wire_rw), strict=True)):
            places = places_k.long()
            assert (places.diff() > 0).all(), "each once, in the row's order"
            assert same_bits(values_k, total_rm[row, places])
            chosen = torch.zeros(m, dtype=torch.bool).index_fill(0, places, True)
            of = bins(total_rm[row])
            last = of[chosen].min()
            assert chosen[of > last].all() and not chosen[of < last].any()
            tied = chosen[of == last]
            assert not tied[int(tied.sum()) :].any(), "of the last bin the first"
            assert same_bits(new_rm[row], torch.where(chosen, 0.0, total_rm[row]))
        assert statistics[2] == (~x_rm.isfinite()).sum()
        if kind != "not finite":
            sum_m = scatter_sum(wire_rw, torch.empty(m))
            assert torch.allclose(sum_m.double(), (total_rm - new_rm).double().sum(0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("residual", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_values_that_are_not_finite_are_counted_and_spoil_only_their_block(
    name: str, residual: torch.dtype | None
) -> None:
    op = "sign_pack" if name == "sign" else "quantize"
    case = Case(op, 3, 256 * 4, WireFormat(name, 256), residual=residual)  # type: ignore[arg-type]
    for run in (REFERENCES[op], *usable(op, "cpu").values()):
        assert spoilt(case, run) == []


@pytest.mark.parametrize("name", ["bf16", "int8", "fp8", "int4"])
def test_a_value_that_is_not_finite_shows_in_the_sum(name: str) -> None:
    f, x_rm = WireFormat(name, 64), draw(3, 64 * 4, 64)  # type: ignore[arg-type]
    x_rm[1, 70] = torch.inf
    for run in ("torch", *usable("decode_sum", "cpu")):
        with backend.forced(run):
            sum_m = decode_sum(encode(x_rm, f)[0], f, torch.empty(256))
            assert sum_m.view(4, 64).isfinite().all(-1).tolist() == [True, False, True, True], run


def test_every_code_of_fp8_is_its_own_and_agrees_with_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]  # NaN
    assert torch.equal(fp8_values(codes), codes.view(torch.float8_e4m3fn).float())
    assert torch.equal(fp8_codes(fp8_values(codes)), codes)
    x = torch.cat([torch.randn(10_000) * torch.randn(10_000).mul(4).exp(), fp8_values(codes) * (1 + 1 / 32)])
    x = x.clamp(-448, 448)
    assert torch.equal(fp8_codes(x), x.to(torch.float8_e4m3fn).view(torch.uint8))


def relative_error(x: torch.Tensor, name: str) -> float:
    if name == "top 1 %":
        statistics = select_top(x, torch.zeros(1, x.numel() // 100 * ENTRY_BYTES, dtype=torch.uint8))
    else:
        _, statistics = encode(x, WireFormat(name, 256))  # type: ignore[arg-type]
    return math.sqrt(statistics[1] / statistics[0])


def test_error_of_a_single_shot_is_that_of_the_distribution() -> None:
    """Normal: of the sign √(1 − 2/π), of the top 1 % √(1 − 2(zφ(z) + Q(z))), z = 2.576. Heavy-tailed: as large as is
    published for such gradients, and in the same order of formats.
    """
    normal = torch.randn(1, 1 << 18)
    assert relative_error(normal, "sign") == pytest.approx(math.sqrt(1 - 2 / math.pi), rel=0.01)
    assert relative_error(normal, "top 1 %") == pytest.approx(0.9568, rel=0.01)
    heavy = normal * torch.randn_like(normal).exp()
    for name, least, most in (
        ("bf16", 0.0012, 0.0021),
        ("int8", 0.016, 0.025),
        ("fp8", 0.019, 0.026),
        ("int4", 0.22, 0.31),
        ("sign", 0.81, 0.93),
        ("top 1 %", 0.62, 0.78),
    ):
        assert least < relative_error(heavy, name) < most, name


@pytest.mark.parametrize("op", backend.IMPLEMENTATIONS)
def test_every_implementation_equals_its_reference(op: str) -> None:
    implementations = usable(op, "cpu")
    if not implementations:
        pytest.skip("no C compiler, and no Triton interpreter: only the reference runs here")
    for name, run in implementations.items():
        # A program of Triton's interpreter takes milliseconds.
        chosen = cases(op) if name == "native" else cases(op, blocks=(256,), most=1100)
        assert not [f"{name}: {text}" for case in chosen for text in differences(case, run)]


@pytest.mark.parametrize("m, k", [(300_001, 15_000), (70_000, 1), (9_000, 8_999)])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_top_k_is_right_where_a_sample_of_the_row_misleads(m: int, k: int, dtype: torch.dtype | None) -> None:
    """native looks at 64 values of every 2,048 to guess a threshold; here all large values lie there, fewer than k."""
    runs = usable("select_top", "cpu")
    if "native" not in runs:
        pytest.skip("no C compiler")
    x_rm = draw(2, m)
    x_rm[:, torch.arange(m) % 2048 < 64] *= 1e5
    results = []
    for run in (runs["native"], REFERENCES["select_top"]):
        wire_rw = torch.zeros(2, ENTRY_BYTES * k, dtype=torch.uint8)
        both_rm = None if dtype is None else torch.zeros(2, m, dtype=dtype)
        results.append((wire_rw, run(x_rm, wire_rw, both_rm, both_rm), torch.zeros(1) if both_rm is None else both_rm))
    (wire_rw, statistics, new_rm), (expected_rw, expected, expected_rm) = results
    assert torch.equal(wire_rw, expected_rw) and same_bits(new_rm, expected_rm)
    assert torch.allclose(statistics, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("op", ["quantize", "decode_sum", "select_top", "bucket_pack"])
def test_a_difference_is_found(op: str) -> None:
    def off_by_a_bit(*args: Any) -> Any:
        result = REFERENCES[op](*args)
        changed = args[2] if op in ("quantize", "decode_sum") else args[1]
        flat = changed.view(-1).view(torch.uint8)
        flat[flat.numel() // 2] ^= 1
        return result

    case = next(case for case in cases(op) if case.m >= 256)
    assert differences(case, REFERENCES[op]) == []
    assert differences(case, off_by_a_bit)


F = WireFormat("int8", 32)
X, WIRE = torch.zeros(2, 64), torch.zeros(2, 80, dtype=torch.uint8)
SIGN = WireFormat("sign", 256)
X256, WIRE_SIGN = torch.zeros(1, 256), torch.zeros(1, SIGN.wire_bytes(256), dtype=torch.uint8)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: quantize(X.double(), F, WIRE), TypeError, "quantize: x is torch.float64"),
        (lambda: quantize(X[0], F, WIRE), ValueError, "quantize: values must have 2 dimensions"),
        (lambda: quantize(X, F, WIRE.int()), TypeError, "quantize: the wire is torch.int32"),
        (lambda: quantize(X, F, WIRE[:, :79]), ValueError, "quantize: 2 rows of 64 values in int8 need .*80"),
        (
            lambda: quantize(X[:, :63], F, WIRE),
            ValueError,
            "quantize: int8: a row of 63 values isn't made of whole blocks of 32",
        ),
        (lambda: quantize(X, F, WIRE, X.half()), TypeError, "quantize: residual is torch.float16"),
        (lambda: quantize(X, F, WIRE, X, X[:1]), ValueError, r"quantize: new residual must be contiguous, \(2, 64\)"),
        (lambda: quantize(X.to("meta"), F, WIRE), ValueError, "quantize: x is on meta, the wire on cpu"),
        (lambda: quantize(X256, SIGN, WIRE_SIGN), ValueError, "quantize: the format sign is sign_pack's"),
        (lambda: dequantize(WIRE_SIGN, SIGN, X256), ValueError, "dequantize: the format sign is sign_unpack's"),
        (lambda: sign_pack(X, F, WIRE), ValueError, "sign_pack: the format is int8"),
        (lambda: dequantize(WIRE, F, X.half()), TypeError, "dequantize: out is torch.float16"),
        (lambda: sign_unpack(WIRE, F, X), ValueError, "sign_unpack: the format is int8"),
        (lambda: decode_sum(WIRE, F, X[0, :32]), ValueError, "decode_sum: 2 rows of 32 values"),
        (lambda: decode_sum_encode(WIRE, F, 64, WIRE[0, :64]), ValueError, "decode_sum_encode: 1 rows of 64"),
        (lambda: select_top(X, WIRE[:, :12]), ValueError, "select_top: 2 rows need"),
        (lambda: select_top(X[:, :9].contiguous(), WIRE), ValueError, "select_top: 10 entries of a row of 9"),
        (lambda: scatter_sum(WIRE.char(), X[0]), TypeError, "scatter_sum: the wire is torch.int8"),
        (lambda: bucket_pack([X, X.half()], X[0]), TypeError, "bucket_pack: tensors are torch.float16, torch.float32"),
        (lambda: bucket_pack([X], X[0]), ValueError, "bucket_pack: the tensors hold 128 values"),
        (lambda: bucket_pack([X.t()], X.view(-1)), ValueError, "bucket_pack: tensors and out must be contiguous"),
    ],
)
def test_what_an_op_cannot_serve_is_refused_by_name(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_a_place_outside_of_the_row_is_refused() -> None:
    wire_rw = torch.zeros(1, 8, dtype=torch.uint8)
    entries(wire_rw)[1][0, 0] = 64
    for name in ("torch", *usable("scatter_sum", "cpu")):
        if name in ("torch", "native"):
            with backend.forced(name), pytest.raises(IndexError):
                scatter_sum(wire_rw, torch.zeros(64))
