"""How a parameter is split, said once by the layer that owns it; and initial values that don't depend on the split.

Lives here: the annotation `Sharding`, the block arithmetic, initialisation by global name. Imports `parallel.mesh`
only. Gradient reduction, norms, weight decay, checkpoints and Hugging Face conversion read the annotation; none guesses
from names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from parallel.mesh import Axis, Mesh

_INIT_CHUNK = 1 << 20
"""Elements drawn at a time, or one row of dimension 0 where that is longer: the transient memory of initialisation."""


@dataclass(frozen=True)
class Sharding:
    """How one parameter lies on the ranks of its pipeline stage.

    split_dim: the dimension that is cut into blocks over `axis` (None: every rank has the whole); full_size: that
    dimension before the cut. Blocks are ceil(full_size / ranks) long; what lies beyond full_size is padding, never
    saved.
    sequence_fed: every tp rank has the whole parameter but feeds it its own part of the sequence, so gradients sum
    over tp.
    expert: belongs to routed experts (not tensor-split; gradients sum over edp).
    pipeline_ranks: pipeline ranks that hold a copy, when there is more than one (embedding and head under MTP).
    role: what the parameter is where that matters for how its gradient may travel; "" for what is like any other.
    """

    split_dim: int | None = None
    axis: Literal["tp", "ep"] | None = None
    full_size: int | None = None
    sequence_fed: bool = False
    expert: bool = False
    pipeline_ranks: tuple[int, ...] = ()
    role: Literal["", "embedding", "router", "head"] = ""

    def axis_of(self, mesh: Mesh) -> Axis | None:
        """The axis the parameter is split over, None when it is whole."""
        return None if self.axis is None else getattr(mesh, self.axis)

    def gradient_axis(self, mesh: Mesh) -> Axis:
        """The axis over which its gradient is summed (copies on other pipeline stages come on top)."""
        if self.expert:
            return mesh.edp
        return mesh.stage if self.sequence_fed else mesh.dp_cp

    def owned(self, mesh: Mesh) -> bool:
        """True on exactly one of the ranks that hold the same values: who counts it in a norm."""
        if self.pipeline_ranks and mesh.pp.rank != self.pipeline_ranks[0]:
            return False
        # A whole parameter lies on every tp rank, also where its gradient needn't be summed over them.
        return (mesh.stage if self.split_dim is None else self.gradient_axis(mesh)).is_first

    def global_shape(self, local: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """The parameter's shape before it was cut, without padding."""
        shape = list(local)
        if self.split_dim is not None:
            assert self.full_size is not None
            shape[self.split_dim] = self.full_size
        return tuple(shape)

    def block_shape(self, whole: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
        """The reverse: the shape of every rank's block of a parameter of this global shape, padding included."""
        shape = list(whole)
        if self.split_dim is not None and (axis := self.axis_of(mesh)) is not None:
            shape[self.split_dim] = -(-shape[self.split_dim] // axis.size)
        return tuple(shape)


def sharding_of(parameter: torch.Tensor) -> Sharding:
    """The annotation of a parameter; raises AttributeError with advice when its layer forgot it."""
    sharding = getattr(parameter, "sharding", None)
    if not isinstance(sharding, Sharding):
        raise AttributeError(f"a parameter of shape {tuple(parameter.shape)} has no `sharding`: its layer must set one")
    return sharding


def shard_slice(full_size: int, ranks: int, rank: int) -> slice:
    """The valid part of block `rank` of a dimension: at most ceil(full_size / ranks) long, maybe empty."""
    block = -(-full_size // ranks)
    return slice(min(rank * block, full_size), min((rank + 1) * block, full_size))


def global_slice(sharding: Sharding, mesh: Mesh) -> slice:
    """The part of the split dimension that this rank holds, in global coordinates; everything when it isn't split."""
    axis = sharding.axis_of(mesh)
    if axis is None or sharding.full_size is None:
        return slice(None)
    return shard_slice(sharding.full_size, axis.size, axis.rank)


def valid_part(tensor: torch.Tensor, sharding: Sharding, mesh: Mesh) -> torch.Tensor:
    """A view of this rank's block without its padding rows."""
    if sharding.split_dim is None:
        return tensor
    part = global_slice(sharding, mesh)
    return tensor.narrow(sharding.split_dim, 0, part.stop - part.start)


def _chunk_generator(seed: int, name: str, chunk: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}/{chunk}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@torch.no_grad()
def init_normal_(parameter: torch.nn.Parameter, name: str, mesh: Mesh, seed: int, std: float) -> None:
    """Fill this rank's block with N(0, std²) that depends on `seed`, the global `name` and the global shape alone.

    The global tensor is drawn in chunks of whole rows of dimension 0, each with a generator of its own, so a rank draws
    only the chunks it needs and never holds the whole. Padding becomes zero. Drawn on the CPU, so every device agrees.
    """
    sharding = sharding_of(parameter)
    shape = sharding.global_shape(parameter.shape)
    split, part = sharding.split_dim, global_slice(sharding, mesh)
    local = valid_part(parameter, sharding, mesh)
    parameter.zero_()
    rows = max(1, _INIT_CHUNK // max(1, torch.Size(shape[1:]).numel()))
    first, last = (part.start, part.stop) if split == 0 else (0, shape[0])
    for chunk in range(first // rows, -(-last // rows)):
        start, stop = chunk * rows, min((chunk + 1) * rows, shape[0])
        values = torch.empty((stop - start, *shape[1:]))
        values.normal_(0.0, std, generator=_chunk_generator(seed, name, chunk))
        if split is not None and split > 0:
            values = values.narrow(split, part.start, part.stop - part.start)
        begin, end = max(start, first), min(stop, last)
        local[begin - first : end - first].copy_(values[begin - start : end - start])


def initialise(named_parameters: Iterable[tuple[str, torch.nn.Parameter]], mesh: Mesh, seed: int, std: float) -> None:
    """Matrices from N(0, std²) by global name; vectors (norm weights) one."""
    for name, parameter in named_parameters:
        if parameter.is_meta:
            continue
        if parameter.ndim == 1:
            torch.nn.init.ones_(parameter)
        else:
            init_normal_(parameter, name, mesh, seed, std)
