"""From flags to ZeRO: the optimizer that DeepSpeed shards, its configuration, and who owns the end of a step.

Lives here: the choice of what runs where, so that `parallel/zero.py` and `parallel/zero_engine.py` know no flags. May
import the rooms below. DeepSpeed is imported inside functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from parallel.mesh import Mesh
from training.arguments import Arguments
from training.deepspeed_config import engine_config
from training.deepspeed_ops import prepare_ops
from training.optimizer import AdamW, moment_dtypes

if TYPE_CHECKING:
    from parallel.zero import ShardedOptimizer
    from parallel.zero_engine import ZeroEngine


def zero_stage(arguments: Arguments) -> int:
    """0 where DeepSpeed has no part in the run."""
    return arguments.zero.zero_stage or 0


def offloads_optimizer(arguments: Arguments) -> bool:
    """Whether optimizer states are in the host's memory or on its disk, and the step with them."""
    return (arguments.zero.offload_optimizer or "none") != "none"


def sharded_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], arguments: Arguments, mesh: Mesh
) -> ShardedOptimizer:
    """Stage 1. Collective. Afterwards the parameters lie in DeepSpeed's flat buffers."""
    from parallel.zero import ShardedOptimizer

    config = _prepared(arguments, mesh)
    make = partial(inner_optimizer, arguments)
    return ShardedOptimizer(named_parameters, mesh, config, make, arguments.optimizer.weight_decay)


def zero_engine(
    stage: nn.Module, named_parameters: Iterable[tuple[str, nn.Parameter]], arguments: Arguments, mesh: Mesh
) -> ZeroEngine:
    """Stages 2 and 3, on the one stage of a job without a pipeline. Collective."""
    from parallel.zero_engine import ZeroEngine

    config = _prepared(arguments, mesh)
    make = partial(inner_optimizer, arguments)
    return ZeroEngine(stage, named_parameters, mesh, config, make, arguments.optimizer.weight_decay)


def _prepared(arguments: Arguments, mesh: Mesh) -> dict[str, Any]:
    """DeepSpeed's configuration, once DeepSpeed and the ops it will load are there. Collective."""
    from parallel.zero import enter_deepspeed

    enter_deepspeed(mesh)
    prepare_ops(ops_of(arguments), mesh)
    return engine_config(arguments)


def ops_of(arguments: Arguments) -> list[str]:
    """The ops of DeepSpeed that this run loads, by their names in `deepspeed_ops.OPS`."""
    zero = arguments.zero
    ops = ["cpu_adam"] if offloads_optimizer(arguments) and arguments.optimizer.optimizer == "adamw" else []
    return [*ops, "async_io"] if "nvme" in (zero.offload_optimizer, zero.offload_param) else ops


def inner_optimizer(arguments: Arguments, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """What steps the shards: AdamW or SGD as without DeepSpeed; on the host DeepSpeedCPUAdam, or torch's SGD."""
    optimizer = arguments.optimizer
    if optimizer.optimizer == "sgd":
        return DecoupledSGD(groups, optimizer.lr, optimizer.sgd_momentum)
    betas = (optimizer.adam_beta1, optimizer.adam_beta2)
    if not offloads_optimizer(arguments):
        return FusedAdamW(groups, optimizer.lr, betas, optimizer.adam_eps, moment_dtypes(optimizer))
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(groups, optimizer.lr, betas=betas, eps=optimizer.adam_eps)


class FusedAdamW(torch.optim.Optimizer):
    """`training.optimizer.AdamW` as an optimizer of torch, which DeepSpeed asks for."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        moments: Mapping[str, torch.dtype],
    ):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self.kernel = AdamW([], lr, betas, eps, moments)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Of the groups there are now: DeepSpeed puts one after the other into `param_groups`."""
        self.kernel.param_groups, self.kernel.state = self.param_groups, self.state
        self.kernel.step()


class DecoupledSGD(torch.optim.SGD):
    """torch's SGD whose weight decay is decoupled, as without DeepSpeed: w ← (1 − lr·decay)·w before the step."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float):
        renamed = [{"params": group["params"], "decoupled_decay": group["weight_decay"]} for group in groups]
        super().__init__(renamed, lr=lr, momentum=momentum)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["decoupled_decay"] and stepped:
                torch._foreach_mul_(stepped, 1.0 - group["lr"] * group["decoupled_decay"])
        super().step()
