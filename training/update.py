"""From the gradients of a global batch to new parameters: one interface, with and without DeepSpeed.

Lives here: what the engine and checkpoints ask of whoever owns masters and moments, and the update over this project's
reducer. May import `parallel`. `parallel/zero.py` and `parallel/zero_engine.py` have the others.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import nn

from parallel.gradients import GradientReducer
from parallel.mesh import Axis


class OptimizerState(Protocol):
    """Masters and moments of this rank's parameters by global name, whether they are whole here or sharded.

    parameters: global name -> parameter, annotated with its `sharding`; moments: the kinds there are ("exp_avg", …).
    """

    parameters: dict[str, nn.Parameter]
    moments: tuple[str, ...]

    def shards(self, name: str) -> Axis | None:
        """The axis over whose ranks a parameter's state is cut (ZeRO); None where this rank has all of its block."""

    def read(self, name: str, moment: str | None = None) -> torch.Tensor:
        """This rank's block (as `sharding` cuts it) of the fp32 master, or of a moment. Collective over `shards(name)`.

        The live tensor where it isn't sharded, else a new one.
        """

    def write(self, name: str, value: torch.Tensor, moment: str | None = None) -> None:
        """The reverse, from the whole block. Afterwards `written` must be called."""

    def prepare(self, steps: int) -> None:
        """Make the moments as they are after `steps` taken steps, their values zero, so that they can be written."""

    def written(self) -> None:
        """All masters are there: round them to the parameters, wherever these are. Collective."""


class Update(Protocol):
    """The end of a step."""

    def clip(self) -> None:
        """Take the norm and clip by it, where this can be done before the step. Collective."""

    def step(self, lr: float, finite: bool) -> tuple[float, bool]:
        """Update the parameters, if `finite` (of the losses) and the gradient's norm is. Collective.

        Returns the norm before clipping, and whether the step was taken; if not, nothing has changed.
        """


class Steps(Protocol):
    """An optimizer whose gradients are `parameter.main_grad`, reduced and clipped."""

    def step(self, lr: float) -> None: ...


class ReducedUpdate:
    """The update where the reducer has the whole gradient: native optimizers, and ZeRO stage 1."""

    def __init__(self, reducer: GradientReducer, optimizer: Steps, clip_grad: float):
        self.reducer, self.optimizer, self.clip_grad = reducer, optimizer, clip_grad
        self.norm = math.nan

    def clip(self) -> None:
        self.norm = self.reducer.clip(self.clip_grad).item()

    def step(self, lr: float, finite: bool) -> tuple[float, bool]:
        taken = finite and math.isfinite(self.norm)
        if taken:
            self.optimizer.step(lr)
            self.reducer.commit()
        else:  # what isn't finite must reach neither a parameter nor what is kept for the next step
            self.reducer.discard()
        return self.norm, taken
