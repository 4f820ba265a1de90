"""What a run's own measurements say should be changed: steps that are mostly communication, codecs that cost too much.

Imports nothing of ours. Pure: numbers in, a sentence that names them and the flag to turn out, or None.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from dataclasses import dataclass

WARM_UP, WINDOW, SHARE = 3, 5, 0.5
"""Steps that don't count (the first ones set things up), steps in a row that must, and how much of each is too much."""

_SMALL_MESSAGE_MIB = 4.0
"""Below this a message's latency weighs: on a link of 1 Gbit/s 4 MiB travel for 34 ms."""


@dataclass(frozen=True)
class Reduction:
    """What a run's gradient reduction is, the same in every step.

    dp: data-parallel size; buckets, mebibytes: messages a step of this rank, and what they hold together.
    """

    dp: int
    buckets: int
    mebibytes: float
    bucket_cap_mb: float
    overlap: bool
    micro_batches: int
    global_batch_size: int


@dataclass(frozen=True)
class Exchange:
    """One step's compressed reduction on this rank.

    sent, fp32: bytes it sent, and bytes that an fp32 all-reduce of the same gradients sends; wire, codec: seconds on
    the wire, which include waiting for ranks that compute longer, and seconds of encoding and decoding.
    """

    sent: float
    fp32: float
    wire: float
    codec: float


class CommunicationWatch:
    """Speaks once, when WINDOW steps in a row after WARM_UP waited for more than SHARE of their time."""

    def __init__(self, reduction: Reduction):
        self.reduction = reduction
        self._seen, self._said = 0, False
        self._steps: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def step(self, exposed_seconds: float, step_seconds: float) -> str | None:
        """Take in one step; the advice where it is due."""
        self._seen += 1
        if self._said or self._seen <= WARM_UP:
            return None
        self._steps.append((exposed_seconds, step_seconds))
        if len(self._steps) < WINDOW or any(exposed <= SHARE * whole for exposed, whole in self._steps):
            return None
        self._said = True
        exposed, whole = (sum(column) / WINDOW for column in zip(*self._steps, strict=True))
        return advice(exposed, whole, self.reduction)


def advice(exposed: float, step: float, reduction: Reduction) -> str:
    """What to turn where `exposed` of a step's `step` seconds went into waiting for gradients."""
    size = reduction.mebibytes / reduction.buckets
    messages = "1 message" if reduction.buckets == 1 else f"{reduction.buckets} messages"
    numbers = (
        f"waiting for the gradient reduction took {exposed / step:.0%} of the last {WINDOW} steps ({exposed:.3g} s of "
        f"{step:.3g} s, {messages} of {size:.3g} MiB, data parallel size {reduction.dp})"
    )
    turns = []
    if not reduction.overlap:
        turns.append("leave --no-overlap-grad-reduce out")
    if reduction.buckets > 1 and size < _SMALL_MESSAGE_MIB:
        turns.append(f"raise --bucket-cap-mb ({reduction.bucket_cap_mb:g} now) for fewer, larger messages")
    elif reduction.buckets == 1 and size > 2 * _SMALL_MESSAGE_MIB:
        turns.append(
            f"lower --bucket-cap-mb ({reduction.bucket_cap_mb:g} now), since one message can't travel during backward"
        )
    turns.append(
        f"raise --global-batch-size ({reduction.global_batch_size} now, {reduction.micro_batches} micro-batches a "
        "rank) to reduce less often"
    )
    return f"{numbers}: {', or '.join(turns)}. If another rank is slower than this one, that is what it waits for."


class CompressionWatch:
    """Speaks once, when compression cost more than it saved in each of WINDOW steps in a row after WARM_UP."""

    def __init__(self, codec: str):
        self.codec = codec
        self._seen, self._said = 0, False
        self._steps: deque[Exchange] = deque(maxlen=WINDOW)

    def step(self, exchange: Exchange) -> str | None:
        """Take in one step that compressed; the advice where it is due."""
        self._seen += 1
        if self._said or self._seen <= WARM_UP:
            return None
        self._steps.append(exchange)
        if len(self._steps) < WINDOW or any(_saved_seconds(step) >= 0 for step in self._steps):
            return None
        self._said = True
        columns = zip(*(dataclasses.astuple(step) for step in self._steps), strict=True)
        return compression_advice(self.codec, Exchange(*(sum(column) / WINDOW for column in columns)))


def _saved_seconds(step: Exchange) -> float:
    """What the wire saves, at the speed it had, less what the codec takes."""
    return step.wire * (step.fp32 / step.sent - 1) - step.codec


def break_even(step: Exchange) -> float:
    """Bytes a second of the link above which an fp32 all-reduce is faster: where saved bytes take the codec's time."""
    return (step.fp32 - step.sent) / step.codec if step.codec > 0 else math.inf


def compression_advice(codec: str, step: Exchange) -> str:
    """What a step's reduction took beside what it would have taken in fp32 and bf16 on the same link.

    The link is as fast as the bytes were on it. Waiting for slow ranks counts as wire, so fp32 may be faster still.
    """
    bandwidth = step.sent / step.wire
    fp32 = step.fp32 / bandwidth
    even = f"It pays on links below {_rate(break_even(step))}"
    pays = even if step.sent < step.fp32 else "It pays on no link, since it sends more"
    turns = "leave --grad-compression out"
    if codec != "bf16":
        turns += f", or take bf16 (about {fp32 / 2:.3g} s and a cheap cast)"
    return (
        f"--grad-compression {codec} costs more than it saves: {step.codec:.3g} s of encoding and decoding and "
        f"{step.wire:.3g} s on the wire a step for {step.sent / 2**20:.3g} MiB, where an fp32 all-reduce would send "
        f"{step.fp32 / 2**20:.3g} MiB in about {fp32:.3g} s at the {_rate(bandwidth)} of this link. {pays}: {turns}"
    )


def _rate(bytes_a_second: float) -> str:
    bits = 8 * bytes_a_second
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
