"""The convergence benchmark: runs, flags, verdict, table and picture from given results, and short runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.compression_convergence import (
    BOUND,
    CODECS,
    LOSSY,
    Findings,
    Run,
    draw,
    flags,
    make_model,
    parse,
    runs,
    table,
)
from benchmarks.compression_convergence_rank import train
from data.indexed import IndexedWriter
from parallel.mesh import Layout, Mesh


def given(loss: float, error: float = 0.0) -> dict[str, Any]:
    curve = [[0, 7.0], [100, 4.0 * loss / 3], [300, loss]]
    return {"curve": curve, "loss": loss, "accumulated_error": error, "ratio": 4.0, "seconds": 1.0}


def all_runs(base: float = 3.0) -> dict[Run, dict[str, Any]]:
    """As they should be: each within its bound, feedback ten times better in the sum of gradients."""
    found = {}
    for run in runs():
        above = 1 + BOUND.get(run.codec, 0) / 100 * (0.9 if run.feedback else 1.2)
        found[run] = given(base * above, 0.01 if run.feedback else 0.1)
    return found


def test_every_codec_runs_with_and_without_feedback_and_int8_on_two_more_layouts() -> None:
    by_kind = {run.kind for run in runs() if run.where == "DP4"}
    assert by_kind == {"none", *CODECS, *(f"{codec} without feedback" for codec in CODECS)}
    assert [run.where for run in runs() if run.codec == "int8"] == ["DP4", "DP4", "EP2·TP2·DP2", "TP2·PP2·DP2"]
    assert all(run.base in runs() for run in runs())
    options = parse(["--steps", "30"])
    with_feedback, without, plain = (flags(run, options) for run in (Run("int4"), Run("int4", False), Run()))
    assert with_feedback["grad_compression_warmup_steps"] == 10 and "grad_compression" not in plain
    differing = {name for name in with_feedback if with_feedback[name] != without[name]}
    assert differing == {"grad_compression_residual"} and without["grad_compression_residual"] == "none"


def test_each_bound_fails_alone() -> None:
    assert all(holds for _, holds in Findings(all_runs()).judge())
    for codec, bound in BOUND.items():
        found = all_runs() | {Run(codec): given(3.0 * (1 + 1.01 * bound / 100), 0.01)}
        fails = [words for words, holds in Findings(found).judge() if not holds]
        assert fails and all(codec in words for words in fails)
        worse = all_runs()[Run(codec, False)]["loss"]
        found = all_runs() | {Run(codec, False): given(worse, 0.019)}  # feedback gains less than a half
        assert sum(not holds for _, holds in Findings(found).judge()) == 1
        found = all_runs() | {Run(codec, False): given(2.9, 0.1)}
        assert sum(not holds for _, holds in Findings(found).judge()) == (codec in LOSSY)
    layout = next(run for run in runs() if run.codec == "int8" and run.where == "TP2·PP2·DP2")
    assert sum(not holds for _, holds in Findings(all_runs() | {layout: given(3.02)}).judge()) == 1
    assert sum(not holds for _, holds in Findings(all_runs(base=6.5)).judge()) == 1  # learnt too little


def test_table_and_picture(tmp_path: Path) -> None:
    findings = Findings(all_runs())
    rows = table(findings).splitlines()
    assert rows[2] == "| none | DP4 | 1 | 3.0000 |  |  |  |"
    assert rows[5] == "| int8 | DP4 | 1 | 3.0135 | +0.45 % | 1.00% | 4.0× |"
    assert {row.count("|") for row in rows} == {8} and len(rows) == 2 + len(runs())
    pytest.importorskip("matplotlib")
    draw(findings, tmp_path / "curves.png", 100)
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def short_runs(directory: str) -> list[dict[str, Any]]:
    mesh = Mesh.create(Layout())
    options = parse("--steps 6 --seq-length 16 --global-batch-size 2 --eval-iters 8 --layers 1 --mtp 0".split())
    files = {"model": make_model(Path(directory) / str(mesh.rank), options), "data_path": [f"{directory}/corpus"]}
    wanted = (Run(ranks=2), Run("int4", ranks=2), Run("int4", False, ranks=2))
    return [train(flags(run, options) | files, 3, mesh) for run in wanted]


@pytest.mark.full
def test_the_sum_of_gradients_is_nearer_with_feedback(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "corpus", 1024) as writer:
        for document in np.random.default_rng().integers(1024, size=(64, 64)):
            writer.add_document(document)
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    for plain, with_feedback, without in run_ranks(2, short_runs, str(tmp_path)):
        assert [step for step, _ in plain["curve"]] == [0, 2, 4, 6] and plain["accumulated_error"] == 0
        assert plain["curve"][1] == with_feedback["curve"][1]  # a warm-up of two steps
        assert plain["curve"][2] != with_feedback["curve"][2]
        assert 0 < with_feedback["accumulated_error"] < without["accumulated_error"]
        assert plain["ratio"] == 1 and 7 < with_feedback["ratio"] < 8
