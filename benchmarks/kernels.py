"""Ops on gradients, by every implementation that runs here: time, bandwidth, and its share of a memory copy's.

Lives here: the command and its table. A bandwidth is bytes read and written a second, each tensor counted once; the
copy is torch's copy_ of a buffer larger than the caches, on the same device (one thread on a CPU), counted likewise.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # run as a file: this directory would hide the room `kernels`
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from kernels import backend
from kernels.select_top import ENTRY_BYTES
from kernels.wire import WireFormat
from tests.kernels.cases import DTYPES, FORMATS, REFERENCES, RESIDUALS, cases, differences, spoilt, usable

RANKS = 4
"""Rows that a sum is over."""
DENSITY = 0.01
"""Of top-k."""
Run = Callable[..., Any]


@dataclass(frozen=True)
class Workload:
    """What is timed: an op's arguments, made when they are asked for, and the bytes that it reads and writes."""

    op: str
    what: str
    values: int
    moved: int
    arguments: Callable[[], tuple[Any, ...]]


def workloads(op: str, values: int, device: str) -> Iterator[Workload]:
    """Every format, residual and dtype of an op on about `values` fp32 values, an odd number of blocks a row."""
    if op == "bucket_pack":
        for dtype in DTYPES:
            for out in DTYPES:
                what = f"{_short(dtype)} to {_short(out)}"
                moved = values * (dtype.itemsize + out.itemsize)
                yield Workload(op, what, values, moved, functools.partial(_pack, values, dtype, out, device))
        return
    sums = "sum" in op
    residuals = RESIDUALS if op in ("quantize", "sign_pack", "decode_sum_encode", "select_top") else (None,)
    names = ("top 1 %",) if op in ("select_top", "scatter_sum") else ("sign",) if "sign" in op else FORMATS
    for name in (*names, "sign") if op.startswith("decode_sum") else names:
        block = 1024 if name == "sign" else 256
        # A sum makes `values` of RANKS rows as long; what encodes or decodes has them in RANKS rows.
        blocks = values // block if sums else values // (RANKS * block)
        m = max(blocks - (blocks + 1) % 2, 1) * block
        wire_format = None if name == "top 1 %" else WireFormat(name, block)  # type: ignore[arg-type]
        row = wire_format.wire_bytes(m) if wire_format else _entries(m)
        for residual in residuals:
            kept = 0 if residual is None else 2 * residual.itemsize * (m if sums else RANKS * m)
            fp32 = {"decode_sum": 4 * m, "scatter_sum": 4 * m, "decode_sum_encode": row}.get(op, 4 * RANKS * m)
            what = name if residual is None else f"{name}, residual {_short(residual)}"
            make = functools.partial(_coded, op, wire_format, m, residual, device)
            yield Workload(op, what, m if sums else RANKS * m, RANKS * row + fp32 + kept, make)


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def _entries(m: int) -> int:
    return max(int(m * DENSITY), 1) * ENTRY_BYTES


def _pack(values: int, dtype: torch.dtype, out: torch.dtype, device: str) -> tuple[Any, ...]:
    """Tensors of a small model's sizes."""
    sizes = [min(300_007, values - start) for start in range(0, values, 300_007)]
    tensors = [torch.randn(size, device=device).to(dtype) for size in sizes]
    return tensors, torch.empty(values, dtype=out, device=device), 0.5


def _coded(
    op: str, wire_format: WireFormat | None, m: int, residual: torch.dtype | None, device: str
) -> tuple[Any, ...]:
    x_rm = torch.randn(RANKS, m, device=device)
    width = wire_format.wire_bytes(m) if wire_format else _entries(m)
    wire_rw = torch.zeros(RANKS, width, dtype=torch.uint8, device=device)
    middle = () if wire_format is None else (wire_format,)
    encodes = op in ("quantize", "sign_pack", "select_top")
    if not encodes and wire_format:
        REFERENCES["sign_pack" if wire_format.name == "sign" else "quantize"](x_rm, wire_format, wire_rw)
    elif not encodes:
        _place_at_random(wire_rw, m)
    shape = (m,) if op == "decode_sum_encode" else (RANKS, m)
    kept = None if residual is None else torch.randn(shape, device=device).to(residual)
    if encodes:
        return x_rm, *middle, wire_rw, kept, kept
    if op == "decode_sum_encode":
        return wire_rw, *middle, m, torch.zeros_like(wire_rw[0]), kept, kept
    out = torch.empty(m if "sum" in op else (RANKS, m), device=device)
    return wire_rw, *middle, out


def _place_at_random(wire_rw: torch.Tensor, m: int) -> None:
    """Entries in order, each place once."""
    half = wire_rw.shape[1] // 2
    for wire_w in wire_rw:
        places = torch.randperm(m, device=wire_rw.device)[: half // 4].sort().values
        wire_w[half:].view(torch.int32).copy_(places)
        wire_w[:half].view(torch.float32).normal_()


class Clock:
    """Seconds of calls on one device, and those of the copy that they are measured against, in turns."""

    def __init__(self, device: str, rounds: int) -> None:
        self.device, self.rounds = device, rounds
        values = (512 if device == "cuda" else 128) << 18  # MiB
        self._from, self._to = (torch.zeros(values, device=device) for _ in range(2))
        self.copy_bytes = 2 * self._from.nbytes

    def copy(self) -> None:
        self._to.copy_(self._from)

    def measure(self, call: Callable[[], Any]) -> tuple[float, float]:
        """Medians: of the call, of the copy."""
        for warm_up in (call, self.copy, call):  # compiles, and touches all memory
            warm_up()
        seconds: tuple[list[float], list[float]] = ([], [])
        for _ in range(self.rounds):
            for run, taken in zip((call, self.copy), seconds, strict=True):
                taken.append(self._seconds(run))
        return statistics.median(seconds[0]), statistics.median(seconds[1])

    def _seconds(self, run: Callable[[], Any]) -> float:
        if self.device == "cuda":
            # On the stream that the kernels run on, idle before. It sleeps a millisecond first, so that the host has
            # launched everything by then and the time is the device's.
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000)
            start.record()
            run()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3
        start_s = time.perf_counter()
        run()
        return time.perf_counter() - start_s


def check(ops: list[str], chosen: list[str], device: str) -> int:
    """Compares every implementation with its reference, bit for bit where they promise it; how many differ."""
    found = 0
    for op in ops:
        for name, run in usable(op, device).items():
            if name not in chosen:
                continue
            start = time.perf_counter()
            if interpreted(name, device):
                compared = list(cases(op, blocks=(256,), most=1100))
            else:  # a block size more is a kernel more to compile
                compared = list(cases(op, blocks=(32, 256, 4096) if name == "native" else (32, 256)))
            texts = [text for case in compared for text in differences(case, run, device)]
            if op in ("quantize", "sign_pack"):
                texts += [text for case in compared for text in spoilt(case, run, device)]
            found += len(texts)
            took = time.perf_counter() - start
            print(f"{op} {name}: {len(compared)} cases, {len(texts)} differences, {took:.1f} s", flush=True)
            print("".join(f"  {text}\n" for text in texts[:5]), end="")
    return found


def interpreted(name: str, device: str) -> bool:
    """Triton on a CPU: right or wrong can be told, how fast cannot."""
    return name == "triton" and device == "cpu"


def table(ops: list[str], chosen: list[str], device: str, sizes: list[float], rounds: int) -> Iterator[str]:
    """Lines of Markdown, each as it is measured."""
    clock = Clock(device, rounds)
    yield "| Op | Format | Values | Backend | ms | GB/s | Share of a copy |"
    yield "|---|---|---|---|---|---|---|"
    for size in sizes:
        for op in ops:
            runs = {**usable(op, device), "torch": REFERENCES[op]}
            runs = {name: run for name, run in runs.items() if name in chosen and not interpreted(name, device)}
            for work in workloads(op, int(size * 2**18), device) if runs else ():
                arguments = work.arguments()
                for name, run in runs.items():
                    clock.rounds = min(rounds, 3) if name == "torch" else rounds
                    seconds, copy_seconds = clock.measure(functools.partial(run, *arguments))
                    share = (work.moved / seconds) / (clock.copy_bytes / copy_seconds)
                    numbers = f"{seconds * 1e3:.3f} | {work.moved / seconds / 1e9:.1f} | {share:.2f}"
                    yield f"| {work.op} | {work.what} | {work.values:,} | {name} | {numbers} |"
    _, copy_seconds = clock.measure(clock.copy)
    yield ""
    yield f"Copy of {clock.copy_bytes / 2**21:.0f} MiB on {device}: {clock.copy_bytes / copy_seconds / 1e9:.1f} GB/s."


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels",
        description="Ops on gradients by every implementation that runs here: time, and bandwidth beside that of a "
        "memory copy. Bandwidth: bytes read and written a second, each tensor counted once.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="first compare with the references; exit 1 if they differ")
    parser.add_argument("--check-only", action="store_true", help="compare and stop")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--ops", nargs="+", choices=backend.IMPLEMENTATIONS, default=[*backend.IMPLEMENTATIONS])
    parser.add_argument("--backends", nargs="+", choices=backend.BACKENDS[1:], default=["cuda", "triton", "native"])
    parser.add_argument("--mib", nargs="+", type=float, help="of fp32 values; default: 32 and 3.3, 256 and 33 on a GPU")
    parser.add_argument(
        "--rounds", type=int, default=9, help="calls of each, in turns with the copy; medians are shown"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    start = time.perf_counter()
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU, one thread"
    # The reference is timed where it is asked for, and compared with nothing.
    serving = {op: [name for name in ("torch", *usable(op, device)) if name in options.backends] for op in options.ops}
    print(f"On {where}: {'; '.join(f'{op}: ' + (', '.join(names) or 'none') for op, names in serving.items())}\n")
    checks = options.check or options.check_only
    if not any({*names} - ({"torch"} if checks else set()) for names in serving.values()):
        print(f"nothing to {'compare' if checks else 'measure'}: none of {', '.join(options.backends)} runs here")
        return 1
    if checks:
        found = check(options.ops, options.backends, device)
        print(f"\n{found} differences from the references\n", flush=True)
        if found or options.check_only:
            return int(found > 0)
    sizes = options.mib or ([256.0, 33.0] if device == "cuda" else [32.0, 3.3])
    for line in table(options.ops, options.backends, device, sizes, options.rounds):
        print(line, flush=True)
    print(f"\n{time.perf_counter() - start:.0f} s in all.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
