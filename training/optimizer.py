"""The optimizer step: fp32 masters behind lower-precision weights, weight-decay groups, AdamW and SGD by torch.

Lives here: what happens between a reduced gradient and a new parameter. May import `parallel`. The gradient of every
parameter is `parameter.main_grad` (fp32), filled by the gradient reducer.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from parallel.sharding import sharding_of
from training.arguments import OptimizerArguments


class Optimizer:
    """torch's AdamW or SGD over fp32 masters.

    An fp32 parameter is its own master; a bf16 one gets an fp32 copy that is stepped and rounded back. Weight decay is
    decoupled in both optimizers and applies to matrices only (norm weights are vectors).
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
            self.inner: torch.optim.Optimizer = torch.optim.AdamW(
                self.groups, lr=arguments.lr, betas=betas, eps=arguments.adam_eps, fused=True
            )
        else:
            self.inner = torch.optim.SGD(self.groups, lr=arguments.lr, momentum=arguments.sgd_momentum)

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
        self.refresh_parameters()

    @torch.no_grad()
    def refresh_parameters(self) -> None:
        """Round the masters to the parameters' dtype."""
        if self._rounded:
            torch._foreach_copy_([p for p, _ in self._rounded], [master for _, master in self._rounded])

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """Optimizer state by kind ("exp_avg", "momentum_buffer", …), then global name; tensors shaped like the master.

        Empty before the first step. The tensors are the live ones: loading copies into them.
        """
        found: dict[str, dict[str, torch.Tensor]] = {}
        for name, master in self.masters.items():
            for kind, value in self.inner.state.get(master, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == master.shape and value.ndim:
                    found.setdefault(kind, {})[name] = value
        return found

    def prepare_moments(self, steps: int) -> None:
        """Make the state as it is after `steps` steps, its values zero, so that a checkpoint can be loaded into it."""
        for master in self.masters.values():
            state = self.inner.state[master]
            if self.arguments.optimizer == "adamw":
                state["step"] = torch.tensor(float(steps), dtype=torch.float32, device=master.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
            elif self.arguments.sgd_momentum:
                state["momentum_buffer"] = torch.zeros_like(master)
