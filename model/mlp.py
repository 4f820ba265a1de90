"""SwiGLU feed-forward layers: tensor-parallel for dense blocks, whole on every tp rank for shared experts.

Lives here: two small modules. May import `kernels` and `parallel`. Source: 2002.05202.
"""

from __future__ import annotations

import torch
from torch import nn

from kernels.swiglu import swiglu
from parallel.comm import gather_sequence
from parallel.mesh import Mesh
from parallel.tensor import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear


class DenseMLP(nn.Module):
    """Intermediate size split over tp: [s/tp, b, h] -> [s/tp, b, h]; gathers x, reduce-scatters the output over tp."""

    def __init__(self, hidden: int, intermediate: int, mesh: Mesh):
        super().__init__()
        self.tp = mesh.tp
        self.gate_up_proj = ColumnParallelLinear(hidden, intermediate, mesh, stacked=2)
        self.down_proj = RowParallelLinear(intermediate, hidden, mesh)

    def forward(self, x_lbh: torch.Tensor) -> torch.Tensor:
        return self.down_proj(swiglu(self.gate_up_proj(gather_sequence(x_lbh, self.tp))))


class SharedExpert(nn.Module):
    """An expert that every token visits; like routed experts it isn't tensor-split and sees this rank's tokens only.

    Its two halves can be called apart, with something else between them.
    """

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_up_proj = ReplicatedLinear(hidden, intermediate, stacked=2)
        self.down_proj = ReplicatedLinear(intermediate, hidden)

    def forward(self, x_lbh: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x_lbh))

    def inner(self, x_lbh: torch.Tensor) -> torch.Tensor:
        """[s/tp, b, h] -> [s/tp, b, i]."""
        return swiglu(self.gate_up_proj(x_lbh))

    def outer(self, inner_lbi: torch.Tensor) -> torch.Tensor:
        """[s/tp, b, i] -> [s/tp, b, h]."""
        return self.down_proj(inner_lbi)
