"""The compression benchmark: formulas, table and verdict from given numbers, and the bytes of a run on four hosts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.gradient_compression import (
    PLAIN,
    bits_per_second,
    fitted_break_even,
    formula,
    measure,
    parse,
    rows_of,
    table,
    verdicts,
)
from tests.simulated_hosts import unavailable


def steps(seconds: list[float], sent: float, parts: tuple[float, float, float] | None = None) -> dict[str, Any]:
    """What a rank measures of one kind; packets of 660 bytes, so that a tenth are headers."""
    names = ("encode_seconds", "wire_seconds", "decode_seconds")
    of_step = [] if parts is None else [dict(zip(names, parts, strict=True))] * len(seconds)
    on_wire = sent / 0.9
    return {
        "seconds": seconds,
        "sent": [on_wire] * len(seconds),
        "packets": [on_wire / 660] * len(seconds),
        "ledger": [sent] * len(seconds),
        "parts": of_step,
    }


OPTIONS = parse("--tensors 2 --side 1024 --hosts 4".split())
N = 2 * 1024**2


def test_formulas_are_those_of_the_methods() -> None:
    assert formula(PLAIN, OPTIONS) == formula("DDP", OPTIONS) == 1.5 * 4 * N
    assert formula("bf16", OPTIONS) == formula("DDP, bf16 hook", OPTIONS) == 1.5 * 2 * N
    assert formula("int8", OPTIONS) == 1.5 * N * (1 + 4 / 256)
    assert formula("int4", OPTIONS) == 1.5 * N * (1 / 2 + 4 / 256)
    assert formula("1bit", OPTIONS) == 1.5 * N * (1 / 8 + 4 / 1024 + 1 / 256)
    assert formula("topk 1 %", OPTIONS) == pytest.approx(1.5 * 0.01 * N * 8)
    assert formula("powersgd rank 8", OPTIONS) == 1.5 * 4 * 8 * 2048 * 2
    # Half of all goes to the neighbour, a half of that half between the pairs, and the same back.
    assert formula("int8, two hops", OPTIONS) == 2 * (N / 2 + N / 4) * (1 + 4 / 256)
    assert [bits_per_second(rate) for rate in ("200mbit", "1gbit", "2.5gbit")] == [2e8, 1e9, 2.5e9]


def test_ratios_are_of_one_round_and_bytes_without_headers() -> None:
    found = {
        PLAIN: steps([2.0, 4.0, 2.0], 1.5 * 4 * N),  # the second round was disturbed
        "int8": steps([0.5, 1.0, 0.4], formula("int8", OPTIONS), (0.10, 0.4, 0.02)),
    }
    plain, int8 = rows_of(found, OPTIONS)
    assert plain.ratio == 1 and int8.ratio == 4 and int8.seconds == 0.5
    assert int8.off == pytest.approx(0) and int8.sent == pytest.approx(formula("int8", OPTIONS) / 0.9)
    saved = 8 * (plain.sent - int8.sent)
    assert int8.break_even == pytest.approx(saved / 0.12) and plain.break_even is None
    text = table("200mbit", [plain, int8], OPTIONS).splitlines()
    assert text[0] == "### 200mbit: 8.0 MiB of fp32 gradients, 4 hosts"
    assert text[-1] == f"| int8 | 3.39 | +0.0% | 0.500 | 4.00 | 0.100 | 0.400 | 0.020 | {int8.break_even / 1e9:.2f} |"


def test_each_claim_fails_alone() -> None:
    def checked(rate: str, int8: float = 3.0, int4: float = 5.0, more: float = 1.0, rounds: int = 3) -> list[bool]:
        found = {PLAIN: steps([2.0] * rounds, 1.5 * 4 * N)}
        for kind, ratio in (("int8", int8), ("int4", int4)):
            found[kind] = steps([2.0 / ratio] * rounds, more * formula(kind, OPTIONS), (0.01, 0.3, 0.01))
        return [holds for _, holds in verdicts(rate, rows_of(found, OPTIONS))]

    # Both speeds, bytes, the ledger, no codec slower below its break-even.
    assert checked("200mbit") == [True] * 5
    assert checked("200mbit", int8=2.9) == [False, True, True, True, True]
    assert checked("200mbit", int4=4.9) == [True, False, True, True, True]
    assert checked("200mbit", more=1.03) == [True, True, False, False, True]
    assert checked("1gbit", int8=1.5, int4=1.0) == [True] * 4
    assert checked("1gbit", int8=1.4, int4=0.9) == [False, True, True, False]
    assert checked("5gbit", int8=0.5) == [True, True, True]  # break-even is at 3.5 Gbit/s


def test_break_even_from_steps_is_where_both_kinds_take_as_long() -> None:
    def at(rate: str, fixed: float, sent: float) -> dict[str, Any]:
        return steps([fixed + 8 * sent / 0.9 / bits_per_second(rate)], sent, (0.1, 0.1, 0.1))

    rates = ("200mbit", "1gbit")
    rows = {rate: rows_of({PLAIN: at(rate, 0.1, 9e6), "int8": at(rate, 0.3, 4.5e6)}, OPTIONS) for rate in rates}
    assert fitted_break_even(rows, "int8") == pytest.approx(8 * 5e6 / 0.2)
    rows = {rate: rows_of({PLAIN: at(rate, 0.1, 9e6), "int8": at(rate, 0.05, 4.5e6)}, OPTIONS) for rate in rates}
    assert fitted_break_even(rows, "int8") == math.inf


reason = unavailable()


@pytest.mark.skipif(reason is not None, reason=reason or "")
def test_bytes_on_the_interfaces_of_four_hosts_are_those_of_the_formulas() -> None:
    options = parse("--tensors 4 --rounds 1 --warm-up 1 --no-ddp".split())
    rows = rows_of(measure("1gbit", options), options)
    assert len(rows) == 11
    for row in rows:
        assert abs(row.off) < 0.02, f"{row.kind}: {row.payload:.0f} bytes, by the formula {row.expected:.0f}"
        assert row.ledger == pytest.approx(row.expected, rel=0.01), row.kind
