"""Every table is checked before it runs: complete, in order of its dependencies, free of deadlock, within its memory.

Lives here: pure checks of a `Schedule`. Imports `schedule` and `messages`; no torch. What is checked: each action once
and on its rank, pairs that may run together, no wait for an action that never comes, messages received in the order
they are sent on every channel (on NCCL a send may block until its receive is posted, and with it all later ones), and
the promised peak of activations.
"""

from __future__ import annotations

from collections import Counter, deque

from parallel.pipeline.messages import Channel, RankMessages, plan_messages
from parallel.pipeline.schedule import Action, Kind, Schedule, peak_activations


def check(schedule: Schedule) -> tuple[RankMessages, ...]:
    """Raise ValueError, naming rank and action, unless the table is legal; returns the messages that were proved."""
    _check_complete(schedule)
    _check_pairs(schedule)
    plans = plan_messages(schedule)  # finds actions that wait for each other
    _check_order(schedule, plans)
    _check_sends(schedule, plans)
    _check_peak(schedule)
    return plans


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
            twice = next(action for action, times in Counter(row).items() if times > 1)
            raise ValueError(f"{schedule.name}: rank {rank} runs {twice} twice")
        if missing := expected - there:
            raise ValueError(f"{schedule.name}: rank {rank} never runs {min(missing, key=str)}")
        if extra := there - expected:
            raise ValueError(f"{schedule.name}: rank {rank} runs {min(extra, key=str)}, which is not its own")


def _check_pairs(schedule: Schedule) -> None:
    """What runs together is a forward and the backward after it, of which neither needs the other.

    That another way leads from one to the other, over other ranks, is found with the other circles of waiting.
    """
    if schedule.together and len(schedule.together) != schedule.ranks:
        raise ValueError(
            f"{schedule.name} tells for {len(schedule.together)} ranks what runs together, it has {schedule.ranks}"
        )
    for rank, (row, places) in enumerate(zip(schedule.actions, schedule.together, strict=False)):
        for place in places:
            pair = row[place : place + 2] if place >= 0 else ()
            if [action.kind.hands_on for action in pair] != [1, -1]:
                raise ValueError(
                    f"{schedule.name}: rank {rank} runs {' and '.join(map(str, pair)) or f'place {place}'} together, "
                    "which must be a forward and the B or I after it"
                )
            forward, backward = pair
            if forward.microbatch == backward.microbatch:
                raise ValueError(
                    f"{schedule.name}: rank {rank} runs {backward} together with {forward}, which it needs"
                )


def _check_order(schedule: Schedule, plans: tuple[RankMessages, ...]) -> None:
    """On every channel the order of sends is the order in which receives are posted."""
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


def _check_sends(schedule: Schedule, plans: tuple[RankMessages, ...]) -> None:
    """Run the plan on paper with sends that hold their rank up until their receive is posted: none is held for ever."""
    cells = [deque(schedule.cells(rank)) for rank in range(schedule.ranks)]
    posted: set[Action] = set()
    computed: set[Action] = set()
    running = True
    while running:
        running = False
        for rank, (row, plan) in enumerate(zip(schedule.actions, plans, strict=True)):
            while cells[rank]:
                cell = cells[rank][0]
                if row[cell[0]] not in computed:
                    before = len(posted)
                    posted.update(row[later] for i in cell for later in plan.posts[i])
                    running |= len(posted) > before
                    if any(i in plan.received and plan.received[i].sender not in computed for i in cell):
                        break
                    computed.update(row[i] for i in cell)
                    running = True
                if any(i in plan.sent and plan.sent[i].receiver not in posted for i in cell):
                    break
                cells[rank].popleft()
                running = True
    held = [f"rank {r} at {row[cells[r][0][0]]}" for r, row in enumerate(schedule.actions) if cells[r]]
    if held:
        raise ValueError(f"{schedule.name} needs sends that are buffered, or deadlocks: {'; '.join(held)} are held up")


def _check_peak(schedule: Schedule) -> None:
    if schedule.promised_peak is None:
        return
    for rank, peak in enumerate(peak_activations(schedule)):
        if peak > schedule.promised_peak + 1e-9:
            raise ValueError(
                f"{schedule.name}: rank {rank} keeps {peak:g} micro-batches' activations, {schedule.promised_peak:g} "
                "were promised"
            )
