"""SwiGLU feed-forward layers: tensor-parallel for dense blocks, whole on every tp rank for shared experts.

Lives here: two small modules. May import `kernels` and `parallel`. Source: 2002.05202.
Shapes: l = s/(cp·tp) this rank's part of the sequence, b batch, h hidden, i inner width.
"""

from __future__ import annotations

import torch
from torch import nn

from kernels.swiglu import swiglu
from parallel.comm import gather_sequence
from parallel.mesh import Mesh
from parallel.recompute import discard
from parallel.tensor import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear


class DenseMLP(nn.Module):
    """Intermediate size split over tp: [l, b, h] -> [l, b, h]; gathers x, reduce-scatters the output over tp.

    discard_inner: the activation's output isn't kept but computed again in backward.
    """

    def __init__(self, hidden: int, intermediate: int, mesh: Mesh, discard_inner: bool = False):
        super().__init__()
        self.tp, self.discard_inner = mesh.tp, discard_inner
        self.gate_up_proj = ColumnParallelLinear(hidden, intermediate, mesh, stacked=2)
        self.down_proj = RowParallelLinear(intermediate, hidden, mesh)

    def forward(self, x_lbh: torch.Tensor) -> torch.Tensor:
        return _activate(self.gate_up_proj(gather_sequence(x_lbh, self.tp)), self.down_proj, self.discard_inner)


class SharedExpert(nn.Module):
    """An expert that every token visits; like routed experts it isn't tensor-split and sees this rank's tokens only.

    Its two halves can be called apart, with something else between them. discard_inner: as in `DenseMLP`.
    """

    def __init__(self, hidden: int, intermediate: int, discard_inner: bool = False):
        super().__init__()
        self.discard_inner = discard_inner
        self.gate_up_proj = ReplicatedLinear(hidden, intermediate, stacked=2)
        self.down_proj = ReplicatedLinear(intermediate, hidden)

    def forward(self, x_lbh: torch.Tensor) -> torch.Tensor:
        return self.second_half(self.first_half(x_lbh))

    def first_half(self, x_lbh: torch.Tensor) -> torch.Tensor:
        """Gate and up: [l, b, h] -> [l, b, 2i]."""
        return self.gate_up_proj(x_lbh)

    def second_half(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[l, b, 2i] -> [l, b, h]."""
        return _activate(gate_up, self.down_proj, self.discard_inner)


def _activate(gate_up: torch.Tensor, down_proj: nn.Module, discard_inner: bool) -> torch.Tensor:
    inner = swiglu(gate_up)
    output = down_proj(inner)
    if discard_inner:
        discard([inner], lambda: [swiglu(gate_up)], consumed=output)
    return output
