"""Every table is checked before it runs: complete, in order of its dependencies, free of deadlock, within its memory.

Lives here: pure checks of a `Schedule`. Imports `schedule` and `messages`; no torch. What is checked: each action once
and on its rank, no wait for an action that never comes, messages received in the order they are sent on every channel
(on NCCL a send may block until its receive is posted, and with it all later ones), and the promised peak of
activations.
"""

from __future__ import annotations

from parallel.pipeline.messages import Channel, plan_messages
from parallel.pipeline.schedule import Action, Kind, Schedule, peak_activations


def check(schedule: Schedule) -> None:
    """Raise ValueError, naming rank and action, unless the table is legal."""
    _check_complete(schedule)
    _check_channels(schedule)
    _check_peak(schedule)


def _check_complete(schedule: Schedule) -> None:
    for stage, owner in enumerate(schedule.placement):
        if not 0 <= owner < schedule.ranks:
            raise ValueError(
                f"{schedule.name}: stage {stage} lies on rank {owner}, the table has {schedule.ranks} ranks"
            )
    training = any(a.kind is not Kind.FORWARD for row in schedule.actions for a in row)
    for rank, row in enumerate(schedule.actions):
        there = set(row)
        expected = set()
        for stage in schedule.stages_of(rank):
            for m in range(schedule.microbatches):
                expected.add(Action(Kind.FORWARD, stage, m))
                if not training:
                    continue
                split = {Action(Kind.INPUT_GRADIENT, stage, m), Action(Kind.WEIGHT_GRADIENT, stage, m)}
                expected |= split if split & there else {Action(Kind.BACKWARD, stage, m)}
        if len(row) != len(there):
            seen: set[Action] = set()
            twice = next(a for a in row if a in seen or seen.add(a))  # type: ignore[func-returns-value]
            raise ValueError(f"{schedule.name}: rank {rank} runs {twice} twice")
        if missing := expected - there:
            raise ValueError(f"{schedule.name}: rank {rank} never runs {min(missing, key=str)}")
        if extra := there - expected:
            raise ValueError(f"{schedule.name}: rank {rank} runs {min(extra, key=str)}, which is not its own")


def _check_channels(schedule: Schedule) -> None:
    """On every channel the order of sends is the order of receives; `plan_messages` has found deadlocks by then."""
    plans = plan_messages(schedule)
    sent: dict[Channel, list[Action]] = {}
    received: dict[Channel, list[Action]] = {}
    for plan in plans:
        for i in sorted(plan.sent):
            sent.setdefault(plan.sent[i].channel, []).append(plan.sent[i].receiver)
        for posted in plan.posts:
            for i in posted:
                received.setdefault(plan.received[i].channel, []).append(plan.received[i].receiver)
    for channel, messages in sent.items():
        if received.get(channel) != messages:
            raise ValueError(
                f"{schedule.name}: rank {channel.source} sends {channel.what} to rank {channel.target} in another "
                "order than they are received"
            )


def _check_peak(schedule: Schedule) -> None:
    if schedule.promised_peak is None:
        return
    for rank, peak in enumerate(peak_activations(schedule)):
        if peak > schedule.promised_peak:
            raise ValueError(
                f"{schedule.name}: rank {rank} keeps {peak:g} micro-batches' activations, {schedule.promised_peak:g} "
                "were promised"
            )
