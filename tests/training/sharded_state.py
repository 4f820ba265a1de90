"""Optimizer state that replicas share, without DeepSpeed: what checkpoints and weights are tested with in little time.

Used by test_checkpoint_zero.py and test_weights.py; runs on the ranks of a pool.
"""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from parallel.comm import all_gather
from parallel.mesh import Axis, Mesh
from parallel.sharding import sharding_of
from training.update import OptimizerState


class SharedState:
    """An `OptimizerState` that keeps of each block of another one's, flattened, only this replica's part.

    live_bytes: at most, of tensors that `read` gave out and somebody still holds, when it was asked for another.
    """

    def __init__(self, whole: OptimizerState, mesh: Mesh):
        self.parameters, self.moments, self.mesh = whole.parameters, whole.moments, mesh
        self.steps, self.live_bytes = 0, 0
        self._given: list[tuple[StorageWeakRef, int]] = []
        self._shapes = {name: whole.read(name).shape for name in self.parameters}
        self._parts: dict[tuple[str, str | None], torch.Tensor] = {}
        for name in self.parameters:
            for moment in (None, *self.moments):
                self.write(name, whole.read(name, moment).detach(), moment)

    @property
    def own_bytes(self) -> int:
        return sum(part.nbytes for part in self._parts.values())

    @property
    def largest_bytes(self) -> int:
        return max(4 * shape.numel() for shape in self._shapes.values())

    def shards(self, name: str) -> Axis | None:
        return self.mesh.edp if sharding_of(self.parameters[name]).expert else self.mesh.dp_cp

    def read(self, name: str, moment: str | None = None) -> torch.Tensor:
        axis, shape = self.shards(name), self._shapes[name]
        assert axis is not None
        value = all_gather(self._parts[name, moment], axis).clone()[: shape.numel()].view(shape)
        self._given.append((StorageWeakRef(value.untyped_storage()), value.nbytes))
        self._given = [(given, size) for given, size in self._given if not given.expired()]
        self.live_bytes = max(self.live_bytes, sum(size for _, size in self._given))
        return value

    def write(self, name: str, value: torch.Tensor, moment: str | None = None) -> None:
        axis = self.shards(name)
        assert axis is not None and value.shape == self._shapes[name]
        size = -(-value.numel() // axis.size)
        padded = torch.nn.functional.pad(value.reshape(-1), (0, axis.size * size - value.numel()))
        self._parts[name, moment] = padded[axis.rank * size :][:size].clone()

    def prepare(self, steps: int) -> None:
        self.steps = steps
        for (_, moment), part in self._parts.items():
            if moment is not None:
                part.zero_()

    @torch.no_grad()
    def written(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(self.read(name))
