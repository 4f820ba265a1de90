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


AHEAD = 2
"""How many receives a rank posts before the action that it is about to compute needs them."""


def plan_messages(schedule: Schedule) -> tuple[RankMessages, ...]:
    """For every rank what it receives and sends, and when each receive is posted.

    A receive is posted as early as it can be without ever waiting for something that this rank has not launched yet:
    on a GPU a posted receive occupies the device until its message comes, and if that one depended on a later action
    of this rank, anything that synchronises the device in between (freeing memory does) would wait for ever. At most
    `AHEAD` receives beyond the one in use are posted at a time: each holds a buffer.
    """
    before = dependencies(schedule)
    reach = _reach(schedule, before)
    plans = []
    sent_by: list[dict[int, Message]] = [{} for _ in schedule.actions]
    received_by: list[dict[int, Message]] = [{} for _ in schedule.actions]
    place = {action: i for row in schedule.actions for i, action in enumerate(row)}
    for rank, row in enumerate(schedule.actions):
        for i, action in enumerate(row):
            if message := _message(schedule, action, before):
                received_by[rank][i] = message
                sent_by[message.channel.source][place[message.sender]] = message
    for rank, row in enumerate(schedule.actions):
        posts: list[list[int]] = [[] for _ in row]
        receiving = sorted(received_by[rank])
        earliest = 0
        for number, i in enumerate(receiving):
            launched = reach[received_by[rank][i].sender][rank]
            held_back = receiving[number - AHEAD] if number >= AHEAD else 0
            # In the row's order, so that every channel receives in the order in which it is sent.
            earliest = max(earliest, min(i, max(launched, held_back)))
            posts[earliest].append(i)
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
