"""ZeRO stages 2 and 3 by DeepSpeed, whose engine owns the backward pass: gradients are cut up as they come.

Lives here: `ZeroEngine`, which stands for reducer, optimizer and the end of a step at once. May import `parallel`.
Source: ZeRO (1910.02054), ZeRO-Infinity (2104.07857) for what is offloaded. Stage 1 works under the reducer: `zero.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from parallel.buckets import Bucket
from parallel.comm import all_reduce_
from parallel.compression.compression import Compression, CompressionStatistics
from parallel.mesh import Axis, Mesh
from parallel.sharding import sharding_of
from parallel.zero import (
    Make,
    Mpu,
    decay_groups,
    destroy,
    enter_deepspeed,
    initialize,
    linear_is,
    quiet,
    set_steps,
)


class ZeroEngine:
    """DeepSpeed's engine over one whole model: `Gradients`, `Update` and `OptimizerState` of the training step.

    Gradients (stage 2) and parameters (3) too are cut over dp·cp, behind every backward and around every use. What each
    tp rank holds whole and feeds its own tokens has its gradient summed over tp before that. DeepSpeed averages over
    its ranks and we sum: its loss scale is ours divided by their number, so backward computes what it does without it,
    and what is averaged comes out as the sum where the scale is taken out again, in fp32.

    stage: the model, called by `self(None, batch)`, one backward for each forward before the next; named_parameters:
    of it, by global name, in its precision; config: for `deepspeed.initialize`, in which this class sets what its
    arithmetic depends on; make: the inner optimizer of parameter groups; weight_decay: of matrices, vectors have none.
    Building is collective. Under stage 3 parameters have no values, and shape [0], except while they are used.
    Raises ValueError for a pipeline or for expert parallelism.
    """

    compression: Compression | None = None
    compressing = False
    messages = 0
    message_bytes = 0
    exposed_seconds = 0.0

    def __init__(
        self,
        stage: nn.Module,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        mesh: Mesh,
        config: dict[str, Any],
        make: Make,
        weight_decay: float,
    ):
        self.zero_stage: int = config["zero_optimization"]["stage"]
        for name, axis in (("a pipeline of", mesh.pp), ("expert parallelism over", mesh.ep)):
            if axis.size > 1:
                raise ValueError(f"ZeRO stage {self.zero_stage} doesn't go with {name} {axis.size} ranks: take stage 1")
        self.mesh = mesh
        self.buckets: list[Bucket] = []
        self.parameters = dict(named_parameters)
        for parameter in self.parameters.values():
            self._tell_of_tensor_parallelism(parameter)
        (dtype,) = {parameter.dtype for parameter in self.parameters.values()}
        self._values, self._value_bytes = sum(p.numel() for p in self.parameters.values()), dtype.itemsize
        enter_deepspeed(mesh)
        with quiet():
            self.inner = make(decay_groups(self.parameters.items(), weight_decay))
        self.moments: tuple[str, ...] = ()
        self.inner.register_step_pre_hook(partial(_call, weakref.WeakMethod(self._before_inner_step)))
        self.inner.register_step_post_hook(partial(_call, weakref.WeakMethod(self._after_inner_step)))
        _agree_on_numbers(mesh)
        mpu = Mpu(mesh.dp_cp, mesh.tp)
        self.engine, self._linear = initialize(stage, self.inner, _settings(config, dtype), mpu)
        for number, module in enumerate(stage.modules()):
            module.ds_id = number  # type: ignore[assignment]
        # Its hooks on parameters are a cycle that Python's collector doesn't see.
        weakref.finalize(self, destroy, self.engine).atexit = False
        self.set_loss_scale(1.0)
        self._applies = True  # whether the next step of the inner optimizer is taken
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # what it has to skip, and the gradients
        self._makes_moments = False
        self._forwards = 0  # without their backward
        self._backwards = 0  # since the last step
        self.prepare(0)

    def __call__(self, x: torch.Tensor | None, batch: Any) -> torch.Tensor:
        """The model's forward pass. DeepSpeed tells micro-batches apart by these calls: a second one before the first
        one's backward would make the later gradient overwrite the earlier."""
        if torch.is_grad_enabled():
            if self._forwards:
                raise RuntimeError(
                    f"ZeRO stage {self.zero_stage} needs each micro-batch's backward before the next one's forward"
                )
            self._forwards += 1
        self._count_gather()
        with linear_is(self._linear):
            return self.engine(x, batch)

    # ---- Gradients

    def backward(self, loss: torch.Tensor) -> None:
        """Differentiate one micro-batch's loss, and add its gradients to the shards. Collective over dp·cp and tp."""
        self._count_gather()
        with linear_is(self._linear):  # for what is recomputed
            self.engine.backward(loss * self.mesh.dp_cp.size, scale_wrt_gas=False)
        # Stage 2 by default all-reduces buckets and keeps its part.
        operation, times = ("all_reduce", 2) if self.zero_stage == 2 else ("reduce_scatter", 1)
        self._count(operation, times * 4 * self._values)
        self._forwards -= 1
        self._backwards += 1

    def set_loss_scale(self, scale: float) -> None:
        """Gradients are computed `scale` times as large from now on, and norm and update are free of it."""
        self.engine.optimizer.override_loss_scale(scale / self.mesh.dp_cp.size)

    def zero(self) -> None:
        """Start a step. Gradients of backward passes that no step followed are forgotten."""
        if self._backwards:
            self._idle_step()
        self._forwards = 0

    def expect(self, passes: Mapping[nn.Parameter, int]) -> None:
        """Nothing to prepare: gradients are reduced in every backward pass."""

    def no_sync(self) -> AbstractContextManager[None]:
        raise RuntimeError(
            f"no_sync() doesn't go with ZeRO stage {self.zero_stage}, which reduces and cuts up the gradients of every "
            "backward pass: leave it out, or take stage 1"
        )

    def finish(self) -> None:
        """Nothing is left to be waited for."""

    def compression_statistics(self) -> CompressionStatistics | None:
        return None

    # ---- The end of a step

    def clip(self) -> None:
        """Done in `step`, where the norm is taken."""

    def step(self, lr: float, finite: bool) -> tuple[float, bool]:
        self._step(lr, finite)
        if self.zero_stage == 2:
            self._count("all_gather", self._values * self._value_bytes)
        return float(self.engine.get_global_grad_norm()), finite and self.engine.was_step_applied()

    def _step(self, lr: float, applies: bool) -> None:
        """DeepSpeed's step; where it doesn't apply, all but the inner optimizer's: norm, rounding, new buffers."""
        self._set_lr(lr if applies else 0.0)
        self._applies = applies
        self.engine.step()
        if self.zero_stage == 2 and not self.engine.was_step_applied():
            # Where it offloads, DeepSpeed would add the next gradients to those that weren't finite.
            for group in self.engine.optimizer.averaged_gradients:
                self.engine.optimizer.averaged_gradients[group] = None
        self._applies, self._backwards = True, 0

    def _set_lr(self, lr: float) -> None:
        for group in self.inner.param_groups:
            group["lr"] = lr

    def _before_inner_step(self, inner: torch.optim.Optimizer, *_: Any) -> None:
        """DeepSpeed calls the inner optimizer for one flat tensor, of fp32 masters, after the other."""
        if not self._applies:  # torch's optimizers leave alone what has no gradient
            for tensor in _tensors(inner):
                if tensor.grad is not None:  # the first time: a subclass' step may call its parent's
                    self._kept.append((tensor, tensor.grad))
                    tensor.grad = None

    def _after_inner_step(self, inner: torch.optim.Optimizer, *_: Any) -> None:
        for tensor, gradient in self._kept:
            tensor.grad = gradient
        self._kept.clear()
        if self._makes_moments:
            for tensor in _tensors(inner):
                state = {name: value for name, value in inner.state[tensor].items() if torch.is_tensor(value)}
                self.moments = tuple(name for name, value in state.items() if value.shape == tensor.shape)
                for moment in self.moments:
                    state[moment].zero_()

    def _idle_step(self) -> None:
        """A step that changes no master, with gradients of zero: masters are rounded to parameters."""
        if self.zero_stage == 3:
            self.engine.optimizer.zero_grad()
            self.engine.optimizer.grad_partitions_flat_buffer.zero_()
            self.engine.allreduce_gradients()
        elif not self._backwards:  # stage 2 makes its buffers for gradients in a backward pass
            zero = torch.stack([parameter.flatten()[:1].sum() * 0 for parameter in self.parameters.values()]).sum()
            timers = self.engine.engine_timers  # none without wall_clock_breakdown; a forward pass would start them
            for timer in (*timers.backward_timers, *timers.backward_inner_timers):
                self.engine.timers(timer).start()
            self.engine.backward(zero, scale_wrt_gas=False)
        self._step(0.0, applies=self._makes_moments)

    def _count(self, operation: str, size: float) -> None:
        """Tell the ledger what DeepSpeed sends over dp·cp."""
        axis = self.mesh.dp_cp
        if axis.size > 1:
            axis.ledger.add(axis.name, operation, size * (axis.size - 1) / axis.size)

    def _count_gather(self) -> None:
        """Stage 3 gathers every parameter for the forward pass and for the backward pass.

        Those that stay (small ones, and until the backward pass up to stage3_max_live_parameters) are counted too, and
        what recomputation gathers once more isn't.
        """
        if self.zero_stage == 3:
            self._count("all_gather", self._values * self._value_bytes)

    # ---- Masters and moments

    def shards(self, name: str) -> Axis | None:
        return self.mesh.dp_cp

    def read(self, name: str, moment: str | None = None) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        parameter = self.parameters[name]
        if moment is None:
            return safe_get_full_fp32_param(parameter)
        return safe_get_full_optimizer_state(parameter, moment)

    def write(self, name: str, value: torch.Tensor, moment: str | None = None) -> None:
        from deepspeed import utils

        parameter, value = self.parameters[name], value.float()
        if self.zero_stage == 3:  # the whole tensor wouldn't do where its length isn't a multiple of the ranks
            shard = self._shard(value)
            if moment is None:
                utils.safe_set_local_fp32_param(parameter, shard)
            else:
                utils.safe_set_local_optimizer_state(parameter, shard, moment)
        elif moment is None:
            utils.safe_set_full_fp32_param(parameter, value)
        else:
            utils.safe_set_full_optimizer_state(parameter, value, moment)

    def prepare(self, steps: int) -> None:
        self._makes_moments = True
        tensors = _tensors(self.inner)  # none of stage 3, whose moments come with DeepSpeed's step
        if tensors:  # stage 2 links all groups' moments in its first group's first step, so they must be there
            gradients = [tensor.grad for tensor in tensors]
            for tensor in tensors:
                tensor.grad = torch.zeros_like(tensor)
            self._set_lr(0.0)
            self.inner.step()
            for tensor, gradient in zip(tensors, gradients, strict=True):
                tensor.grad = gradient
        self._idle_step()
        self._makes_moments = False
        set_steps(self.inner, steps)

    def written(self) -> None:
        self._idle_step()

    def _shard(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor as stage 3 cuts it: flat, in equal parts, the last ones padded."""
        axis = self.mesh.dp_cp
        size = -(-value.numel() // axis.size)
        part = value.flatten()[axis.rank * size : (axis.rank + 1) * size]
        return F.pad(part, (0, size - part.numel()))

    def _tell_of_tensor_parallelism(self, parameter: nn.Parameter) -> None:
        """Where its gradient is summed over tp, and whether its norm counts on every tp rank."""
        sharding = sharding_of(parameter)
        if sharding.gradient_axis(self.mesh).ranks != self.mesh.dp_cp.ranks:
            parameter.register_hook(partial(_summed, axis=self.mesh.tp))
        elif sharding.axis == "tp":
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def _call(method: weakref.WeakMethod, *arguments: Any) -> None:
    """A hook that doesn't keep its engine."""
    bound = method()
    assert bound is not None, "DeepSpeed steps an engine that was dropped"
    bound(*arguments)


def _summed(gradient: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Over the axis, in fp32."""
    total = gradient.to(torch.float32, copy=True).contiguous()
    all_reduce_(total, axis)
    return total.to(gradient.dtype)


def _agree_on_numbers(mesh: Mesh) -> None:
    """DeepSpeed numbers parameters and modules through a process's life, and compares what stage 3 does by numbers.

    So ranks that have had engines before, not all the same ones, must go on from one number.
    """
    from deepspeed import zero

    count = torch.tensor([zero.Init.param_id], device=mesh.device)
    all_reduce_(count, mesh.world, "max")
    zero.Init.param_id = int(count)


def _settings(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """DeepSpeed's configuration with what the arithmetic here depends on."""
    from deepspeed.accelerator import get_accelerator

    precision: dict[str, Any] = {}
    if dtype == torch.bfloat16:
        precision = {"bf16": {"enabled": True, "check_grad_overflow": True}}
    elif dtype == torch.float16:
        # The scale is a static one, which `set_loss_scale` overrides: a dynamic one would count for itself. A CPU that
        # computes fp16 as fp32 is none that DeepSpeed lets enable it; the parameters' dtype does the same.
        precision = {"fp16": {"enabled": bool(get_accelerator().is_fp16_supported()), "loss_scale": 1.0}}
    return {
        **config,
        "train_micro_batch_size_per_gpu": 1,  # counted here, where samples needn't be as many in each step
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        **precision,
    }


def _tensors(inner: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [tensor for group in inner.param_groups for tensor in group["params"]]
