"""The optimizer step: fp32 masters behind 16-bit weights, weight-decay groups, AdamW and SGD by torch.

Lives here: what happens between a reduced gradient and a new parameter. May import `parallel`. The gradient of every
parameter is `parameter.main_grad` (fp32), filled by the gradient reducer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from parallel.mesh import Axis
from parallel.sharding import sharding_of
from training.arguments import OptimizerArguments
from training.precision import DTYPES

_CHUNK = 1 << 22
"""Values updated at a time where moments aren't fp32: their fp32 copies then take 32 MiB, however large a parameter."""

_FP32 = MappingProxyType({"exp_avg": torch.float32, "exp_avg_sq": torch.float32})

State = dict[str, torch.Tensor]
"""Of a parameter: "step", fp32 scalar; "exp_avg", "exp_avg_sq", shaped like it, in fp32 or bf16."""


def adam_state(parameter: torch.Tensor, moments: Mapping[str, torch.dtype], steps: int = 0) -> State:
    """As it is after `steps` steps, moments zero. moments: the dtypes of "exp_avg" and "exp_avg_sq"."""
    kept = {name: torch.zeros_like(parameter, dtype=dtype) for name, dtype in moments.items()}
    return {"step": torch.tensor(float(steps), dtype=torch.float32, device=parameter.device), **kept}


@torch.no_grad()
def fused_adamw_(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    states: Sequence[State],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One step of AdamW by torch's fused kernel, in place, states included. All tensors but bf16 moments are fp32.

    Moments in bf16 are computed in fp32 and rounded, a bounded part of a parameter at a time; contiguous tensors then.
    """
    kernel = partial(
        torch._fused_adamw_,
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
    if not parameters:
        return
    torch._foreach_add_([state["step"] for state in states], 1)
    whole: list[tuple[torch.Tensor, ...]] = []
    for parameter, gradient, state in zip(parameters, gradients, states, strict=True):
        tensors = parameter, gradient, state["exp_avg"], state["exp_avg_sq"]
        if all(moment.dtype == parameter.dtype for moment in tensors[2:]):
            whole.append((*tensors, state["step"]))
            continue
        for flat in zip(*(tensor.detach().view(-1).split(_CHUNK) for tensor in tensors), strict=True):
            moments = [moment.to(parameter.dtype) for moment in flat[2:]]
            kernel([flat[0]], [flat[1]], [moments[0]], [moments[1]], [], [state["step"]])
            torch._foreach_copy_(list(flat[2:]), moments)
    if whole:
        values, grads, first, second, steps = (list(kind) for kind in zip(*whole, strict=True))
        kernel(values, grads, first, second, [], steps)


class AdamW:
    """torch's fused AdamW kernel, with the groups and the state of `torch.optim.AdamW(fused=True)`.

    That class imports torch._dynamo when it is made: two seconds of every rank's start. moments: the dtypes in which
    "exp_avg" and "exp_avg_sq" are kept.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        moments: Mapping[str, torch.dtype] = _FP32,
    ):
        self.param_groups = [{**group, "lr": lr} for group in groups]
        self.betas, self.eps, self.moments = betas, eps, moments
        self.state: dict[torch.Tensor, State] = defaultdict(dict)

    def step(self) -> None:
        """Update every parameter that has a gradient, at its group's "lr" and "weight_decay"."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter] = adam_state(parameter, self.moments)
            gradients = [parameter.grad for parameter in parameters]
            states = [self.state[parameter] for parameter in parameters]
            fused_adamw_(parameters, gradients, states, group["lr"], self.betas, self.eps, group["weight_decay"])


def moment_dtypes(arguments: OptimizerArguments) -> dict[str, torch.dtype]:
    """In which the optimizer's moments are kept, by name; none for SGD without momentum."""
    if arguments.optimizer == "adamw":
        return {"exp_avg": DTYPES[arguments.exp_avg_dtype], "exp_avg_sq": DTYPES[arguments.exp_avg_sq_dtype]}
    return {"momentum_buffer": torch.float32} if arguments.sgd_momentum else {}


class Optimizer:
    """torch's AdamW or SGD over fp32 masters.

    An fp32 parameter is its own master; a 16-bit one gets an fp32 copy, stepped and rounded to it. Weight decay is
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
        self._moment_dtypes = moment_dtypes(arguments)
        self.moments = tuple(self._moment_dtypes)
        decayed = [master for master in self.masters.values() if master.ndim > 1]
        others = [master for master in self.masters.values() if master.ndim <= 1]
        self.groups: list[dict] = [{"params": decayed}, {"params": others}]
        if arguments.optimizer == "adamw":
            self.groups[0]["weight_decay"], self.groups[1]["weight_decay"] = arguments.weight_decay, 0.0
            betas = (arguments.adam_beta1, arguments.adam_beta2)
            self.inner: AdamW | torch.optim.SGD = AdamW(
                self.groups, arguments.lr, betas, arguments.adam_eps, self._moment_dtypes
            )
        else:
            self.inner = torch.optim.SGD(self.groups, lr=arguments.lr, momentum=arguments.sgd_momentum)
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
            state = adam_state(master, self._moment_dtypes, steps)
            if self.arguments.optimizer != "adamw":
                del state["step"]
            self.inner.state[master] = state

    @torch.no_grad()
    def written(self) -> None:
        if self._rounded:
            torch._foreach_copy_([p for p, _ in self._rounded], [master for _, master in self._rounded])
