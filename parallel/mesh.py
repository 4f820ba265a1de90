"""Ranks on a grid, and the process groups that fall out of it.

Lives here: the arithmetic of layouts (pure, testable for thousands of ranks) and the groups built from it. Imports
nothing of this project but the ledger and the baton. Grid: `arange(world).view(pp, dp, cp, tp)`, tensor fastest, as
Megatron's; experts read the same ranks of a stage as `view(pp, edp, ep)` with `ep * edp = dp * cp * tp`.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from parallel.baton import Baton
from parallel.ledger import Ledger

Partition = list[list[int]]
"""The whole world cut into groups: every rank is in exactly one list."""


@dataclass(frozen=True)
class Layout:
    """How many ranks each kind of parallelism gets; data parallelism takes what is left.

    tp: tensor (and sequence) parallel size; pp: pipeline ranks; cp: context parallel size; ep: expert parallel size,
    taken from the ranks of one pipeline stage.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    def validate(self, world_size: int) -> None:
        """Raise ValueError, naming the numbers and a fix, when `world_size` ranks can't be laid out this way."""
        for name, size in (("tp", self.tp), ("pp", self.pp), ("cp", self.cp), ("ep", self.ep)):
            if size < 1:
                raise ValueError(f"{name} is {size}: every parallel size is at least 1")
        model = self.tp * self.pp * self.cp
        if world_size % model:
            raise ValueError(
                f"world size {world_size} is not divisible by tp {self.tp} x pp {self.pp} x cp {self.cp} = {model}: "
                f"start {max(1, world_size // model) * model} ranks or lower one of the three"
            )
        stage = world_size // self.pp
        if stage % self.ep:
            raise ValueError(
                f"ep {self.ep} does not divide the {stage} ranks of a pipeline stage "
                f"(world {world_size} / pp {self.pp}): choose ep among the divisors of {stage}"
            )

    def dp(self, world_size: int) -> int:
        """Data-parallel size that is left for `world_size` ranks."""
        self.validate(world_size)
        return world_size // (self.tp * self.pp * self.cp)

    def groups(self, world_size: int) -> dict[str, Partition]:
        """Every axis as a partition of `range(world_size)`; ranks inside a group are in axis order. Pure."""
        dp = self.dp(world_size)
        grid = torch.arange(world_size).view(self.pp, dp, self.cp, self.tp)
        experts = torch.arange(world_size).view(self.pp, -1, self.ep)

        def along(ordered: torch.Tensor, size: int) -> Partition:
            return ordered.reshape(-1, size).tolist()

        return {
            "world": along(grid, world_size),
            "tp": along(grid, self.tp),
            "cp": along(grid.movedim(2, -1), self.cp),
            "dp": along(grid.movedim(1, -1), dp),
            "pp": along(grid.movedim(0, -1), self.pp),
            "dp_cp": along(grid.permute(0, 3, 1, 2), dp * self.cp),
            "stage": along(grid, world_size // self.pp),
            "sequence": along(grid, self.cp * self.tp),
            "ep": along(experts, self.ep),
            "edp": along(experts.movedim(1, -1), experts.shape[1]),
        }


@dataclass(frozen=True)
class Axis:
    """One rank's view of one axis of the mesh.

    name: the axis; ranks: global ranks of this group in axis order; rank: this process's index among them; group: the
    process group, None where the group is this rank alone (collectives are then no-ops); ledger: where `comm` counts
    what is sent; baton: passed on before a wait, to what else this rank may compute meanwhile.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    ledger: Ledger = field(default_factory=Ledger, repr=False)
    baton: Baton = field(default_factory=Baton, repr=False)

    def __deepcopy__(self, _: Any) -> Axis:
        """Itself: a copy of a module, which holds axes, is on the same ranks."""
        return self

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


class Mesh:
    """All axes of one rank. Built once, then handed to whatever needs it; there is no global.

    Attributes are `Axis` objects: world, tp, pp, dp, cp; dp_cp (dense gradients), stage (every rank of this pipeline
    stage), sequence (tp and cp together: the ranks that share one sequence), ep and edp (experts and their gradients).
    `copies()` and `channel()` make more, for those who need them.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout: timedelta | None,
        group: dist.ProcessGroup | None = None,
    ):
        self.layout = layout
        self._world = group
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.ledger = Ledger()
        self.baton = Baton(device)
        self._timeout = timeout
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._copies: dict[tuple[int, ...], Axis] = {}
        self._channels: dict[tuple[str, bool], Axis] = {}
        self._own: dict[tuple[str, str, int], tuple[Axis, ...]] = {}
        self.shared: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        """What users of the same communicators must share to keep one order of messages; kept by those who use it."""
        partitions = layout.groups(world_size)
        self._columns = partitions["pp"]
        self.world = self._axis("world", partitions["world"])
        self.tp = self._axis("tp", partitions["tp"])
        self.cp = self._axis("cp", partitions["cp"])
        self.dp = self._axis("dp", partitions["dp"])
        self.pp = self._axis("pp", partitions["pp"])
        self.dp_cp = self._axis("dp_cp", partitions["dp_cp"])
        self.stage = self._axis("stage", partitions["stage"])
        self.sequence = self._axis("sequence", partitions["sequence"])
        # Rows travel while other collectives run: on a shared communicator they would queue behind each other.
        self.ep = self._axis("ep", partitions["ep"], shared=False)
        self.edp = self._axis("edp", partitions["edp"])

    @classmethod
    def create(
        cls,
        layout: Layout,
        device: torch.device | None = None,
        timeout: timedelta | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Mesh:
        """Build the groups of `layout` over all ranks, or those of a process group, whose ranks then count from 0.
        Collective: every one of these ranks calls it with the same layout.

        Without an initialised process group it is the mesh of one rank. Raises ValueError when the world can't be laid
        out.
        """
        ready = dist.is_initialized()
        world_size = dist.get_world_size(group) if ready else 1
        layout.validate(world_size)
        rank = dist.get_rank(group) if ready else 0
        return cls(layout, rank, world_size, device or torch.device("cpu"), timeout, group)

    def coordinates(self) -> dict[str, int]:
        """This rank's place on every axis that a person asks for: pp, dp, cp, tp, ep."""
        return {name: getattr(self, name).rank for name in ("pp", "dp", "cp", "tp", "ep")}

    def collective_axes(self) -> list[Axis]:
        """The axes on which collectives run, copies made so far included, in the same order on every rank."""
        named = [self.world, self.tp, self.cp, self.dp, self.dp_cp, self.stage, self.sequence, self.ep, self.edp]
        own = [axis for axes in self._own.values() for axis in axes]
        return [*named, self.pp, *self._copies.values(), *own]

    def sent_bytes(self) -> dict[str, int]:
        """What this rank has sent so far, by axis, the pipeline's channels as "pp". All ranks have the same axes."""
        sent = {axis.name: 0 for axis in self.collective_axes()}
        channels = {what for what, _ in self._channels}
        for (name, _), entry in self.ledger.entries.items():
            sent["pp" if name in channels else name] += entry.bytes
        return sent

    def copies(self, pipeline_ranks: tuple[int, ...]) -> Axis:
        """The ranks of this pipeline column that hold a copy of one parameter. Collective over the world; cached.

        A rank outside `pipeline_ranks` gets an axis of itself alone.
        """
        key = tuple(sorted(set(pipeline_ranks)))
        if key not in self._copies:
            partition: Partition = []
            for column in self._columns:
                partition.append([column[i] for i in key])
                partition.extend([rank] for i, rank in enumerate(column) if i not in key)
            self._copies[key] = self._axis("copies", partition, shared=False)
        return self._copies[key]

    def channel(self, what: Literal["activations", "gradients"], rising: bool) -> Axis:
        """The pipeline axis again, with a communicator of its own for messages of one kind to higher (or lower) ranks.

        On NCCL the operations of a pair on one communicator form a queue, in which a send may block until its receive
        is posted: messages that cross must not share one. Collective over the world; cached.
        """
        if (what, rising) not in self._channels:
            self._channels[what, rising] = self._axis(what, self._columns, shared=False)
        return self._channels[what, rising]

    def communicators(self, name: str, purpose: str, inner_size: int = 1) -> tuple[Axis, ...]:
        """The axis of this name once more, with a communicator of its own for one purpose. Collective; cached.

        inner_size above 1: cut in two, first the ranks of this rank's block of `inner_size` neighbours on the axis (of
        one node, say), then those with the same place in the other blocks. Where the axis is shorter, or a block would
        be all of it, it isn't cut. Raises ValueError where blocks don't fill the axis.
        """
        if (name, purpose, inner_size) not in self._own:
            partition = self.layout.groups(self.world_size)[name]
            size = len(partition[0])
            if inner_size > 1 and size > inner_size:
                if size % inner_size:
                    raise ValueError(f"blocks of {inner_size} don't fill the {size} ranks of {name}: choose a divisor")
                blocks = [torch.tensor(ranks).view(-1, inner_size) for ranks in partition]
                parts = [[row.tolist() for b in blocks for row in b], [row.tolist() for b in blocks for row in b.t()]]
            else:
                parts = [partition]
            self._own[name, purpose, inner_size] = tuple(self._axis(name, part, shared=False) for part in parts)
        return self._own[name, purpose, inner_size]

    def _axis(self, name: str, partition: Partition, shared: bool = True) -> Axis:
        """This rank's axis from a partition of the world; axes with the same ranks share a group unless told not to.

        Only members meet when a group is made (`use_local_synchronization`), so 2,048 ranks don't queue at one store.
        The group's name then depends on how many groups a rank has made before: each rank makes one for each axis,
        alone or not.
        """
        if all(len(ranks) == 1 for ranks in partition):
            return Axis(name, (self._global(self.rank),), 0, None, self.ledger, self.baton)
        ranks = next(tuple(ranks) for ranks in partition if self.rank in ranks)
        members = tuple(self._global(rank) for rank in ranks)
        key = tuple(rank for group in partition for rank in (len(group), *group))
        group = self._groups.get(key) if shared else None
        if group is None and len(ranks) == self.world_size and name == "world":
            group = self._world or dist.group.WORLD
        elif group is None:
            group = dist.new_group(
                list(members), timeout=self._timeout, use_local_synchronization=True, group_desc=f"{name}:{members[0]}"
            )
        if shared:
            self._groups[key] = group
        group = group if len(ranks) > 1 else None
        return Axis(name, members, ranks.index(self.rank), group, self.ledger, self.baton)

    def _global(self, rank: int) -> int:
        """A rank of this mesh among all of the job."""
        return rank if self._world is None else dist.get_global_rank(self._world, rank)
