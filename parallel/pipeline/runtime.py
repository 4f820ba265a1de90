"""Executes a schedule's table on this rank: receive, compute, hand on, action by action.

Lives here: the only code that moves activations between stages. Imports `parallel` only; what a stage computes it
doesn't know. When a receive is posted, and on which communicator a message travels, is planned in `messages`; sends
never block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from parallel.comm import Work, connect, irecv, isend
from parallel.gradients import Gradients
from parallel.mesh import Axis, Mesh
from parallel.pipeline.check import check
from parallel.pipeline.messages import Channel, Message, RankMessages
from parallel.pipeline.profile import ActionClock
from parallel.pipeline.schedule import Action, Kind, Schedule
from parallel.weight_gradient import WeightGradientQueue

StageForward = Callable[[torch.Tensor | None, Any], torch.Tensor]
"""(input or None on the first stage, micro-batch) -> output; on the last stage a scalar loss to differentiate."""


class PipelineRuntime:
    """Runs schedules over the stages of this rank.

    stages: the forward function of every stage this rank holds, mostly modules; dtype: of what is sent; finished:
    called with a micro-batch when its last action on this rank is over, to free what it carried along; backward: what
    differentiates a loss, autograd unless an engine owns the backward pass.
    """

    def __init__(
        self,
        mesh: Mesh,
        stages: Mapping[int, StageForward],
        dtype: torch.dtype,
        finished: Callable[[Any], None] | None = None,
        backward: Callable[[torch.Tensor], None] | None = None,
    ):
        self.mesh = mesh
        self.stages = stages
        self.like = torch.empty(0, dtype=dtype, device=mesh.device)
        self.finished = finished
        self.loss_gradient = 1.0
        """What backward begins with at a loss: the loss scale. An engine that owns the backward has its own."""
        self.backward = backward or self._differentiate
        self.running: _Step | None = None
        self.clock: ActionClock | None = None
        """Times the actions of the next runs; None: nothing is measured."""
        modules = [stage for stage in stages.values() if isinstance(stage, nn.Module)]
        self._passes = Counter(p for module in modules for p in module.parameters())
        self._queue = WeightGradientQueue(self._passes)
        self._plans: dict[int, tuple[Schedule, RankMessages]] = {}
        self._axes: dict[Channel, Axis] = {}

    def run(
        self,
        schedule: Schedule,
        microbatches: Sequence[Any],
        shape: torch.Size,
        reducer: Gradients | None = None,
    ) -> None:
        """Execute this rank's row of the table. Collective over the pipeline.

        microbatches: one object for each, handed to the stages; shape: of the activations between stages, the same for
        all; reducer: needed when the table has backward actions; it starts to reduce a bucket when the last gradient of
        its parameters is there. Raises ValueError for an illegal table or a wrong number of micro-batches,
        RuntimeError naming the action that waited when a peer is gone.
        """
        if schedule.microbatches != len(microbatches):
            raise ValueError(f"{schedule.name} is for {schedule.microbatches} micro-batches, got {len(microbatches)}")
        if schedule.ranks != self.mesh.pp.size:
            raise ValueError(
                f"{schedule.name} is a table for {schedule.ranks} pipeline ranks, this pipeline has {self.mesh.pp.size}"
            )
        messages = self._plan(schedule)
        row = schedule.actions[self.mesh.pp.rank]
        if any(action.kind is not Kind.FORWARD for action in row):
            assert reducer is not None, "a table with backward actions needs a reducer"
            passes = {p: stages * len(microbatches) for p, stages in self._passes.items() if p.requires_grad}
            reducer.expect(passes)
        self.running = _Step(self, schedule, messages, microbatches, shape)
        with torch.set_grad_enabled(self.running.training):
            self.running.run(row)
        self.running = None

    def _differentiate(self, loss: torch.Tensor) -> None:
        loss.backward(torch.full_like(loss, self.loss_gradient))

    def doing(self) -> str | None:
        """What the pipeline does on this rank at this moment, for whoever ends it; None outside of a table."""
        return None if self.running is None else self.running.doing()

    def _plan(self, schedule: Schedule) -> RankMessages:
        """This rank's messages in the table, which is checked, and whose channels are connected, the first time."""
        if id(schedule) not in self._plans:
            plans = check(schedule)
            self._connect(sorted({message.channel for plan in plans for message in plan.sent.values()}))
            self._plans[id(schedule)] = schedule, plans[self.mesh.pp.rank]
        return self._plans[id(schedule)][1]

    def _connect(self, channels: list[Channel]) -> None:
        """Use every channel once, in one order on all ranks.

        A backend connects two ranks when they first meet, and blocks until both are there (NCCL always, gloo when
        lazy). Were the first use the early-posted receives, two neighbours could each wait for the other on another
        channel.
        """
        for channel in channels:
            if channel in self._axes:
                continue
            axis = self._axes[channel] = self.mesh.channel(channel.what, rising=channel.source < channel.target)
            connect(self.like, axis, channel.source, channel.target)

    def axis_of(self, message: Message) -> Axis:
        """The communicator on which a message travels."""
        return self._axes[message.channel]


class _Step:
    """What one execution of a table keeps while it runs."""

    def __init__(
        self,
        runtime: PipelineRuntime,
        schedule: Schedule,
        messages: RankMessages,
        microbatches: Sequence[Any],
        shape: torch.Size,
    ):
        self.runtime, self.schedule, self.messages = runtime, schedule, messages
        self.microbatches, self.shape = microbatches, shape
        self.rank = runtime.mesh.pp.rank
        self.training = any(action.kind is not Kind.FORWARD for action in schedule.actions[self.rank])
        self.now: tuple[Action, ...] = ()
        self.waits: Message | None = None
        self.posted: dict[int, tuple[torch.Tensor, Work]] = {}
        self.sends: dict[int, tuple[Work, torch.Tensor]] = {}
        self.here: dict[tuple[int, int, int], torch.Tensor] = {}
        """What one stage of this rank has for another, by its direction, the other stage and the micro-batch."""
        self.kept: dict[tuple[int, int], tuple[torch.Tensor | None, GradientEdge | torch.Tensor]] = {}
        """Of a micro-batch on a stage: its input, and where backward starts: an edge, on the last stage the loss."""
        self.deferred: dict[tuple[int, int], list[Callable[[], None]]] = {}

    def run(self, row: Sequence[Action]) -> None:
        """The numbered steps of every action, or two together: post, receive, compute, hand on, forget."""
        left = Counter(action.microbatch for action in row)
        clock = self.runtime.clock
        if clock is not None:
            clock.begin(self.schedule, self.runtime.mesh.pp)
        for places in self.schedule.cells(self.rank):
            self.now = tuple(row[place] for place in places)
            # 1. receives of later actions, as early as the plan allows
            for later in self.messages.posts[places[0]]:
                self._post(later)
            # 2. what these actions need from other ranks or from another stage here
            incoming = [self._incoming(place, row[place]) for place in places]
            # 3. the computation
            if clock is not None:
                clock.start()
            outgoing = self._compute_all(incoming)
            if clock is not None:
                clock.stop()
            del incoming
            # 4. the results on their way
            for place in places:
                self._hand_on(place, row[place], outgoing.pop(0))
            # 5. sends that are done, micro-batches that are over
            for sent in self.messages.over[places[0]]:  # gloo never says that a send is over before it is waited for
                self._end_send(sent)
            while self.sends and next(iter(self.sends.values()))[0].is_completed():
                self.sends.pop(next(iter(self.sends)))
            for action in self.now:
                left[action.microbatch] -= 1
                if self.runtime.finished is not None and not left[action.microbatch]:
                    self.runtime.finished(self.microbatches[action.microbatch])
        # Nobody may leave with a message still under way: the receiver would see a closed connection.
        for sent in tuple(self.sends):
            self._end_send(sent)

    def _end_send(self, place: int) -> None:
        """Wait until the result of the action at this place was received, and forget it; nothing if that was done."""
        if place in self.sends:
            work, _ = self.sends.pop(place)
            self._wait(work, self.messages.sent[place])

    def _post(self, place: int) -> None:
        message = self.messages.received[place]
        buffer = self.runtime.like.new_empty(self.shape)
        try:
            work = irecv(buffer, self.runtime.axis_of(message), message.channel.source)
        except RuntimeError as error:
            raise self._lost(message, error) from error
        self.posted[place] = buffer, work

    def _incoming(self, place: int, action: Action) -> torch.Tensor | None:
        if place in self.posted:
            buffer, work = self.posted.pop(place)
            self._wait(work, self.messages.received[place])
            return buffer
        return self.here.pop((action.kind.hands_on, action.stage, action.microbatch), None)

    def _wait(self, work: Work, message: Message) -> None:
        self.waits = message
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(message, error) from error
        self.waits = None

    def doing(self) -> str:
        """The action that this rank is in, or waits for, in words."""
        if self.waits is not None:
            return self._waited_for(self.waits)
        return f"pipeline rank {self.rank} ({self.schedule.name}) was in {' with '.join(map(str, self.now))}"

    def _lost(self, message: Message, error: RuntimeError) -> RuntimeError:
        """What to raise when a peer is gone."""
        return RuntimeError(f"{self._waited_for(message)}: {error}")

    def _waited_for(self, message: Message) -> str:
        """Names the action that waits, and the rank that it waits for."""
        channel, sender = message.channel, message.sender
        sending = channel.source == self.rank
        peer = channel.target if sending else channel.source
        if sending:
            what = f"{sender} to be received by"
        else:
            what = f"{message.receiver} to get {channel.what} of {sender} from"
        return (
            f"pipeline rank {self.rank} ({self.schedule.name}) waited for {what} pipeline rank {peer} "
            f"(rank {self.runtime.mesh.pp.ranks[peer]})"
        )

    def _compute_all(self, incoming: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Run the actions of this moment: one, or a forward and a backward in turns.

        The backward begins, with rows that travel at once, hidden by the forward's attention, whose rows then are
        hidden by the backward's experts; its own next ones by the forward's experts, and so on in turn. The forward is
        the one on this thread, as all others are: autograd orders a backward pass by numbers that each thread counts.
        """
        works = [partial(self._compute, action, came) for action, came in zip(self.now, incoming, strict=True)]
        if len(works) == 1:
            return [works[0]()]
        clock = self.runtime.clock
        turn = None if clock is None else clock.turn
        return list(self.runtime.mesh.baton.together(works[0], works[1], turn))

    def _compute(self, action: Action, incoming: torch.Tensor | None) -> torch.Tensor | None:
        """Run one action; returns what the stage after it (forward) or before it (backward) gets."""
        key = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            return self._forward(action, incoming)
        if action.kind is Kind.BACKWARD:
            return self._backward(action, incoming)
        if action.kind is Kind.INPUT_GRADIENT:
            with self.runtime._queue.collect() as self.deferred[key]:
                return self._backward(action, incoming)
        self.runtime._queue.run(self.deferred.pop(key))
        return None

    def _forward(self, action: Action, incoming: torch.Tensor | None) -> torch.Tensor:
        if incoming is not None and self.training:
            incoming.requires_grad_()
        output = self.runtime.stages[action.stage](incoming, self.microbatches[action.microbatch])
        if self.training:
            # The edge rather than the tensor: the output's values are freed once they were received.
            last = action.stage == self.schedule.stages - 1
            self.kept[action.stage, action.microbatch] = incoming, output if last else get_gradient_edge(output)
        return output.detach()

    def _backward(self, action: Action, incoming: torch.Tensor | None) -> torch.Tensor | None:
        entered, start = self.kept.pop((action.stage, action.microbatch))
        if isinstance(start, torch.Tensor):
            self.runtime.backward(start)
        else:
            torch.autograd.backward((start,), (incoming,))
        return None if entered is None else entered.grad

    def _hand_on(self, place: int, action: Action, outgoing: torch.Tensor | None) -> None:
        direction = action.kind.hands_on
        stage = action.stage + direction
        if direction == 0 or not 0 <= stage < self.schedule.stages:
            return
        assert outgoing is not None, f"{action} has a neighbour to send to and nothing to send"
        message = self.messages.sent.get(place)
        if message is None:
            self.here[direction, stage, action.microbatch] = outgoing
        else:
            outgoing = outgoing.contiguous()
            try:
                work = isend(outgoing, self.runtime.axis_of(message), message.channel.target)
            except RuntimeError as error:
                raise self._lost(message, error) from error
            self.sends[place] = work, outgoing
