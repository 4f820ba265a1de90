"""Each rank's structured log, and what its terminal shows. Imports training.logs only."""

from __future__ import annotations

import json
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from training.logs import RankLogs


def lines(logs: RankLogs) -> list[dict[str, Any]]:
    return [json.loads(line) for line in logs.path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[RankLogs]:
    with RankLogs(tmp_path / "logs", rank=3, coordinates={"tp": 1, "pp": 0}) as logs:
        yield logs


def test_a_line_says_when_where_and_at_which_step(logs: RankLogs) -> None:
    logging.getLogger("someone.else").info("before %s", "training")
    logs.step = 17
    logging.getLogger("training.trainer").warning("Zahlen über alles")
    first, second = lines(logs)
    assert logs.path.name == "rank_00003.jsonl"
    assert set(first) == {
        *("time", "monotonic", "host", "rank", "coordinates", "step", "level", "logger", "message"),
    }
    assert (first["message"], first["step"], first["level"]) == ("before training", None, "INFO")
    assert (second["message"], second["step"], second["level"]) == ("Zahlen über alles", 17, "WARNING")
    assert second["rank"] == 3 and second["coordinates"] == {"tp": 1, "pp": 0}
    assert second["monotonic"] >= first["monotonic"] and second["time"].endswith("+00:00")


def test_tracebacks_stay_one_line(logs: RankLogs) -> None:
    try:
        raise KeyError("lost")
    except KeyError:
        logging.getLogger("x").exception("failed\nbadly")
    (line,) = lines(logs)
    assert line["message"] == "failed\nbadly"
    assert "KeyError: 'lost'" in line["exception"]


def test_warnings_threads_and_uncaught_exceptions_are_in_the_file(
    logs: RankLogs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)  # catch_warnings has replaced the hook
        logging.captureWarnings(True)
        warnings.warn("careful", stacklevel=1)
        logging.captureWarnings(False)
    thread = threading.Thread(target=lambda: 1 / 0, name="prefetch")
    thread.start()
    thread.join()
    sys.excepthook(ValueError, ValueError("at last"), None)
    messages = [line["message"] for line in lines(logs)]
    assert any("careful" in message for message in messages)
    assert "thread prefetch: ZeroDivisionError: division by zero" in messages
    assert "ValueError: at last" in messages
    assert "ZeroDivisionError" in lines(logs)[1]["exception"]
    shown = capsys.readouterr().err
    assert shown.count("ValueError: at last") == 1


def test_loggers_that_pass_nothing_on_are_in_the_file_too(tmp_path: Path) -> None:
    closed = logging.getLogger("closed.library")
    closed.propagate = False
    with RankLogs(tmp_path) as logs:
        closed.warning("from within")
    closed.warning("after the end")
    closed.propagate = True
    assert [line["message"] for line in lines(logs)] == ["from within"]


def test_rank_0_shows_what_this_project_says_and_everyones_warnings_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RankLogs(tmp_path, rank=0) as logs:
        logging.getLogger("training.trainer").info("starting")
        logging.getLogger("matplotlib").info("chatter")
        for _ in range(3):
            logging.getLogger("library").warning("slow path")
        logging.getLogger("training.x").error("only in the file", extra={"terminal": False})
        logging.getLogger("py.warnings").warning("old name")
    assert capsys.readouterr().err.splitlines() == ["starting", "warning: slow path", "warning: old name"]
    assert len(lines(logs)) == 7


def test_other_ranks_show_only_their_warnings_under_their_number(
    logs: RankLogs, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger("training.trainer").info("starting")
    logging.getLogger("training.trainer").error("bad")
    logging.getLogger("py.warnings").warning("old name")
    assert capsys.readouterr().err == "[rank 3] error: bad\n"


def test_closing_gives_everything_back(tmp_path: Path) -> None:
    root = logging.getLogger()
    before = (list(root.handlers), root.level, sys.excepthook, threading.excepthook)
    logs = RankLogs(tmp_path)
    assert sys.excepthook is not before[2]
    logs.close()
    logs.close()
    assert (list(root.handlers), root.level, sys.excepthook, threading.excepthook) == before


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with RankLogs(tmp_path) as logs:
            logging.getLogger("training").info(text)
    assert [line["message"] for line in lines(logs)] == ["first", "second"]
