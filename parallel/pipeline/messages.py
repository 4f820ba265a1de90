"""Which messages a table sends, on which communicators, and how early each may be received.

Lives here: what the check proves and the runtime executes, derived from a table once. Imports `schedule` only; no
torch. Every directed edge between two ranks has a communicator for activations and one for gradients: on NCCL the
operations of a pair on one communicator form a queue, in which a send may block until its receive is posted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

from parallel.pipeline.schedule import Action, Kind, Schedule, dependencies


class Channel(NamedTuple):
    """A queue of messages from one pipeline rank to another."""

    what: Literal["activations", "gradients"]
    source: int
    target: int


class Message(NamedTuple):
    """The result of `sender`, which `receiver` needs, on its way to another rank."""

    channel: Channel
    sender: Action
    receiver: Action


@dataclass(frozen=True)
class RankMessages:
    """One rank's part: by the action's place in its row, what is received for it, sent after it, and posted before it.

    posts[i]: the places of the actions whose receive is posted just before action i starts, in that order; over[i]: the
    places of sends that must have been received when action i ends, since it needs what came of them. Of actions that
    run together both lie at the first one's place.
    """

    received: dict[int, Message]
    sent: dict[int, Message]
    posts: tuple[tuple[int, ...], ...]
    over: tuple[tuple[int, ...], ...]


def plan_messages(schedule: Schedule) -> tuple[RankMessages, ...]:
    """For every rank what it receives and sends, and when each receive is posted.

    A receive is posted as soon as this rank has launched every action that the message depends on. Not earlier: on a
    GPU a posted receive occupies the device until its message comes, and anything that synchronises the device
    meanwhile (freeing memory does) would wait for ever if that needed this rank. Not later: a send may block until its
    receive is posted. What it waits for then are posts that lie before it in the table's partial order, so no sends
    can wait for each other in a circle (`check` proves it for each table). In a warm-up a rank thus has as many
    buffers waiting as its neighbour runs ahead.
    """
    before = dependencies(schedule)
    reach = _reach(schedule, before)
    plans = []
    sent_by: list[dict[int, Message]] = [{} for _ in schedule.actions]
    received_by: list[dict[int, Message]] = [{} for _ in schedule.actions]
    place = {action: i for row in schedule.actions for i, action in enumerate(row)}
    for rank, row in enumerate(schedule.actions):
        for i, action in enumerate(row):
            if (message := _message(schedule, action, before)) is not None:
                received_by[rank][i] = message
                sent_by[message.channel.source][place[message.sender]] = message
    for rank, row in enumerate(schedule.actions):
        posts: list[list[int]] = [[] for _ in row]
        newest: dict[Channel, int] = {}
        for i in sorted(received_by[rank]):
            message = received_by[rank][i]
            # Each channel is received in the order of use; a table that sends in another one is refused.
            soonest = max(reach[message.sender][rank], newest.get(message.channel, 0))
            newest[message.channel] = soonest
            posts[soonest].append(i)
        over: list[list[int]] = [[] for _ in row]
        known = [[reach[action][target] for action in row] for target in range(schedule.ranks)]
        for i, message in sent_by[rank].items():
            # Each action knows all that those before it in its row knew, so what is known of a rank only rises.
            after = bisect_right(known[message.channel.target], place[message.receiver])
            if after < len(row):
                over[after].append(i)
        plans.append(RankMessages(received_by[rank], sent_by[rank], tuple(map(tuple, posts)), tuple(map(tuple, over))))
    return tuple(plans)


def _message(schedule: Schedule, action: Action, before: dict[Action, tuple[Action, ...]]) -> Message | None:
    """What another rank sends for `action`."""
    target = schedule.placement[action.stage]
    for needed in before[action]:
        source = schedule.placement[needed.stage]
        if source != target:
            forward = action.kind is Kind.FORWARD
            return Message(Channel("activations" if forward else "gradients", source, target), needed, action)
    return None


def _reach(schedule: Schedule, before: dict[Action, tuple[Action, ...]]) -> dict[Action, list[int]]:
    """For each action how many actions of every rank must have run when it ends (a vector clock).

    Raises ValueError, naming ranks and actions, where actions wait for ones that never come.
    """
    clock: dict[Action, list[int]] = {}
    cells = [deque(schedule.cells(rank)) for rank in range(schedule.ranks)]
    last = [[0] * schedule.ranks for _ in schedule.actions]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.actions):
            while cells[rank]:
                cell = [row[place] for place in cells[rank][0]]
                needs = [needed for action in cell for needed in before[action]]
                if any(needed not in clock for needed in needs):
                    break
                known = list(last[rank])
                for needed in needs:
                    # What ran on this rank is known already.
                    if schedule.placement[needed.stage] != rank:
                        known = list(map(max, known, clock[needed]))
                known[rank] += len(cell)
                last[rank] = known
                clock |= dict.fromkeys(cell, known)
                cells[rank].popleft()
                moved = True
    stuck = [
        f"rank {rank} at {' with '.join(str(row[place]) for place in cells[rank][0])}"
        for rank, row in enumerate(schedule.actions)
        if cells[rank]
    ]
    if stuck:
        raise ValueError(f"{schedule.name} deadlocks: {'; '.join(stuck)} wait for actions that never come")
    return clock
