"""The optimizer step: fp32 masters behind lower-precision weights, weight-decay groups, AdamW and SGD by torch.

Lives here: what happens between a reduced gradient and a new parameter. May import `parallel`. The gradient of every
parameter is `parameter.main_grad` (fp32), filled by the gradient reducer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from parallel.mesh import Axis
from parallel.sharding import sharding_of
from training.arguments import OptimizerArguments


class AdamW:
    """torch's fused AdamW kernel, with the groups and the state of `torch.optim.AdamW(fused=True)`.

    That class imports torch._dynamo when it is made: two seconds of every rank's start.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float):
        self.param_groups = [{**group, "lr": lr} for group in groups]
        self.betas, self.eps = betas, eps
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = defaultdict(dict)

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient, at its group's "lr" and "weight_decay"."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
            if not parameters:
                continue
            state = [self.state[parameter] for parameter in parameters]
            torch._foreach_add_([values["step"] for values in state], 1)
            torch._fused_adamw_(
                parameters,
                [parameter.grad for parameter in parameters],
                [values["exp_avg"] for values in state],
                [values["exp_avg_sq"] for values in state],
                [],
                [values["step"] for values in state],
                lr=group["lr"],
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=group["weight_decay"],
                eps=self.eps,
                amsgrad=False,
                maximize=False,
            )


class Optimizer:
    """torch's AdamW or SGD over fp32 masters.

    An fp32 parameter is its own master; a bf16 one gets an fp32 copy that is stepped and rounded back. Weight decay is
    decoupled in both optimizers and applies to matrices only (norm weights are vectors). An `update.OptimizerState`.
    masters: global name -> fp32 tensor, this rank's block, carrying its parameter's `sharding`.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], arguments: OptimizerArguments):
        self.arguments = arguments
        self.parameters = dict(named_parameters)
        self.masters: dict[str, torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            if parameter.dtype == torch.float32:
                master: torch.Tensor = parameter
            else:
                master = parameter.detach().float()
                master.sharding = sharding_of(parameter)  # type: ignore[attr-defined]
            self.masters[name] = master
        self._rounded = [
            (parameter, self.masters[name])
            for name, parameter in self.parameters.items()
            if self.masters[name] is not parameter
        ]
        decayed = [master for master in self.masters.values() if master.ndim > 1]
        others = [master for master in self.masters.values() if master.ndim <= 1]
        self.groups: list[dict] = [{"params": decayed}, {"params": others}]
        if arguments.optimizer == "adamw":
            self.groups[0]["weight_decay"], self.groups[1]["weight_decay"] = arguments.weight_decay, 0.0
            betas = (arguments.adam_beta1, arguments.adam_beta2)
            self.inner: AdamW | torch.optim.SGD = AdamW(self.groups, arguments.lr, betas, arguments.adam_eps)
            self.moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
        else:
            self.inner = torch.optim.SGD(self.groups, lr=arguments.lr, momentum=arguments.sgd_momentum)
            self.moments = ("momentum_buffer",) if arguments.sgd_momentum else ()
        self.prepare(0)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every parameter with its main gradient at learning rate `lr`."""
        for name, parameter in self.parameters.items():
            self.masters[name].grad = parameter.main_grad  # type: ignore[attr-defined]
        for group in self.inner.param_groups:
            group["lr"] = lr
        if self.arguments.optimizer == "sgd" and self.arguments.weight_decay:
            torch._foreach_mul_(self.groups[0]["params"], 1.0 - lr * self.arguments.weight_decay)
        self.inner.step()
        self.written()

    def shards(self, name: str) -> Axis | None:
        return None

    def read(self, name: str, moment: str | None = None) -> torch.Tensor:
        master = self.masters[name]
        return master if moment is None else self.inner.state[master][moment]

    def write(self, name: str, value: torch.Tensor, moment: str | None = None) -> None:
        with torch.no_grad():
            self.read(name, moment).copy_(value)

    def prepare(self, steps: int) -> None:
        for master in self.masters.values():
            state = self.inner.state[master]
            if self.arguments.optimizer == "adamw":
                state["step"] = torch.tensor(float(steps), dtype=torch.float32, device=master.device)
            for moment in self.moments:
                state[moment] = torch.zeros_like(master)

    @torch.no_grad()
    def written(self) -> None:
        if self._rounded:
            torch._foreach_copy_([p for p, _ in self._rounded], [master for _, master in self._rounded])
