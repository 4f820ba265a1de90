"""The one display of a run on a terminal: a live bar where there is a screen, plain lines where there isn't.

Imports nothing of ours. Reads the records that training.metrics describes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TextIO


class Progress:
    """Shows steps `start`+1 … `total`. A screen shows every step; else first, last, each `interval`-th and validations.

    A rank that shows nothing is `enabled=False`, so the training loop needs no case for it.
    """

    def __init__(
        self, total: int, start: int = 0, interval: int = 10, enabled: bool = True, stream: TextIO | None = None
    ) -> None:
        self._total, self._first, self._interval, self._enabled = total, start + 1, interval, enabled
        self._stream = stream or sys.stdout
        self._step_seconds: float | None = None
        self._valid_loss: float | None = None
        self._bar: Any = None
        self._task: Any = None
        if enabled and self._stream.isatty():
            self._open_bar(start)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def update(self, record: Mapping[str, Any]) -> None:
        """A step has ended with these metrics."""
        if not self._enabled:
            return
        step = record["step"]
        if "step_seconds" in record:
            self._learn_speed(step, record["step_seconds"])
        self._valid_loss = record.get("valid_loss", self._valid_loss)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=self._text(record, self._valid_loss))
            return
        if step in (self._first, self._total) or step % self._interval == 0 or "valid_loss" in record:
            width = len(str(self._total))
            text = self._text(record, record.get("valid_loss"))
            self._stream.write(f"step {step:{width}d}/{self._total} | {text}\n")
            self._stream.flush()

    def close(self) -> None:
        """Leave the terminal as it was. May be called twice."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _learn_speed(self, step: int, seconds: float) -> None:
        # The first step also warms caches up: it tells nothing about the others and is forgotten with the second.
        if self._step_seconds is None or step <= self._first + 1:
            self._step_seconds = seconds
        else:
            self._step_seconds += 0.1 * (seconds - self._step_seconds)

    def _text(self, record: Mapping[str, Any], valid_loss: float | None) -> str:
        parts = [
            f"loss {record['loss']:.4f}" if "loss" in record else "",
            f"valid loss {valid_loss:.4f}" if valid_loss is not None else "",
            f"bigram {record['bigram_loss']:.4f}" if "bigram_loss" in record and valid_loss is not None else "",
            f"lr {record['lr']:.2e}" if "lr" in record else "",
            f"grad norm {record['grad_norm']:.3f}" if "grad_norm" in record else "",
            f"{record['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in record else "",
            f"{record['tflops_per_device']:.4g} TFLOP/s" if "tflops_per_device" in record else "",
            f"MFU {record['mfu']:.1%}" if "mfu" in record else "",
            f"eta {self._eta(record['step'])}" if self._step_seconds is not None else "",
        ]
        return " | ".join(part for part in parts if part)

    def _eta(self, step: int) -> timedelta:
        return timedelta(seconds=round((self._total - step) * (self._step_seconds or 0.0)))

    def _open_bar(self, start: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        # Also redirects stdout and stderr, so that log lines appear above the bar.
        self._bar = Bar(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=12),
            # On a narrow screen only this column gets shorter.
            TextColumn(
                "{task.fields[text]}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
            ),
            console=Console(file=self._stream),
            expand=True,
        )
        self._task = self._bar.add_task("", total=self._total, completed=start, text="")
        self._bar.start()
