"""Executes a schedule's table on this rank: receive, compute, send, action by action.

Lives here: the only code that moves activations between stages. Imports `parallel` only; what a stage computes it
doesn't know. The receive of an action is posted while the one before it computes, sends never block, and activations
flow on one communicator, gradients on another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from parallel.comm import Work, irecv, isend
from parallel.gradients import GradientReducer
from parallel.mesh import Axis, Mesh
from parallel.pipeline.check import check
from parallel.pipeline.schedule import Action, Kind, Schedule

StageForward = Callable[[torch.Tensor | None, Any], torch.Tensor]
"""(input or None on the first stage, micro-batch) -> output; on the last stage a scalar loss to differentiate."""


class PipelineRuntime:
    """Runs schedules over the stages of this rank.

    stages: the forward function of every stage this rank holds; dtype: of what is sent.
    """

    def __init__(self, mesh: Mesh, stages: Mapping[int, StageForward], dtype: torch.dtype):
        self.mesh = mesh
        self.stages = stages
        self.like = torch.empty(0, dtype=dtype, device=mesh.device)
        self._checked: dict[int, Schedule] = {}
        self._connected: set[tuple[str, int, int]] = set()

    def run(
        self,
        schedule: Schedule,
        microbatches: Sequence[Any],
        shape: torch.Size,
        reducer: GradientReducer | None = None,
    ) -> None:
        """Execute this rank's row of the table.

        microbatches: one object for each, handed to the stages; shape: of the activations between stages, the same for
        all; reducer: needed when the table has backward actions; each stage's last backward runs outside its `no_sync`,
        so its buckets start reducing. Raises ValueError for an illegal table or a wrong number of micro-batches.
        """
        if schedule.microbatches != len(microbatches):
            raise ValueError(f"{schedule.name} is for {schedule.microbatches} micro-batches, got {len(microbatches)}")
        if schedule.ranks != self.mesh.pp.size:
            raise ValueError(
                f"{schedule.name} is a table for {schedule.ranks} pipeline ranks, this pipeline has {self.mesh.pp.size}"
            )
        if id(schedule) not in self._checked:
            check(schedule)
            self._connect(schedule)
            self._checked[id(schedule)] = schedule
        row = schedule.actions[self.mesh.pp.rank]
        posted = self._post(schedule, row[0], shape) if row else None
        local: dict[Action, torch.Tensor] = {}
        kept: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        sends: deque[tuple[Work, torch.Tensor]] = deque()
        last_backward = {action.stage: action for action in row if action.kind is Kind.BACKWARD}

        for action, following in zip(row, (*row[1:], None), strict=True):
            while sends and sends[0][0].is_completed():
                sends.popleft()
            incoming = self._incoming(schedule, action, posted, local)
            # Not earlier: on a GPU a receive waits on the device, and one that itself depends on work not launched yet
            # would never end if anything synchronised the device meanwhile.
            posted = self._post(schedule, following, shape) if following else None
            outgoing: torch.Tensor | None
            if action.kind is Kind.FORWARD:
                training = action.stage in last_backward
                if incoming is not None and training:
                    incoming.requires_grad_()
                with torch.set_grad_enabled(training):
                    output = self.stages[action.stage](incoming, microbatches[action.microbatch])
                if training:
                    kept[action.stage, action.microbatch] = (incoming, output)
                outgoing = output.detach()
            else:
                assert reducer is not None, "a table with backward actions needs a reducer"
                entered, output = kept.pop((action.stage, action.microbatch))
                with nullcontext() if last_backward[action.stage] == action else reducer.no_sync():
                    torch.autograd.backward(output, incoming)
                outgoing = entered.grad if entered is not None else None
            self._pass_on(schedule, action, outgoing, sends, local)
        # Nobody may leave with a message still under way: the receiver would see a closed connection.
        for work, _ in sends:
            work.wait()

    def _connect(self, schedule: Schedule) -> None:
        """Use every directed edge of the table once, in one order on all ranks.

        A backend connects two ranks when they first meet, and blocks until both are there (NCCL always, gloo when
        lazy). Were the first use the early-posted receives, two neighbours could each wait for the other on another
        edge.
        """
        for axis, step in ((self.mesh.activations, 1), (self.mesh.gradients, -1)):
            for stage, source in enumerate(schedule.placement):
                target = schedule.placement[stage + step] if 0 <= stage + step < schedule.stages else source
                edge = (axis.name, source, target)
                if source == target or edge in self._connected:
                    continue
                self._connected.add(edge)
                if axis.rank == source:
                    isend(self.like.new_zeros(1), axis, target).wait()
                elif axis.rank == target:
                    irecv(self.like.new_empty(1), axis, source).wait()

    def _edge(self, schedule: Schedule, action: Action, step: int) -> tuple[Axis, int] | None:
        """Axis and peer of the neighbour stage `step` further along the action's direction; None beyond the ends."""
        stage = action.stage + (step if action.kind is Kind.FORWARD else -step)
        if not 0 <= stage < schedule.stages:
            return None
        axis = self.mesh.activations if action.kind is Kind.FORWARD else self.mesh.gradients
        return axis, schedule.placement[stage]

    def _post(self, schedule: Schedule, action: Action, shape: torch.Size) -> tuple[torch.Tensor, Work] | None:
        """Start to receive what `action` needs from another rank; None when it needs nothing from one."""
        edge = self._edge(schedule, action, -1)
        if edge is None or edge[1] == self.mesh.pp.rank:
            return None
        axis, peer = edge
        buffer = self.like.new_empty(shape)
        return buffer, irecv(buffer, axis, peer)

    def _incoming(
        self,
        schedule: Schedule,
        action: Action,
        posted: tuple[torch.Tensor, Work] | None,
        local: dict[Action, torch.Tensor],
    ) -> torch.Tensor | None:
        if posted is not None:
            buffer, work = posted
            work.wait()
            return buffer
        return None if self._edge(schedule, action, -1) is None else local.pop(action)

    def _pass_on(
        self,
        schedule: Schedule,
        action: Action,
        outgoing: torch.Tensor | None,
        sends: deque[tuple[Work, torch.Tensor]],
        local: dict[Action, torch.Tensor],
    ) -> None:
        edge = self._edge(schedule, action, 1)
        if edge is None:
            return
        assert outgoing is not None, f"{action} has a neighbour to send to and nothing to send"
        axis, peer = edge
        if peer == self.mesh.pp.rank:
            step = 1 if action.kind is Kind.FORWARD else -1
            local[action._replace(stage=action.stage + step)] = outgoing
        else:
            outgoing = outgoing.contiguous()
            sends.append((isend(outgoing, axis, peer), outgoing))
