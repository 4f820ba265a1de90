"""What benchmarks/precision.py makes of its measurements, and one run by it. The times themselves aren't tested."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.precision import Result, table, train, verdicts
from data.indexed import IndexedWriter


def test_a_run_becomes_a_row() -> None:
    records = [{"tokens_per_second": 1.0, "peak_memory_gib": 0.5, "overflows": 2, "loss_scale": 8.0} for _ in range(5)]
    records += [
        {"tokens_per_second": x, "peak_memory_gib": 0.5, "overflows": 0, "loss_scale": 8.0} for x in (10, 30, 20)
    ]
    records[-1]["valid_loss"] = 4.02
    found = {"fp32": Result(40.0, 2.0**30, 4.0, 0, None), "fp16": Result.of(records)}
    assert table(found)[-1] == "| fp16 | 20 | 512 MiB | 4.0200 | +0.50% | 8, 10 |"


@pytest.mark.parametrize(("loss", "holds"), [(4.03, True), (3.95, False), (4.05, False)])
def test_a_loss_that_is_off_by_more_than_a_percent_is_said(loss: float, holds: bool) -> None:
    runs = {"fp32": Result(1.0, 1.0, 4.0, 0, None), "bf16": Result(1.0, 1.0, loss, 0, None)}
    ((found, text),) = verdicts(runs)
    assert found == holds and text.startswith("- holds" if holds else "- DOES NOT HOLD") and "bf16" in text


@pytest.mark.full
def test_a_short_run_in_fp16(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "text", vocab_size=1024) as writer:
        for i in range(3000):
            writer.add_document([(i * j) % 1024 for j in range(60)])
    options = argparse.Namespace(steps=4, ranks=4)
    result = train("fp16", options, str(tmp_path / "text"), tmp_path)
    assert result.valid_loss > 0 and result.peak > 2**20 and result.loss_scale is not None
