"""One call of a gradient op, by some implementation, compared with the op's reference on the CPU.

Lives here: inputs that are hard to encode, and what must be equal. Imports `kernels` only; the tests of every backend
and `benchmarks/kernels.py --check` share it. Shapes: see `kernels/wire.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kernels import backend
from kernels.bucket_pack import bucket_pack_reference
from kernels.decode_sum import decode_sum_encode_reference, decode_sum_reference
from kernels.quantize import dequantize_reference, quantize_reference
from kernels.select_top import ENTRY_BYTES, entries, scatter_sum_reference, select_top_reference
from kernels.sign_pack import sign_pack_reference, sign_unpack_reference
from kernels.wire import TINY, WireFormat

Encoded = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
"""Wire, new residual, statistics."""
FORMATS = ("bf16", "int8", "fp8", "int4")
RESIDUALS = (None, torch.float32, torch.bfloat16)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """op, and what it is called with: rows of m values; wire format, or k entries of a row; dtypes where they vary."""

    op: str
    rows: int
    m: int
    wire_format: WireFormat | None = None
    k: int = 0
    residual: torch.dtype | None = None
    dtype: torch.dtype = torch.float32
    out: torch.dtype = torch.float32

    def __str__(self) -> str:
        parts = [self.op, f"[{self.rows}, {self.m}]"]
        if self.wire_format:
            parts.append(f"{self.wire_format.name} block {self.wire_format.block}")
        parts += [f"k {self.k}"] if self.k else []
        parts += [f"residual {self.residual}"] if self.residual else []
        parts += [f"{self.dtype} to {self.out}"] if self.op == "bucket_pack" else []
        return " ".join(parts)


def cases(op: str, blocks: tuple[int, ...] = (32, 256, 4096), most: int = 40_000) -> Iterator[Case]:
    """All formats, residuals and dtypes of an op, at odd sizes of at most `most` values a row."""
    if op == "bucket_pack":
        yield from (Case(op, 1, min(most, 5003), dtype=dtype, out=out) for dtype in DTYPES for out in DTYPES)
        return
    for i, residual in enumerate(RESIDUALS if op in ("select_top", "decode_sum_encode", *ENCODERS) else (None,)):
        if op in ("select_top", "scatter_sum"):
            sizes = ((1, 1, 1), (3, 17, 17), (2, 1000, 7), (1, 4111, 1), (1 + i, most - 1, most // 97))
            yield from (Case(op, rows, m, k=k, residual=residual) for rows, m, k in sizes if m <= most)
            continue
        for name in FORMATS if "quantize" in op else ("sign",) if "sign" in op else (*FORMATS, "sign"):
            for block in {max(block, 256) for block in blocks} if name == "sign" else blocks:
                for rows, count in ((1, 1), (1, 7), (2 + i, 3), (5, 1)):
                    if block * count <= most:
                        yield Case(op, rows, block * count, WireFormat(name, block), residual=residual)


def draw(rows: int, m: int, block: int = 256) -> torch.Tensor:
    """fp32 [rows, m], heavy-tailed, a hundredth of it and some words of 32 zeros of both signs; from the second block
    on, of every eight some that are zero, below TINY, just TINY, huge, or halves, which lie between two codes of int4,
    int8, and fp8 or bf16.
    """
    x_rm = torch.randn(rows, m) * torch.randn(rows, m).mul_(2).exp_()
    x_rm *= (torch.rand(rows, m) > 0.01).float()  # of both signs: a product with zero keeps the other's
    blocks = x_rm[:, : m // block * block].unflatten(1, (-1, block)).flatten(0, 1).clone()
    unit = blocks / blocks.abs().amax(-1, keepdim=True)
    for place, factor in ((1, TINY / 4), (2, TINY), (3, 1e30), (4, 0.0)):
        blocks[place::8] = unit[place::8] * factor
    for place, level in ((5, 7), (6, 127), (7, 448)):
        halves = torch.randint(-2 * level, 2 * level + 1, blocks[place::8].shape).float() / 2
        halves[:, :1] = level
        blocks[place::8] = halves
    x_rm[:, : m // block * block] = blocks.view(rows, -1)
    words = torch.rand(rows, m // 32) > 0.1
    x_rm[:, : m // 32 * 32] *= words.float().repeat_interleave(32, dim=1)
    return x_rm


def differences(case: Case, run: Callable[..., Any], device: str = "cpu") -> list[str]:
    """What `run` (an implementation of case.op, or its public function) does otherwise than the reference, as texts."""
    return [f"{case}: {text}" for text in _COMPARE[case.op](case, run, device)]


def spoilt(case: Case, run: Callable[..., Any], device: str = "cpu") -> list[str]:
    """What an encoding op gets wrong where values are NaN or Inf: they are counted, and spoil their block alone."""
    f = case.wire_format
    assert f
    x_rm = draw(case.rows, case.m, f.block)
    bad_rm = x_rm.clone()
    bad_rm[0, 5], bad_rm[0, 9], bad_rm[-1, -1] = torch.nan, torch.inf, -torch.inf
    touched = torch.zeros(case.rows, case.m // f.block, dtype=torch.bool)
    touched[0, 0] = touched[-1, -1] = True
    clean = _encode(case, run, device, x_rm.to(device), f, shape=(case.rows, case.m))
    found = _encode(case, run, device, bad_rm.to(device), f, shape=(case.rows, case.m))
    decode = sign_unpack_reference if f.name == "sign" else dequantize_reference
    pairs = [(decode(wire, f, torch.empty_like(x_rm)) for wire in (found[0], clean[0])), (found[1], clean[1])]
    texts = [] if found[2][2] == 3 else [f"3 values aren't finite, {found[2][2]} were counted"]
    for what, (a, b) in zip(("decoded", "new residual"), pairs, strict=True):
        if a is not None and b is not None:
            blocks = [values.unflatten(1, (-1, f.block))[~touched] for values in (a, b)]
            texts += _unequal(f"{what} of other blocks", *blocks)
    return [f"{case}: {text}" for text in texts]


def usable(op: str, device: str) -> dict[str, Callable[..., Any]]:
    """Backend -> implementation, of those that `backend.IMPLEMENTATIONS` names and that run here."""
    found = {}
    for name in backend.IMPLEMENTATIONS[op]:
        try:
            with backend.forced(name):
                run = backend.pick(op, device)
        except ValueError:
            continue
        assert run is not None
        found[name] = run
    return found


def _unequal(what: str, found: torch.Tensor, expected: torch.Tensor) -> Iterator[str]:
    """Bits are compared, -0.0 isn't 0.0; a NaN equals any."""
    found = found.cpu()
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        yield f"{what} is {found.dtype} {tuple(found.shape)}, not {expected.dtype} {tuple(expected.shape)}"
        return
    off = found.view(torch.uint8) != expected.contiguous().view(torch.uint8)
    if found.is_floating_point():
        off = off.unflatten(-1, (-1, found.itemsize)).any(-1) & ~(found.isnan() & expected.isnan())
    if off.any():
        first = tuple(off.nonzero()[0].tolist())
        yield f"{what}: {int(off.sum())} of {off.numel()} differ, at {first} {found[first]}, not {expected[first]}"


def _unequal_statistics(found: torch.Tensor, expected: torch.Tensor) -> Iterator[str]:
    found = found.cpu()
    if found.dtype != torch.float64 or found.shape != expected.shape or found[-1] != expected[-1]:
        yield f"statistics are {found}, not {expected}"
        return
    # An error that is itself rounding of what was encoded is known to that rounding only.
    slack = 1e-13 * expected[0] if expected.numel() == 3 else 0.0
    off = (found - expected).abs() > 1e-6 * expected.abs() + slack
    if off[:-1].any() and expected.isfinite().all():
        yield f"statistics are {found}, not {expected}"


def _residual(case: Case, shape: tuple[int, ...]) -> torch.Tensor | None:
    """The same for the implementation and the reference."""
    if case.residual is None:
        return None
    return torch.randn(shape, generator=torch.Generator().manual_seed(case.m)).to(case.residual)


def _encode(case: Case, run: Callable[..., Any], device: str, *first: Any, shape: tuple[int, ...]) -> Encoded:
    """Wire and new residual of `run(*first, wire, residual, new residual)`, which are one tensor."""
    width = case.wire_format.wire_bytes(case.m) if case.wire_format else case.k * ENTRY_BYTES
    wire = torch.zeros(*shape[:-1], width, dtype=torch.uint8, device=device)
    residual = _residual(case, shape)
    residual = None if residual is None else residual.to(device)
    statistics = run(*first, wire, residual, residual)
    return wire.cpu(), None if residual is None else residual.cpu(), statistics


def _compare_encode(case: Case, run: Callable[..., Any], device: str) -> Iterator[str]:
    assert case.wire_format
    x_rm = draw(case.rows, case.m, case.wire_format.block)
    before_rm = x_rm.to(device)
    found = _encode(case, run, device, before_rm, case.wire_format, shape=(case.rows, case.m))
    yield from _unequal("x afterwards", before_rm, x_rm)
    yield from _unequal_encoded(case, ENCODERS[case.op], x_rm, found)


def _unequal_encoded(
    case: Case, reference: Callable[..., Any], x_rm: torch.Tensor, found: Encoded, what: str = "wire"
) -> Iterator[str]:
    wire_format = case.wire_format
    assert wire_format
    expected = _encode(case, reference, "cpu", x_rm, wire_format, shape=tuple(x_rm.shape))
    sections = [wire_format.split(wire_rw, case.m) for wire_rw in (found[0], expected[0])]
    for section, a, b in zip(("scales", "mask", "codes"), *sections, strict=True):
        if wire_format.name == "sign" and section == "scales":
            if not torch.allclose(a, b, rtol=1e-5, atol=0):  # a sum in another order
                yield f"{what}'s scales: {a}, not {b}"
        else:
            yield from _unequal(f"{what}'s {section}", a, b)
    new_rm, expected_rm = found[1], expected[1]
    if expected_rm is not None and new_rm is not None:
        if wire_format.name == "sign":  # what its own scale leaves
            residual_rm = _residual(case, tuple(x_rm.shape))
            assert residual_rm is not None
            decoded_rm = sign_unpack_reference(found[0], wire_format, torch.empty_like(x_rm))
            expected_rm = (x_rm + residual_rm.float() - decoded_rm).to(case.residual)
        yield from _unequal("new residual", new_rm, expected_rm)
    if wire_format.name == "sign":
        yield from _unequal_statistics(found[2].cpu()[[0, 2]], expected[2][[0, 2]])
        if not torch.allclose(found[2].cpu()[1], expected[2][1], rtol=1e-4, atol=1e-9 * float(expected[2][0])):
            yield f"error is {found[2][1]}, not {expected[2][1]}"
    else:
        yield from _unequal_statistics(found[2], expected[2])


def _wire(case: Case) -> torch.Tensor:
    """What ranks sent: the reference's encoding of drawn rows."""
    assert case.wire_format
    x_rm = draw(case.rows, case.m, case.wire_format.block)
    encode = ENCODERS["sign_pack" if case.wire_format.name == "sign" else "quantize"]
    wire_rw = torch.zeros(case.rows, case.wire_format.wire_bytes(case.m), dtype=torch.uint8)
    encode(x_rm, case.wire_format, wire_rw)
    return wire_rw


def _compare_decode(case: Case, run: Callable[..., Any], device: str) -> Iterator[str]:
    wire_rw = _wire(case)
    shape = (case.m,) if case.op == "decode_sum" else (case.rows, case.m)
    expected, found = torch.empty(shape), torch.full(shape, torch.nan, device=device)
    DECODERS[case.op](wire_rw, case.wire_format, expected)
    yield from _unequal("returned", run(wire_rw.to(device), case.wire_format, found), expected)
    yield from _unequal("out", found, expected)


def _compare_decode_sum_encode(case: Case, run: Callable[..., Any], device: str) -> Iterator[str]:
    assert case.wire_format
    wire_rw = _wire(case)
    sum_m = decode_sum_reference(wire_rw, case.wire_format, torch.empty(case.m))
    found = _encode(case, run, device, wire_rw.to(device), case.wire_format, case.m, shape=(case.m,))
    rows = (None if x is None else x.unsqueeze(0) for x in found[:2])
    encode = ENCODERS["sign_pack" if case.wire_format.name == "sign" else "quantize"]
    yield from _unequal_encoded(case, encode, sum_m.unsqueeze(0), (*rows, found[2]))  # type: ignore[arg-type]


def _compare_select_top(case: Case, run: Callable[..., Any], device: str) -> Iterator[str]:
    x_rm = draw(case.rows, case.m)
    if case.m % 2:
        x_rm = x_rm.clamp(-9, 9).round()  # many of a bin
    found = _encode(case, run, device, x_rm.to(device), shape=(case.rows, case.m))
    expected = _encode(case, select_top_reference, "cpu", x_rm, shape=(case.rows, case.m))
    for what, a, b in zip(("values", "places"), entries(found[0]), entries(expected[0]), strict=True):
        yield from _unequal(what, a, b)
    if found[1] is not None and expected[1] is not None:
        yield from _unequal("new residual", found[1], expected[1])
    yield from _unequal_statistics(found[2], expected[2])


def _compare_scatter_sum(case: Case, run: Callable[..., Any], device: str) -> Iterator[str]:
    wire_rw = torch.zeros(case.rows, case.k * ENTRY_BYTES, dtype=torch.uint8)
    select_top_reference(torch.randn(case.rows, case.m), wire_rw)
    expected_m, found_m = torch.empty(case.m), torch.full((case.m,), torch.nan, device=device)
    scatter_sum_reference(wire_rw, expected_m)
    yield from _unequal("returned", run(wire_rw.to(device), found_m), expected_m)


def _compare_bucket_pack(case: Case, run: Callable[..., Any], device: str) -> Iterator[str]:
    halves = torch.tensor([1, 3, 5, 7]) / 2  # between two neighbours, and between subnormal ones
    special = [torch.tensor([7e4, 65520, 65519, -torch.inf, torch.nan]), halves * 2.0**-24]
    special += [1 + halves * step for step in (2.0**-10, 2.0**-7)]
    special_n = torch.cat(special)
    values = torch.cat([draw(1, case.m - special_n.numel()).flatten(), special_n])
    sizes = [1, 0, case.m // 3, case.m - case.m // 3 - 1]
    tensors = [x.to(case.dtype).view(1, -1) for x in values.split(sizes)]
    for factor in (1.0, 1 / 3):
        expected_n, found_n = (torch.empty(case.m, dtype=case.out, device=on) for on in ("cpu", device))
        statistics = run([x.to(device) for x in tensors], found_n, factor)
        yield from _unequal_statistics(statistics, bucket_pack_reference(tensors, expected_n, factor))
        yield from _unequal("out", found_n, expected_n)


ENCODERS: dict[str, Callable[..., Any]] = {"quantize": quantize_reference, "sign_pack": sign_pack_reference}
DECODERS: dict[str, Callable[..., Any]] = {
    "dequantize": dequantize_reference,
    "sign_unpack": sign_unpack_reference,
    "decode_sum": decode_sum_reference,
}
REFERENCES = {
    **ENCODERS,
    **DECODERS,
    "decode_sum_encode": decode_sum_encode_reference,
    "select_top": select_top_reference,
    "scatter_sum": scatter_sum_reference,
    "bucket_pack": bucket_pack_reference,
}
_COMPARE: dict[str, Callable[[Case, Callable[..., Any], str], Iterator[str]]] = {
    **dict.fromkeys(ENCODERS, _compare_encode),
    **dict.fromkeys(DECODERS, _compare_decode),
    "decode_sum_encode": _compare_decode_sum_encode,
    "select_top": _compare_select_top,
    "scatter_sum": _compare_scatter_sum,
    "bucket_pack": _compare_bucket_pack,
}
