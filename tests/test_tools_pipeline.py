"""tools/pipeline.py: what it prints and writes, that wrong input is one line, and that it starts without torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.pipeline.catalogue import SCHEDULES
from parallel.pipeline.make import make_schedule
from parallel.pipeline.measured import Measured, write_measured
from parallel.pipeline.schedule import peak_activations
from parallel.pipeline.simulate import Costs, ShareCosts, simulate
from tools import pipeline

ROOT = Path(__file__).parent.parent
SIZES = ["--stages", "4", "--microbatches", "8"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    pipeline.main(arguments)
    return capsys.readouterr().out


def test_the_command_of_the_documents_runs_as_a_file_and_without_torch(tmp_path: Path) -> None:
    file = str(ROOT / "tools" / "pipeline.py")
    program = f"import runpy, sys; runpy.run_path({file!r}, run_name='__main__')\n"
    program += "assert not {'torch', 'matplotlib'} & set(sys.modules)"
    for command in ([sys.executable, file], [sys.executable, "-c", program]):
        arguments = [*command, "--schedule", "zb-v", *SIZES, "--costs", "1,1,1", "--width", "120"]
        done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("zb-v: 4 ranks, 8 micro-batches, makespan 25.5, idle 5.9%")
        assert "\x1b" not in done.stdout  # a pipe gets no colours


def test_drawing_comparing_and_the_critical_path(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    arguments = ["--schedule", "1f1b", *SIZES, "--send", "0.5", "--compare", "zb-v", "--width", "90"]
    out = printed(capsys, *arguments, "--png", str(picture))
    assert re.findall(r"^(\S+): 4 ranks, 8 micro-batches", out, re.MULTILINE) == ["1f1b", "zb-v"]
    assert max(map(len, out.splitlines()[:-1])) <= 90
    path = out.split("\n1f1b, critical path: ")[1]
    # 4 forwards down, then by turns to the last micro-batch, and 4 backwards up.
    assert "F0.0 → F1.0 → F2.0 → F3.0 B3.0" in path and "B3.7 → B2.7 → B1.7 → B0.7" in path
    assert picture.read_bytes().startswith(b"\x89PNG") and f"wrote {picture}" in out


def test_what_runs_together_is_marked_and_compared_with_the_table_without(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = printed(
        capsys, "--schedule", "dualpipe-v", "--overlap", "--compare", "dualpipe-v", *SIZES, "--width", "200"
    )
    overlapped, plain = drawn.split("\n\n")[:2]
    assert overlapped.startswith("dualpipe-v, overlapped: 4 ranks, 8 micro-batches, makespan 27, idle 11.1%")
    assert plain.startswith("dualpipe-v: 4 ranks, 8 micro-batches, makespan 25.5, idle 5.9%")
    pairs = make_schedule("dualpipe-v", 4, 8, together=True).together
    for rank, line in enumerate(overlapped.splitlines()[1:5]):
        assert line.count("&") == len(pairs[rank])
    assert "& (where there is room) runs together with the next" in overlapped and "&" not in plain


def test_the_list_has_every_schedule_with_the_least_idle_first(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "--list", *SIZES, "--costs", "1,1.5,0.5").splitlines()
    rows = [line.split() for line in lines[1:-1]]
    assert {row[0] for row in rows} == set(SCHEDULES)
    shares = [float(row[1].rstrip("%")) for row in rows]
    assert shares == sorted(shares)
    for name, idle, span, makespan, peak, stages in rows:
        schedule = make_schedule(name, 4, 8)
        timeline = simulate(schedule, Costs.even(schedule.placement, ShareCosts(1, 1.5, 0.5)))
        assert (idle, makespan) == (f"{timeline.idle_share:.1%}", f"{timeline.makespan:.4g}")
        worst = max(timeline.span_idle(rank) for rank in range(4))
        assert (float(span), float(peak)) == pytest.approx((worst, max(peak_activations(schedule))), abs=1e-3)
        assert int(stages) == schedule.stages // 4
    assert "from 8 (twice the ranks) on" in lines[-1]


def test_a_memory_limit_puts_what_fits_first(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "--list", *SIZES, "--memory-limit", "3", "--schedule", "zb-v")
    assert "peak memory 4 is above --memory-limit 3" in out
    rows = [line.split() for line in out.split("stages a rank\n")[1].splitlines()[:-2]]
    over = [row[-1] == "over" for row in rows]
    assert over == sorted(over) and not all(over) and any(over)
    assert all((float(row[4]) > 3) == out for row, out in zip(rows, over, strict=True))


def test_auto_is_searched_for_within_the_limit_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--stages", "2", "--microbatches", "3", "--costs", "1,2,0.5", "--send", "0.1", "--memory-limit", "1.5"]
    out = printed(capsys, "--schedule", "auto", "--list", "--chunks", "2", *sizes)
    assert out.startswith("auto: 2 ranks, 3 micro-batches") and "above --memory-limit 1.5: --list" not in out
    rows = [line.split() for line in out.split("stages a rank\n")[1].splitlines()]
    (auto,) = (row for row in rows if row[0] == "auto")
    assert float(auto[4]) <= 1.5 and auto[5] == "2"
    others = [row for row in rows if row[0] in SCHEDULES and row[5] == "2" and row[-1] != "over"]
    assert all(float(auto[3]) <= float(row[3]) for row in others)


def test_a_limit_that_a_schedule_just_keeps_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    # 23 stages' activations of a fifth of 1 each: their sum isn't 4.6 to the last digit.
    out = printed(capsys, "--schedule", "interleaved", "--chunks", "5", *SIZES, "--memory-limit", "4.6")
    assert "peak memory 4.6" in out and "above --memory-limit" not in out


def test_ranks_with_next_to_nothing_are_left_out_of_the_critical_path(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "--schedule", "zb-v", "--stages", "4", "--microbatches", "128", "--width", "100")
    said = " ".join(out.split("zb-v, critical path: ")[1].split())
    assert " 0%" not in said and re.search(r"of its time on rank \d \d+%", said)


def test_a_reader_that_leaves_early_ends_it_silently() -> None:
    command = [sys.executable, str(ROOT / "tools" / "pipeline.py"), "--schedule", "1f1b", "--width", "200000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stderr is not None
        assert running.stdout.readline().startswith(b"1f1b: 4 ranks")
        running.stdout.close()  # more than a pipe holds is still to come
        assert running.stderr.read() == b""
        assert running.wait(timeout=60) == 0


def test_a_missing_directory_is_refused_before_any_search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    simulated: list[str] = []
    monkeypatch.setattr(pipeline, "make_schedule", lambda name, *_, **__: simulated.append(name))
    with pytest.raises(SystemExit, match="there is no directory"):
        pipeline.main(["--schedule", "auto", "--png", str(tmp_path / "absent" / "a.png")])
    assert simulated == []


def test_what_a_run_measured_is_drawn_beside_its_simulation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    schedule = make_schedule("zb-h1", 2, 4)
    timeline = simulate(schedule, Costs.even(schedule.placement, ShareCosts(0.01, 0.02, 0.005, 0.001)))
    file, _ = write_measured(tmp_path / "pipeline", Measured(timeline, 5, 2e-4))
    picture = tmp_path / "a.png"
    out = printed(capsys, "--measured", str(tmp_path), "--width", "80", "--png", str(picture))
    heads = re.findall(r"^zb-h1, (.*?): 2 ranks,", out, re.MULTILINE)
    assert heads == ["step 5 measured, clocks within 0.2 ms", "simulated"] and picture.exists()
    assert "mean of a rank: forward 10, gradients of inputs 20, weights 5 ms; message 1 ms (estimated)" in " ".join(
        out.split()
    )
    assert "--list --stages 2 --microbatches 4 --costs 10,20,5 --send 1" in out
    assert printed(capsys, "--measured", str(file), "--width", "80") in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--schedule is missing: choose one of gpipe, 1f1b"),
        (("--schedule", "zb-w"), "'zb-w' is unknown: choose one of"),
        (("--schedule", "1f1b", "--compare", "zb-w"), "'zb-w' is unknown: choose one of"),
        (("--schedule", "1f1b", "--stages", "0"), "at least 1 pipeline rank, got 0: use 1"),
        (("--schedule", "1f1b", "--microbatches", "0"), "at least 1 micro-batch, got 0: use 1"),
        (("--schedule", "zb-v", "--chunks", "3"), "zb-v has 2 stages a rank, not 3"),
        (("--schedule", "auto", "--memory-limit", "0.1"), "the smallest limit that works is 1"),
        (("--schedule", "1f1b", "--costs", "1,1"), "--costs 1,1 must be three numbers F,I,W such as 1,1,1"),
        (("--schedule", "1f1b", "--costs", "1,0,1"), "three numbers above 0"),
        (("--schedule", "1f1b", "--send", "-1"), "--send -1 must be a number from 0 on"),
        (("--schedule", "1f1b", "--stages", "four"), "--stages"),
        (("--schedul", "1f1b"), "--schedule"),
        (("--schedule", "1f1b", "--png", "a.pdf"), "--png a.pdf must end in .png"),
        (("--schedule", "1f1b", "--png", "/absent/a.png"), "--png /absent/a.png: there is no directory /absent"),
        (("--measured", "absent"), "absent doesn't exist"),
        (("--measured", "absent", "--schedule", "1f1b"), "leave --schedule"),
    ],
)
def test_wrong_input_is_answered_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        pipeline.main(arguments)
    said = str(ended.value)
    assert said.startswith("error: ") and message in said and "\n" not in said
