"""Logs: each rank's structured lines in its own file, and a terminal that shows what a person must see, once.

Imports the standard library only. Anyone's `logging.getLogger(__name__)` ends up here, as do Python's warnings and what
threads die of. A line is one JSON object, so that tools can merge, search and diagnose many ranks' files.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

# Whose INFO lines rank 0 shows on the terminal; of other libraries only warnings.
_OURS = ("kernels", "parallel", "model", "data", "planning", "training", "tools", "pretrain_deepseek", "__main__")


class RankLogs:
    """Sends the root logger to `directory`/rank_00000.jsonl (INFO and above) and to stderr, until closed.

    Fields of a line: time (UTC, ISO 8601), monotonic (seconds; orders lines of one rank whatever the clock does), host,
    rank, coordinates, step, level, logger, message, and exception where there is one. On the terminal rank 0 shows INFO
    and above, the others warnings and errors under their rank; the same text is shown once a rank, Python's warnings by
    rank 0 only. A record with `extra={"terminal": False}` goes to the file alone.
    """

    def __init__(self, directory: Path, rank: int = 0, coordinates: Mapping[str, int] | None = None) -> None:
        self.rank = rank
        self.step: int | None = None
        """The step that lines belong to; the training loop sets it."""
        self.coordinates = dict(coordinates or {})
        """This rank's place in the mesh, as Mesh.coordinates() gives it."""
        self.host = socket.gethostname()
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"rank_{rank:05d}.jsonl"
        file = logging.FileHandler(self.path, encoding="utf-8")
        file.setFormatter(_JsonLine(self))
        self._handlers: list[logging.Handler] = [file, _Terminal(rank)]
        root = logging.getLogger()
        self._level = root.level
        root.setLevel(logging.INFO)
        for handler in self._handlers:
            handler.setLevel(logging.INFO)
            root.addHandler(handler)
        # torch's loggers print for themselves and pass nothing on to the root: their lines must be in the file too.
        known = [logger for logger in root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
        self._closed_loggers = [logger for logger in known if not logger.propagate]
        for logger in self._closed_loggers:
            logger.addHandler(file)
        logging.captureWarnings(True)
        self._hooks = sys.excepthook, threading.excepthook
        sys.excepthook, threading.excepthook = self._uncaught, self._uncaught_in_thread

    def __enter__(self) -> RankLogs:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the root logger and the hooks back as they were. May be called twice."""
        root = logging.getLogger()
        for handler in self._handlers:
            for logger in (root, *self._closed_loggers):
                logger.removeHandler(handler)
            handler.close()
        if self._handlers:
            root.setLevel(self._level)
            logging.captureWarnings(False)
            sys.excepthook, threading.excepthook = self._hooks
        self._handlers = []

    def _uncaught(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        logging.getLogger("uncaught").critical(
            f"{kind.__name__}: {error}", exc_info=(kind, error, where), extra={"terminal": False}
        )
        self._hooks[0](kind, error, where)  # prints it

    def _uncaught_in_thread(self, what: threading.ExceptHookArgs) -> None:
        if what.exc_value is not None:
            logging.getLogger("uncaught").critical(
                f"thread {what.thread.name if what.thread else '?'}: {what.exc_type.__name__}: {what.exc_value}",
                exc_info=(what.exc_type, what.exc_value, what.exc_traceback),
                extra={"terminal": False},
            )
        self._hooks[1](what)


class _JsonLine(logging.Formatter):
    def __init__(self, logs: RankLogs) -> None:
        super().__init__()
        self._logs = logs

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="microseconds"),
            "monotonic": round(time.monotonic(), 6),
            "host": self._logs.host,
            "rank": self._logs.rank,
            "coordinates": self._logs.coordinates,
            "step": self._logs.step,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage().rstrip("\n"),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _Terminal(logging.Handler):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._shown: set[tuple[str, str]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage().rstrip("\n")
            if not self._wanted(record) or (record.name, message) in self._shown:
                return
            if record.levelno >= logging.WARNING and len(self._shown) < 1000:
                self._shown.add((record.name, message))
            level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
            rank = "" if self._rank == 0 else f"[rank {self._rank}] "
            # Looked up now, not at start: a live progress bar replaces sys.stderr so that lines go above it.
            sys.stderr.write(f"{rank}{level}{message}\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)

    def _wanted(self, record: logging.LogRecord) -> bool:
        if not getattr(record, "terminal", True):
            return False
        if record.levelno >= logging.WARNING:
            return self._rank == 0 or record.name != "py.warnings"
        return self._rank == 0 and record.name.split(".")[0] in _OURS
