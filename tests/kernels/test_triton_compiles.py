"""Every Triton kernel compiles for sm_80, sm_90 and sm_100, loads 16 bytes at a time and spills no register.

No GPU is needed: the launches that the ops make are compiled as the launcher would (same specialisation of arguments,
same options), and the assembler's report on that very binary is read. Imports `kernels`; skips without triton.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.bucket_pack import DTYPES
from kernels.wire import WireFormat

pytest.importorskip("triton", reason="triton is not installed")

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, make_backend  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402

from kernels.triton_ops import bucket_pack, decode_sum, quantize, select_top  # noqa: E402
from kernels.triton_ops.launch import Launch  # noqa: E402

CAPABILITIES = (80, 90, 100)
ROUNDS_OTHERWISE = re.compile(r"\bfma\.\S+|\S+\.ftz\S*|div\.(?:full|approx)\S*")
"""Ways of rounding that the references don't have."""
VECTOR_LOAD = re.compile(r"ld\.global[.\w:]*\.(v4\.[bfsu]32|v2\.[bfsu]64|v8\.[bfsu]32|v4\.[bfsu]64)")


@dataclass(frozen=True)
class Binary:
    """What came of one launch for one GPU."""

    ptx: str
    registers: int
    spilled: int
    """Bytes of stores and loads."""


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The assembler reports on what it makes, not on what lies in a cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")


def compiled(launch: Launch, capability: int) -> Binary:
    """The launch as `JITFunction.run` would compile it, arguments specialised as they are."""
    target = GPUTarget("cuda", capability, 32)
    backend, kernel = make_backend(target), launch.kernel
    options = {**launch.options, "debug": False}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, left = bind(*launch.arguments, **options)
    compiler_options, signature, constants, attributes = kernel._pack_args(
        backend, options, bound, specialization, left
    )
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        source = ASTSource(kernel, signature, constants, attributes)
        made = triton.compile(source, target=target, options=compiler_options.__dict__)
    stores, loads = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log.getvalue())[-1]
    (registers,) = re.findall(r"Used (\d+) registers", log.getvalue())[-1:]
    return Binary(made.asm["ptx"], int(registers), int(stores) + int(loads))


def empty(*shape: int, dtype: torch.dtype | None = torch.float32) -> Any:
    """Memory at a multiple of 16 bytes, as a GPU's allocator gives it; None where there is no dtype."""
    return None if dtype is None else torch.empty(*shape, dtype=dtype)


def encode(name: str, block: int, read: torch.dtype | None, written: torch.dtype | None) -> Launch:
    wire_format = WireFormat(name, block)
    wire_rw = empty(2, wire_format.wire_bytes(8192), dtype=torch.uint8)
    x, residual, new = (empty(2, 8192, dtype=dtype) for dtype in (torch.float32, read, written))
    return quantize.encode(x, wire_format, wire_rw, residual, new)[0]


def decode(name: str, block: int) -> Launch:
    wire_format = WireFormat(name, block)
    wire_rw = empty(2, wire_format.wire_bytes(8192), dtype=torch.uint8)
    return quantize.decode(wire_rw, wire_format, empty(2, 8192))


def sum_rows(name: str, block: int) -> Launch:
    wire_format = WireFormat(name, block)
    wire_rw = empty(2, wire_format.wire_bytes(8192), dtype=torch.uint8)
    return decode_sum.sum_rows(wire_rw, wire_format, empty(8192))


def sum_rows_encode(name: str, block: int, read: torch.dtype | None, written: torch.dtype | None) -> Launch:
    wire_format = WireFormat(name, block)
    wire_rw = empty(2, wire_format.wire_bytes(8192), dtype=torch.uint8)
    residuals = (empty(8192, dtype=read), empty(8192, dtype=written))
    return decode_sum.sum_rows_encode(wire_rw, wire_format, 8192, wire_rw[0], *residuals)[0]


def select(step: int, m: int, read: torch.dtype | None, written: torch.dtype | None) -> Launch:
    x, residual, new = (empty(2, m, dtype=dtype) for dtype in (torch.float32, read, written))
    return select_top.select(x, empty(2, 8 * min(m, 32), dtype=torch.uint8), residual, new)[0][step]


def scatter(k: int) -> Launch:
    return select_top.scatter(empty(2, 8 * k, dtype=torch.uint8), empty(8192))[0]


def pack(source: torch.dtype, target: torch.dtype) -> Launch:
    return bucket_pack.pack([empty(8192, dtype=source)], empty(8192, dtype=target), 1.0)[0]


FP32, BF16 = torch.float32, torch.bfloat16
# One of each kernel and way of storing codes.
REPRESENTATIVES: list[tuple[Callable[..., Launch], tuple[Any, ...]]] = [
    (encode, ("int8", 256, FP32, FP32)),
    (encode, ("sign", 1024, BF16, BF16)),
    (decode, ("int4", 256)),
    (sum_rows, ("sign", 1024)),
    (sum_rows_encode, ("int4", 256, FP32, FP32)),
    *((select, (step, 8192, FP32, FP32)) for step in range(4)),
    (scatter, (32,)),
    (pack, (BF16, FP32)),
]
# Dtypes of the residual that is read and of the one that is written.
PAIRS = [(None, None), (None, FP32), (None, BF16), (FP32, FP32), (BF16, BF16)]
BLOCKS = {"int8": (256, 32, 4096), "fp8": (256, 32, 4096), "int4": (256, 32, 4096), "sign": (1024, 256, 4096)}
USUAL = [("bf16", 256), *((name, blocks[0]) for name, blocks in BLOCKS.items())]
UNUSUAL = [(name, block) for name, blocks in BLOCKS.items() for block in blocks[1:]]
ENCODED = [(*block, *pair) for block in USUAL for pair in PAIRS] + [
    (*block, dtype, dtype) for block in UNUSUAL for dtype in (None, BF16)
]
VARIANTS: dict[Callable[..., Launch], list[tuple[Any, ...]]] = {
    encode: ENCODED,
    sum_rows_encode: ENCODED,
    decode: USUAL + UNUSUAL,
    sum_rows: USUAL + UNUSUAL,
    select: [(step, m, *pair) for step in range(4) for m in (8192, 8191) for pair in PAIRS if step == 3 or not pair[1]]
    + [(step, m, dtype, None) for step in range(2) for m in (8192, 8191) for dtype in (FP32, BF16)]
    + [(step, 1, None, None) for step in range(4)],
    scatter: [(32,), (31,), (1,)],
    pack: [(source, target) for source in DTYPES for target in DTYPES],
}


def faults(function: Callable[..., Launch], arguments: tuple[Any, ...], capability: int) -> list[str]:
    launch = function(*arguments)
    binary = compiled(launch, capability)
    what = f"{launch.kernel.__name__} {arguments} sm_{capability}: {binary.registers} registers"
    print(f"{what}, loads {', '.join(sorted(set(re.findall('ld.global[.]([^ ;]*)', binary.ptx))))}")
    found = [f"{what}, {binary.spilled} bytes spilled"] if binary.spilled else []
    found += [f"{what}: {way}" for way in set(ROUNDS_OTHERWISE.findall(binary.ptx))]
    aligned = function not in (select, scatter) or arguments[-3 if function is select else 0] % 16 == 0
    if aligned and launch.kernel is not select_top.place_tiles_kernel and not VECTOR_LOAD.search(binary.ptx):
        found.append(f"{what}: no load of 16 bytes")
    return found


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("function", "arguments"), REPRESENTATIVES)
def test_a_kernel_of_each_kind(function: Callable[..., Launch], arguments: tuple[Any, ...], capability: int) -> None:
    assert not faults(function, arguments, capability)


@pytest.mark.full
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("function", "first"), dict.fromkeys((f, v[0]) for f, all_of in VARIANTS.items() for v in all_of)
)
def test_every_variant(function: Callable[..., Launch], first: Any, capability: int) -> None:
    """All that have the first argument, a format for most kernels, in common."""
    variants = [arguments for arguments in VARIANTS[function] if arguments[0] == first]
    found = [fault for arguments in variants for fault in faults(function, arguments, capability)]
    assert not found, "\n".join(found)
