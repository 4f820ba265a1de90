"""What a run's own measurements say should be changed: today, steps that are mostly communication.

Imports nothing of ours. Pure: numbers in, a sentence that names them and the flag to turn out, or None.
"""

from __future__ import annotations

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
