"""The display of a run, on a screen and in a file. Imports training.progress only."""

from __future__ import annotations

import io
import re

from training.progress import Progress


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def record(step: int, **more: float) -> dict[str, float]:
    usual = {"loss": 10.0 / step, "lr": 1e-3, "grad_norm": 0.5, "tokens_per_second": 12345.6, "step_seconds": 2.0}
    return {"step": step, **usual, **more}


def test_plain_lines_come_first_last_and_at_each_interval() -> None:
    stream = io.StringIO()
    with Progress(25, interval=10, stream=stream) as progress:
        for step in range(1, 26):
            progress.update(record(step))
    shown = stream.getvalue().splitlines()
    assert [int(re.match(r"step +(\d+)/25 ", line)[1]) for line in shown] == [1, 10, 20, 25]  # type: ignore[index]
    assert shown[1] == "step 10/25 | loss 1.0000 | lr 1.00e-03 | grad norm 0.500 | 12,346 tokens/s | eta 0:00:30"


def test_a_validation_is_shown_whenever_it_comes() -> None:
    stream = io.StringIO()
    progress = Progress(100, start=40, interval=50, stream=stream)
    for step in range(41, 46):
        progress.update(record(step, **({"valid_loss": 3.25, "bigram_loss": 4.5} if step == 44 else {})))
    first, second = stream.getvalue().splitlines()
    assert first.startswith("step  41/100 ") and "valid" not in first
    assert second.startswith("step  44/100 ") and "| valid loss 3.2500 | bigram 4.5000 |" in second


def test_the_slow_first_step_doesnt_spoil_the_estimate() -> None:
    stream = io.StringIO()
    progress = Progress(102, interval=2, stream=stream)
    progress.update(record(1, step_seconds=500.0))
    progress.update(record(2, step_seconds=1.0))
    assert stream.getvalue().splitlines()[1].endswith("eta 0:01:40")


def test_stages_without_a_loss_dont_crash_it() -> None:
    stream = io.StringIO()
    Progress(2, stream=stream).update({"step": 1})
    assert stream.getvalue() == "step 1/2 | \n"


def test_a_screen_shows_a_bar_and_gets_its_cursor_back() -> None:
    screen = Screen()
    with Progress(10, stream=screen) as progress:
        progress.update(record(5, valid_loss=3.25))
    shown = screen.getvalue()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "5/10" in text and "loss 2.0000" in text
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_other_ranks_show_nothing() -> None:
    for stream in (io.StringIO(), Screen()):
        with Progress(10, enabled=False, stream=stream) as progress:
            progress.update(record(10))
        assert stream.getvalue() == ""
