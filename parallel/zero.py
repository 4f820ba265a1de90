"""ZeRO stage 1 under this project's reducer: every replica keeps, and steps, its part of the optimizer's state.

Lives here: what DeepSpeed is told of the mesh, and the sharded optimizer. Imports `parallel` only, and DeepSpeed inside
functions. Follows ZeRO (1910.02054), P_os; DeepSpeed cuts, keeps and gathers, `GradientReducer` sums and clips.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from parallel.accelerator import choose_accelerator
from parallel.mesh import Axis, Mesh
from parallel.sharding import sharding_of

logger = logging.getLogger(__name__)

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Makes the optimizer that DeepSpeed shards, from groups of "params" and "weight_decay"."""

LOG_LEVEL = "DEEPSPEED_LOG_LEVEL"
"""The variable that lets DeepSpeed write to the terminal: a level's name, INFO for all it has to say."""


class Mpu:
    """The model-parallel unit that DeepSpeed asks for groups. Making one is collective over the world.

    shards: the axis over which states are cut; model: that over which DeepSpeed sums norms and overflows, with this
    rank's place among tensor-parallel ones (a parameter that isn't split counts in DeepSpeed's norm on rank 0 only).
    """

    def __init__(self, shards: Axis, model: Axis):
        self.shards, self.model = shards, model
        self._shards, self._model = _group(shards), _group(model)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._shards

    def get_data_parallel_rank(self) -> int:
        return self.shards.rank

    def get_data_parallel_world_size(self) -> int:
        return self.shards.size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._model

    def get_model_parallel_rank(self) -> int:
        return self.model.rank

    def get_model_parallel_world_size(self) -> int:
        return self.model.size

    def get_tensor_model_parallel_rank(self) -> int:
        return self.model.rank


def _group(axis: Axis) -> dist.ProcessGroup:
    """The axis' group; for an axis of one rank, which has none, a new one of that rank, since DeepSpeed wants one.

    An axis is as long on every rank, so all make as many groups (see `Mesh._axis`).
    """
    return axis.group or dist.new_group(list(axis.ranks), use_local_synchronization=True, group_desc="alone")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What DeepSpeed, and torch's builder of its ops, print goes to this rank's log instead of the terminal."""
    if LOG_LEVEL in os.environ:
        yield
        return
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        yield
    if text := said.getvalue().strip():
        logger.info("DeepSpeed: %s", text, extra={"terminal": False})


def enter_deepspeed(mesh: Mesh) -> None:
    """What DeepSpeed finds when it is first imported: the accelerator, this process's variables, a job, a quiet log.

    A process that trains alone has no process group; DeepSpeed wants one and gets one of this rank.
    """
    os.environ.setdefault("LOCAL_RANK", str(mesh.device.index or 0))
    with quiet():
        choose_accelerator(mesh.device)
        import deepspeed

    deepspeed.utils.logger.setLevel(os.environ.get(LOG_LEVEL, "ERROR").upper())
    # It calls collectives by names that torch is about to give up: nothing that the user of a run can mend.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if not dist.is_initialized():
        backend = "nccl" if mesh.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def initialize(
    module: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any], mpu: Mpu
) -> tuple[Any, Callable[..., torch.Tensor]]:
    """DeepSpeed's engine over `module`, after `enter_deepspeed`, and the function for `linear_is` around its passes.

    Stage 3 replaces `F.linear` for all that the process computes, for good; here it's put back. Torch's saves a view
    of the gathered weight, which then lives until the backward pass; DeepSpeed's gathers it again. Collective over the
    mpu's groups. The config is copied: DeepSpeed writes into it. Parameters end up as views of its flat buffers.
    """
    import deepspeed

    before = F.linear
    try:
        with quiet():
            engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=copy.deepcopy(config), mpu=mpu)
        return engine, F.linear
    finally:
        F.linear = before


@contextlib.contextmanager
def linear_is(function: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Inside, `torch.nn.functional.linear` is this function."""
    before, F.linear = F.linear, function
    try:
        yield
    finally:
        F.linear = before


def destroy(engine: Any) -> None:
    """Let go of an engine's memory; at a run's end, after the process group, it goes with the process."""
    if dist.is_initialized():
        engine.destroy()


def decay_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices, which decay, and vectors (norm weights), which don't: as `training.optimizer.Optimizer`."""
    parameters = [parameter for _, parameter in named]
    return [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0},
    ]


def link_moments(engine: Any, inner: torch.optim.Optimizer) -> tuple[str, ...]:
    """Make the moments, zero, and let DeepSpeed find each parameter's part of them; their names. Collective.

    DeepSpeed links parameters to the optimizer's state once, at the end of the first group's first step, when most
    optimizers haven't made that of the others. So all make theirs by a step of their own, then the engine takes one:
    with gradients 0 and at a learning rate of 0 both change nothing but the count, which is set back.
    """
    partitions = [partition for group in inner.param_groups for partition in group["params"]]
    without = [partition for partition in partitions if partition.grad is None]  # all, or none where they are offloaded
    for partition in without:
        partition.grad = torch.zeros_like(partition)
    for group in inner.param_groups:
        group["lr"] = 0.0
    inner.step()
    if without:
        for partition in without:
            partition.grad = None
        engine.allreduce_gradients()
    engine.step()
    set_steps(inner, 0)
    state, like = inner.state[partitions[0]], partitions[0]
    return tuple(name for name, value in state.items() if torch.is_tensor(value) and value.shape == like.shape)


def set_steps(inner: torch.optim.Optimizer, steps: int) -> None:
    """The optimizer has taken so many steps, as far as it counts them.

    DeepSpeedCPUAdam's C++ side keeps βᵗ as an fp32 product of t factors, which isn't βᵗ to the last bit. So it steps
    a value of no meaning as often, 20 µs each, or a resumed run would differ from one that was never interrupted.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    for state in inner.state.values():
        if "step" in state:
            state["step"] = torch.full_like(state["step"], steps) if torch.is_tensor(state["step"]) else steps
    if isinstance(inner, DeepSpeedCPUAdam):
        groups, probe = inner.param_groups, nn.Parameter(torch.zeros(1))
        probe.grad = torch.zeros(1)
        inner.param_groups = [{**groups[0], "params": [probe], "lr": 0.0}]
        for _ in range(steps):
            inner.step()
        inner.param_groups = groups
        inner.state.pop(probe, None)


class ShardedOptimizer:
    """DeepSpeed's ZeRO-1 over gradients that are reduced and clipped already: `parameter.main_grad`, fp32.

    Masters, moments and their step are cut over replicas: those of dense parameters over dp·cp, of experts over edp, by
    an engine each, since DeepSpeed takes all parameters of one to be the same on all of its ranks. A step copies
    this rank's part of each main gradient, steps it and gathers the parameters; gradients aren't reduced again and stay
    fp32. An `update.OptimizerState`; fp32 parameters have masters too.

    config: for `deepspeed.initialize`; make: the optimizer of the groups `decay_groups` gives. Building it is
    collective. Afterwards parameters are views of DeepSpeed's flat buffers.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        mesh: Mesh,
        config: dict[str, Any],
        make: Make,
        weight_decay: float,
    ):
        enter_deepspeed(mesh)
        self.parameters = dict(named_parameters)
        self.mesh = mesh
        # DeepSpeed gets stand-ins that share the parameters' memory: what it hangs on a parameter (hooks that would
        # count and add up gradients, attributes) and takes from it (.grad) is then none of autograd's or the reducer's.
        self._stand_ins = {name: nn.Parameter(parameter.detach()) for name, parameter in self.parameters.items()}
        self._offloaded = config["zero_optimization"].get("offload_optimizer", {}).get("device", "none") != "none"
        # DeepSpeed's own sums over model parallel ranks, of norm and overflow, aren't used here.
        alone = Axis("alone", (mesh.world.ranks[mesh.world.rank],), 0)
        self.inner: list[torch.optim.Optimizer] = []
        """What `make` made: one for dense parameters, one for experts where this rank has some."""
        self.engines: list[Any] = []
        self._gathered: list[tuple[Axis, float]] = []  # by each engine's step: over what axis, bytes sent by this rank
        self.moments: tuple[str, ...] = ()
        for expert in (False, True):
            axis = mesh.edp if expert else mesh.dp_cp
            mpu = Mpu(axis, alone)  # on every rank, whether it has parameters of this kind or not
            named = [
                (name, self._stand_ins[name])
                for name, parameter in self.parameters.items()
                if sharding_of(parameter).expert == expert
            ]
            if not named:
                continue
            module = nn.Module()
            module.owned = nn.ParameterList(stand_in for _, stand_in in named)
            with quiet():
                inner = make(decay_groups(named, weight_decay))
            engine, _ = initialize(module, inner, config, mpu)
            self.inner.append(inner)
            self.engines.append(engine)
            self.moments = link_moments(engine, inner)
            # Its hooks on stand-ins are a cycle that Python's collector doesn't see.
            weakref.finalize(self, destroy, engine).atexit = False
            size = sum(stand_in.numel() * stand_in.element_size() for _, stand_in in named)
            self._gathered.append((axis, size * (axis.size - 1) / axis.size))
        for name, parameter in self.parameters.items():
            parameter.data = self._stand_ins[name].data

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every parameter with its main gradient at learning rate `lr`. Collective over dp·cp and edp."""
        from deepspeed.utils import safe_set_full_grad

        for engine in self.engines:
            if not self._offloaded:
                engine.allreduce_gradients()  # stand-ins have none: it only makes this rank's part, zeros
        for name, parameter in self.parameters.items():
            safe_set_full_grad(self._stand_ins[name], parameter.main_grad)  # type: ignore[attr-defined]
        for inner, engine in zip(self.inner, self.engines, strict=True):
            for group in inner.param_groups:
                group["lr"] = lr
            engine.step()
            if not engine.was_step_applied():
                raise RuntimeError("DeepSpeed skipped a step whose gradient is finite: parameters now differ in age")
        for axis, sent in self._gathered:
            if axis.size > 1:
                axis.ledger.add(axis.name, "all_gather", sent)

    def shards(self, name: str) -> Axis | None:
        return self.mesh.edp if sharding_of(self.parameters[name]).expert else self.mesh.dp_cp

    def read(self, name: str, moment: str | None = None) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if moment is None:
            return safe_get_full_fp32_param(self._stand_ins[name])
        return safe_get_full_optimizer_state(self._stand_ins[name], moment)

    def write(self, name: str, value: torch.Tensor, moment: str | None = None) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if moment is None:
            safe_set_full_fp32_param(self._stand_ins[name], value)
        else:
            safe_set_full_optimizer_state(self._stand_ins[name], value, moment)

    def prepare(self, steps: int) -> None:
        for inner in self.inner:
            for state in inner.state.values():
                for moment in self.moments:
                    state[moment].zero_()
            set_steps(inner, steps)

    def written(self) -> None:
        for engine in self.engines:
            engine.optimizer.update_lp_params()
