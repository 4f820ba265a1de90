"""From flags to ZeRO: the optimizer that DeepSpeed shards, its configuration, and who owns the end of a step.

Lives here: the choice of what runs where, so that `parallel/zero.py` and `parallel/zero_engine.py` know no flags. May
import the rooms below. DeepSpeed is imported inside functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from parallel.mesh import Mesh
from training.arguments import Arguments
from training.optimizer import AdamW

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
    from parallel.zero import ShardedOptimizer, enter_deepspeed

    enter_deepspeed(mesh)
    config, make = engine_config(arguments), partial(inner_optimizer, arguments)
    return ShardedOptimizer(named_parameters, mesh, config, make, arguments.optimizer.weight_decay)


def zero_engine(
    stage: nn.Module, named_parameters: Iterable[tuple[str, nn.Parameter]], arguments: Arguments, mesh: Mesh
) -> ZeroEngine:
    """Stages 2 and 3, on the one stage of a job without a pipeline. Collective."""
    from parallel.zero import enter_deepspeed
    from parallel.zero_engine import ZeroEngine

    enter_deepspeed(mesh)
    config, make = engine_config(arguments), partial(inner_optimizer, arguments)
    return ZeroEngine(stage, named_parameters, mesh, config, make, arguments.optimizer.weight_decay)


def inner_optimizer(arguments: Arguments, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """What steps the shards: AdamW or SGD as without DeepSpeed; on the host DeepSpeedCPUAdam, or torch's SGD."""
    optimizer = arguments.optimizer
    if optimizer.optimizer == "sgd":
        return DecoupledSGD(groups, optimizer.lr, optimizer.sgd_momentum)
    betas = (optimizer.adam_beta1, optimizer.adam_beta2)
    if offloads_optimizer(arguments):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, optimizer.lr, betas=betas, eps=optimizer.adam_eps)
    return FusedAdamW(groups, optimizer.lr, betas, optimizer.adam_eps)


class FusedAdamW(torch.optim.Optimizer):
    """`training.optimizer.AdamW` as an optimizer of torch, which DeepSpeed asks for."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self.kernel = AdamW([], lr, betas, eps)

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
            if group["decoupled_decay"]:
                torch._foreach_mul_(group["params"], 1.0 - group["lr"] * group["decoupled_decay"])
        super().step()


def engine_config(arguments: Arguments) -> dict[str, Any]:
    """What `deepspeed.initialize` gets."""
    stage, offloaded = zero_stage(arguments), offloads_optimizer(arguments)
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": False}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    if offloaded:
        zero["offload_optimizer"] = {"device": arguments.zero.offload_optimizer}
    if stage == 1:
        # Our reducer sums and clips. No precision is named, or gradients would be rounded to it; without a fixed scale
        # an fp16 parameter would get DeepSpeed's.
        zero |= {"contiguous_gradients": False, "compute_grad_norm": offloaded, "parameter_alignment": True}
        config |= {"gradient_clipping": 0.0, "fp16": {"enabled": False, "loss_scale": 1.0}}
    return config
