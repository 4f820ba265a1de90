"""One training step over the mesh: micro-batches through the pipeline, gradients reduced, clipped, applied.

Lives here: the composition of model, pipeline, reducer and optimizer; no files, no terminal, no data reading. May
import the rooms below. `trainer.py` is the loop around it; tests drive it directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from model.config import DeepSeekConfig
from model.deepseek import ModelOptions, build_stages
from model.microbatch import MicroBatch, set_denominators
from model.router import routers, update_router_bias
from parallel.comm import all_reduce_, barrier
from parallel.gradients import GradientReducer
from parallel.mesh import Mesh
from parallel.pipeline.runtime import PipelineRuntime
from parallel.pipeline.schedule import Schedule
from training.arguments import Arguments
from training.optimizer import Optimizer
from training.pipeline import layers_of_stages, placement_asked, schedule_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class StepResult:
    """What one step did, the same on every rank.

    losses: by name: "lm" (mean nats a token over the global batch), "mtp_1", …, "aux"; grad_norm: before clipping;
    tokens: that counted in the loss; expert_loads: int64 [routers of this stage, experts], choices of the global batch.
    """

    losses: dict[str, float]
    grad_norm: float
    tokens: float
    expert_loads: torch.Tensor


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
        options = ModelOptions(
            recompute=training.recompute_granularity,
            recompute_modules=training.recompute_modules or ("core_attn",),
            mtp_loss_scaling_factor=arguments.model.mtp_loss_scaling_factor,
            mtp_hidden=arguments.model.mtp_hidden,
        )
        self.stages = build_stages(config, mesh, self.placement, options, arguments.run.seed, self.layer_counts)
        self.dtype = DTYPES[training.precision]
        for _, parameter in self.named_parameters():
            # Parameters only: buffers such as the router's bias stay fp32.
            parameter.data = parameter.data.to(self.dtype)
        self.reducer = GradientReducer(
            self.named_parameters(),
            mesh,
            arguments.distributed.bucket_cap_mb,
            arguments.distributed.overlap_grad_reduce,
            # The runtime never enters no_sync: only just before the group's timeout is a late rank a fault.
            patience=0.9 * 60 * arguments.distributed.distributed_timeout_minutes,
        )
        self.optimizer = Optimizer(self.named_parameters(), arguments.optimizer)
        self.runtime = PipelineRuntime(mesh, self.stages, self.dtype, MicroBatch.finished)
        self.routers = routers(self.stages.values())
        # Each communicator is used once, in one order on all ranks: none is then set up in the middle of a step.
        for axis in mesh.collective_axes():
            barrier(axis)
        self._schedules: dict[tuple[int, bool], Schedule] = {}

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
        """Forward, backward, reduce, clip, update. Collective.

        microbatches: this dp rank's part of the global batch, the same on its tp, cp and pp ranks; lr: for this step.
        """
        self.forward_backward(microbatches)
        with _naming("the norm of the gradient"):
            norm = self.reducer.clip(self.arguments.optimizer.clip_grad)
        self.optimizer.step(lr)
        loads = update_router_bias(self.routers, self.mesh, self.arguments.model.router_bias_update_rate)
        losses = self._reported(microbatches)
        return StepResult(losses, norm.item(), self._tokens(microbatches), loads)

    def forward_backward(self, microbatches: Sequence[MicroBatch]) -> None:
        """The gradient of the global batch's loss in every `main_grad`, summed over all replicas. Collective."""
        for stage in self.stages.values():
            stage.train()
        self.reducer.zero()
        for router in self.routers:
            router.load_e.zero_()
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
        return self._reported(microbatches), self._tokens(microbatches)

    def loss_names(self) -> list[str]:
        """The losses of this model, in the order they are reported."""
        names = ["lm", *(f"mtp_{depth}" for depth in range(1, self.config.num_mtp_layers + 1))]
        return names if self.config.aux_loss_kind == "none" else [*names, "aux"]

    def _reported(self, microbatches: Sequence[MicroBatch]) -> dict[str, float]:
        """Sum what the stages recorded over micro-batches and the world: one small message, the same on every rank."""
        names = self.loss_names()
        sums = torch.zeros(len(names), dtype=torch.float64, device=self.mesh.device)
        for batch in microbatches:
            for i, name in enumerate(names):
                if name in batch.losses:
                    sums[i] += batch.losses[name]
        all_reduce_(sums, self.mesh.world)
        return dict(zip(names, sums.tolist(), strict=True))

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
