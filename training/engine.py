"""One training step over the mesh: micro-batches through the pipeline, gradients reduced, clipped, applied.

Lives here: the composition of model, pipeline, reducer and optimizer; no files, no terminal, no data reading. May
import the rooms below. `trainer.py` is the loop around it; tests drive it directly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from model.balance import Balance
from model.config import DeepSeekConfig
from model.deepseek import build_stages
from model.microbatch import MicroBatch, set_denominators
from model.options import ModelOptions
from model.router import routers, sum_counts, update_router_bias
from parallel.comm import all_reduce_, barrier
from parallel.gradients import GradientReducer, Gradients
from parallel.mesh import Mesh
from parallel.pipeline.runtime import PipelineRuntime
from parallel.pipeline.schedule import Schedule
from training.arguments import Arguments
from training.compression import compression_options
from training.optimizer import Optimizer
from training.pipeline import layers_of_stages, placement_asked, schedule_of
from training.precision import DTYPES, LossScale
from training.update import OptimizerState, ReducedUpdate, Update
from training.zero import sharded_optimizer, zero_engine, zero_stage

if TYPE_CHECKING:
    from parallel.zero import ShardedOptimizer


@dataclass(frozen=True)
class StepResult:
    """What one step did, the same on every rank.

    taken: False where a loss or the gradient's norm wasn't finite: parameters, optimizer, router biases and what
    compression keeps are then as they were before the step. loss_scale: of this step, for fp16; retry: its gradient has
    overflowed and the loss scale is lower now, so the same micro-batches, made anew, are worth another attempt.

    losses: by name: "lm" (mean nats a token over the global batch), "mtp_1", …, "aux"; grad_norm: before clipping;
    tokens: that counted in the loss; expert_loads: int64 [MoE layers of the model, experts], choices of the global
    batch, dropped ones too; dropped: int64 [MoE layers], how many of them were dropped; sent_bytes: by axis, of all
    ranks together, from the update of the step before to the message that sums them. Tensors are on the CPU.
    """

    losses: dict[str, float]
    grad_norm: float
    tokens: float
    expert_loads: torch.Tensor
    dropped: torch.Tensor
    sent_bytes: dict[str, int]
    taken: bool = True
    loss_scale: float | None = None
    retry: bool = False

    @property
    def dropped_share(self) -> float:
        """Of all choices; 0 for a model without experts."""
        return self.dropped.sum().item() / max(self.expert_loads.sum().item(), 1)

    @property
    def max_violations(self) -> list[float]:
        """MaxVio (2408.15664) of each MoE layer: the top expert's load over the mean, minus 1."""
        loads = self.expert_loads.double()
        return (loads.amax(-1) / loads.mean(-1) - 1).tolist() if loads.numel() else []


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Inside, a lost peer's error says in what this rank waited for it, its row of the pipeline's table being over."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"after this rank's last action, in {what}: {error}") from error


class Engine:
    """A DeepSeek model on this rank's part of the mesh, ready to train.

    Building it is collective. config: with the flags' overrides applied already (`validate.read_model_config`).
    """

    def __init__(self, config: DeepSeekConfig, arguments: Arguments, mesh: Mesh):
        self.config, self.arguments, self.mesh = config, arguments, mesh
        training = arguments.training
        self.placement = placement_asked(arguments, config, mesh.world_size)
        self.layer_counts = layers_of_stages(arguments, config, self.placement)
        model = arguments.model
        self.balance = Balance(
            model.moe_device_level_aux_loss_coeff,
            model.moe_comm_aux_loss_coeff,
            model.moe_z_loss_coeff,
            model.moe_expert_capacity_factor,
            model.moe_token_drop_policy,
            model.moe_token_drop_level,
        )
        options = ModelOptions(
            recompute=training.recompute_granularity,
            recompute_modules=training.recomputed,
            mtp_loss_scaling_factor=model.mtp_loss_scaling_factor,
            mtp_hidden=model.mtp_hidden,
            balance=self.balance,
        )
        self.stages = build_stages(config, mesh, self.placement, options, arguments.run.seed, self.layer_counts)
        self.dtype = DTYPES[training.precision]
        self.loss_scale = LossScale.from_arguments(training)
        for _, parameter in self.named_parameters():
            # Parameters only: buffers such as the router's bias stay fp32.
            parameter.data = parameter.data.to(self.dtype)
        self.steps_done = 0
        """Steps of the run so far, those before a checkpoint was loaded included; not all of them were taken.

        An attempt that is to be made again doesn't count.
        """
        self.reducer: Gradients
        self.optimizer: OptimizerState
        self.update: Update
        if zero_stage(arguments) > 1:
            zero = zero_engine(self.stages[0], self.named_parameters(), arguments, mesh)
            self.reducer = self.optimizer = self.update = zero
            self.runtime = PipelineRuntime(mesh, {0: zero}, self.dtype, MicroBatch.finished, zero.backward)
        else:
            reducer = GradientReducer(
                self.named_parameters(),
                mesh,
                arguments.distributed.bucket_cap_mb,
                arguments.distributed.overlap_grad_reduce,
                # The runtime never enters no_sync: only just before the group's timeout is a late rank a fault.
                patience=0.9 * 60 * arguments.distributed.distributed_timeout_minutes,
                compression=compression_options(arguments.compression),
            )
            optimizer: Optimizer | ShardedOptimizer
            if zero_stage(arguments) == 1:
                optimizer = sharded_optimizer(self.named_parameters(), arguments, mesh)
            else:
                optimizer = Optimizer(self.named_parameters(), arguments.optimizer)
            self.reducer, self.optimizer = reducer, optimizer
            self.update = ReducedUpdate(reducer, optimizer, arguments.optimizer.clip_grad)
            self.runtime = PipelineRuntime(mesh, self.stages, self.dtype, MicroBatch.finished)
        self.routers = routers(self.stages.values())
        self.moe_layers = [layer for layer in range(config.num_layers_with_mtp) if config.is_moe_layer(layer)]
        # Each communicator is used once, in one order on all ranks: none is then set up in the middle of a step.
        for axis in mesh.collective_axes():
            barrier(axis)
        self._schedules: dict[tuple[int, bool], Schedule] = {}
        self._sent_by_update: dict[str, int] = {}  # in the last step, after the message that sums what was sent

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Global name and parameter, in forward order, of every stage of this rank; shared ones once."""
        named = [entry for stage in self.stages.values() for entry in stage.parameters_in_forward_order()]
        yield from dict(named).items()

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Persistent buffers (router biases) by global name; whole and equal on every rank of the stage."""
        for stage in self.stages.values():
            persistent = stage.state_dict(keep_vars=True).keys()
            yield from ((name, buffer) for name, buffer in stage.named_buffers() if name in persistent)

    def train_step(self, microbatches: Sequence[MicroBatch], lr: float) -> StepResult:
        """Forward, backward, reduce, clip, update where everything is finite. Collective.

        microbatches: this dp rank's part of the global batch, the same on its tp, cp and pp ranks; lr: for this step.
        """
        before = self.mesh.sent_bytes()
        self.forward_backward(microbatches)
        with _naming("the norm of the gradient"):
            self.update.clip()
        loads, dropped = sum_counts(self.routers, self.mesh)
        counts = self._of_all_layers(loads, dropped)
        sent = {axis: now - before[axis] for axis, now in self.mesh.sent_bytes().items()}
        sent = {axis: sent + self._sent_by_update.get(axis, 0) for axis, sent in sent.items()}
        losses, sent = self._reported(microbatches, sent)
        finite = all(map(math.isfinite, losses.values()))
        before = self.mesh.sent_bytes()
        norm, taken = self.update.step(lr, finite)
        self._sent_by_update = {axis: now - before[axis] for axis, now in self.mesh.sent_bytes().items()}
        scale, retry = None, False
        if self.loss_scale is not None:
            scale = self.loss_scale.value
            # A loss that isn't finite has overflowed in the forward pass, which no loss scale mends.
            retry = finite and self.loss_scale.update(overflow=not taken)
        if taken:
            update_router_bias(self.routers, loads, self.arguments.model.router_bias_update_rate)
        if not retry:
            self.steps_done += 1
        tokens = self._tokens(microbatches)
        return StepResult(losses, norm, tokens, counts[:, :-1], counts[:, -1], sent, taken, scale, retry)

    def forward_backward(self, microbatches: Sequence[MicroBatch]) -> None:
        """The gradient of the global batch's loss in every `main_grad`, summed over all replicas. Collective."""
        for stage in self.stages.values():
            stage.train()
        self.reducer.compressing = self.steps_done >= self.arguments.compression.grad_compression_warmup_steps
        if self.loss_scale is not None:
            self.runtime.loss_gradient = self.loss_scale.value
            self.reducer.set_loss_scale(self.loss_scale.value)
            for batch in microbatches:
                batch.loss_gradient = self.loss_scale.value
        self.reducer.zero()
        for router in self.routers:
            router.reset_counts()
        set_denominators(microbatches, self.config.num_mtp_layers, self.mesh)
        self.runtime.run(self._schedule(len(microbatches), True), microbatches, self._shape(microbatches), self.reducer)
        with _naming("the sum of gradients over replicas and copies"):
            self.reducer.finish()

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[MicroBatch]) -> tuple[dict[str, float], float]:
        """The losses of one global batch, as in `StepResult`, and its tokens that counted. Collective."""
        for stage in self.stages.values():
            stage.eval()
        set_denominators(microbatches, self.config.num_mtp_layers, self.mesh)
        self.runtime.run(self._schedule(len(microbatches), False), microbatches, self._shape(microbatches))
        return self._reported(microbatches, {})[0], self._tokens(microbatches)

    def loss_names(self) -> list[str]:
        """The losses of this model, in the order they are reported."""
        names = ["lm", *(f"mtp_{depth}" for depth in range(1, self.config.num_mtp_layers + 1))]
        return [*names, *self.balance.loss_names(self.config)]

    def _of_all_layers(self, loads: torch.Tensor, dropped: torch.Tensor) -> torch.Tensor:
        """int64 [MoE layers, experts + 1]: loads and dropped choices of other stages too, by one message over pp."""
        counts = torch.zeros(
            (len(self.moe_layers), self.config.n_routed_experts + 1), dtype=torch.int64, device=self.mesh.device
        )
        if self.routers:
            rows = [self.moe_layers.index(router.layer) for router in self.routers]
            counts[rows] = torch.cat([loads, dropped[:, None]], dim=-1)
        if self.moe_layers:
            all_reduce_(counts, self.mesh.pp)
        return counts.cpu()

    def _reported(
        self, microbatches: Sequence[MicroBatch], sent: dict[str, int]
    ) -> tuple[dict[str, float], dict[str, int]]:
        """Sum what the stages recorded over micro-batches and the world, and what was sent: one small message.

        The same on every rank; axes on which nothing was sent are left out. fp64 counts exactly up to 9 petabytes.
        """
        names = self.loss_names()
        sums = torch.zeros(len(names), dtype=torch.float64, device=self.mesh.device)
        for batch in microbatches:
            for i, name in enumerate(names):
                if name in batch.losses:
                    sums[i] += batch.losses[name]
        sums = torch.cat([sums, sums.new_tensor(list(sent.values()))])
        all_reduce_(sums, self.mesh.world)
        values = sums.tolist()
        summed = {axis: round(value) for axis, value in zip(sent, values[len(names) :], strict=True) if value}
        return dict(zip(names, values, strict=False)), summed

    def _tokens(self, microbatches: Sequence[MicroBatch]) -> float:
        assert microbatches[0].denominators is not None
        return microbatches[0].denominators.tokens.item()

    def _schedule(self, microbatches: int, training: bool) -> Schedule:
        key = (microbatches, training)
        if key not in self._schedules:
            table = schedule_of(self.arguments, self.config, microbatches, self.placement)
            self._schedules[key] = table if training else table.forward_only()
        return self._schedules[key]

    def _shape(self, microbatches: Sequence[MicroBatch]) -> torch.Size:
        """Of the activations between stages: [s/(cp·tp), b, h]."""
        batch, length = microbatches[0].tokens.shape
        return torch.Size((length // self.mesh.sequence.size, batch, self.config.hidden_size))
