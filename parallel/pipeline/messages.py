"""Which messages a table sends, on which communicators, and how early each may be received.

Lives here: what the check proves and the runtime executes, derived from a table once. Imports `schedule` only; no
torch. Every directed edge between two ranks has a communicator for activations and one for gradients: on NCCL the
operations of a pair on one communicator form a queue, in which a send may block until its receive is posted.
"""

from __future__ import annotations

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

    posts[i]: the places of the actions whose receive is posted just before action i starts, in that order.
    """

    received: dict[int, Message]
    sent: dict[int, Message]
    posts: tuple[tuple[int, ...], ...]


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
        plans.append(RankMessages(received_by[rank], sent_by[rank], tuple(map(tuple, posts))))
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
    position = [0] * schedule.ranks
    last = [[0] * schedule.ranks for _ in schedule.actions]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.actions):
            while position[rank] < len(row):
                action = row[position[rank]]
                if any(needed not in clock for needed in before[action]):
                    break
                known = list(last[rank])
                for needed in before[action]:
                    # What ran on this rank is known already.
                    if schedule.placement[needed.stage] != rank:
                        known = list(map(max, known, clock[needed]))
                position[rank] += 1
                known[rank] = position[rank]
                clock[action] = last[rank] = known
                moved = True
    stuck = [f"rank {r} at {row[position[r]]}" for r, row in enumerate(schedule.actions) if position[r] < len(row)]
    if stuck:
        raise ValueError(f"{schedule.name} deadlocks: {'; '.join(stuck)} wait for actions that never come")
    return clock
