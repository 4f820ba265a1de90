"""ZeRO by DeepSpeed: what its engines are told of the mesh. (Replaced by branch zero1's at the merge.)

Lives here: groups. May import `parallel`.
"""

from __future__ import annotations

import torch.distributed as dist

from parallel.mesh import Axis


class Mpu:
    """What DeepSpeed asks of a model-parallel library, of two axes."""

    def __init__(self, shards: Axis, model: Axis):
        self.shards, self.model = shards, model
        self._shards, self._model = _group(shards), _group(model)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._shards

    def get_data_parallel_world_size(self) -> int:
        return self.shards.size

    def get_data_parallel_rank(self) -> int:
        return self.shards.rank

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._model

    def get_model_parallel_world_size(self) -> int:
        return self.model.size

    def get_model_parallel_rank(self) -> int:
        return self.model.rank

    def get_tensor_model_parallel_rank(self) -> int:
        return self.model.rank


def _group(axis: Axis) -> dist.ProcessGroup:
    return axis.group or dist.new_group(list(axis.ranks), use_local_synchronization=True)
