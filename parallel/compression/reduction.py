"""What a compressed reduction of one bucket is: phases between messages, a residual to keep, and its measurements.

Lives here: the protocol, and what its implementations share. Imports `kernels` and `parallel` only.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from kernels.wire import STATISTICS
from parallel.compression.feedback import ErrorFeedback

Kind = Literal["encode", "wire", "decode"]


@dataclass(frozen=True)
class Span:
    """One parameter's gradient in a bucket's flat buffer."""

    name: str
    shape: torch.Size
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()


class Reduction(Protocol):
    """The all-reduce (sum) of one bucket's flat fp32 buffer, in place, bit-identical on all ranks of its axis.

    phases: to be run in order, once a step, maybe on a thread each. A phase begins with the wait for what the one
    before launched. Whatever ran in a step counts after `commit()`, or is forgotten after `discard()`.
    bytes_sent: by this rank, in every step. statistics: `kernels.wire.STATISTICS` of the last step's first encoding,
    fp64 [3], on the buffer's device; not_finite in it counts this rank's own gradient. clock: how long it took.
    """

    phases: list[Callable[[], None]]
    bytes_sent: int
    statistics: torch.Tensor
    clock: Stopwatch

    def commit(self) -> None: ...

    def discard(self) -> None: ...

    def rescale(self, factor: float) -> None:
        """Gradients come multiplied by `factor` from now on."""

    def kept(self) -> dict[str, torch.Tensor]:
        """What lives from step to step as this rank's, views to save or to fill: residuals by parameter name."""


def no_statistics(device: torch.device) -> torch.Tensor:
    return torch.zeros(len(STATISTICS), dtype=torch.float64, device=device)


def kept_residual(feedback: ErrorFeedback, spans: Sequence[Span]) -> dict[str, torch.Tensor]:
    """A bucket's residual by parameter: "name", for int8 "name" (codes) and "name/scale"."""
    kept = {}
    for span in spans:
        for suffix, part in zip(("", "/scale"), reversed(feedback.stored(span.start, span.stop)), strict=False):
            kept[span.name + suffix] = part
    return kept


def kept_region(feedback: ErrorFeedback, spans: Sequence[Span], place: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    """The residual of a later encoding, which isn't of whole parameters: under a name that only the same cut has."""
    cut = hashlib.blake2b(repr((spans, place)).encode(), digest_size=8).hexdigest()
    return {f"region/{cut}/{i}": part for i, part in enumerate(feedback.stored(0, feedback.n))}


class Stopwatch:
    """Seconds of a step by kind: the host's on a CPU, the current stream's on a GPU. Reset at a step's first phase."""

    def __init__(self, device: torch.device):
        self._on_device = device.type == "cuda"
        self._open: dict[Kind, Any] = {}
        self._spans: list[tuple[Kind, Any, Any]] = []

    def reset(self) -> None:
        self._open.clear()
        self._spans.clear()

    def start(self, kind: Kind) -> None:
        self._open[kind] = self._mark()

    def stop(self, kind: Kind) -> None:
        self._spans.append((kind, self._open.pop(kind), self._mark()))

    def seconds(self) -> dict[Kind, float]:
        """Sums since the reset. On a GPU it waits until the device is that far."""
        sums: dict[Kind, float] = {"encode": 0.0, "wire": 0.0, "decode": 0.0}
        for kind, start, stop in self._spans:
            if self._on_device:
                stop.synchronize()
            sums[kind] += start.elapsed_time(stop) / 1e3 if self._on_device else stop - start
        return sums

    def _mark(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
