"""ZeRO stage 1 is the native optimizer, cut over replicas: same bits, a share of the bytes, no second reduction.

Parameters of odd sizes: that cross the borders of partitions, larger than one, fewer values than ranks, and experts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from parallel.mesh import Layout, Mesh
from parallel.sharding import Sharding
from parallel.zero import ShardedOptimizer
from training.arguments import Arguments
from training.deepspeed_config import engine_config
from training.optimizer import Optimizer
from training.zero import inner_optimizer

RunRanks = Callable[..., list[Any]]
RANKS = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

ODD = {"matrix": (6, 5), "large": (301, 3), "vector": (5,), "one": (1, 1), "norm": (7,), "last": (3, 11)}
"""On four ranks a partition of the matrices has 242 values: `large` is in all four."""
FEW = {"matrix": (1, 1), "vector": (1,)}
EXPERTS = {"up": (2, 3, 5), "down": (2, 5, 3)}
WIDE = {"matrix": (48, 64), "vector": (128,), "last": (64, 16)}
SETS = {"odd": {**ODD, **EXPERTS}, "few": FEW, "wide": WIDE}
BOUNDS = {"odd": 1e-6, "few": 1e-6, "wide": 0.0}
"""Of the largest difference to the native optimizer. Kernels round otherwise in whole SIMD vectors than at ends, which
borders of partitions move; in "wide" there are no ends. DeepSpeedCPUAdam has an order of its own."""


@dataclass
class Found:
    """What one rank saw. off: the largest difference to the native optimizer, by what was compared."""

    off: dict[str, float] = field(default_factory=dict)
    operations: dict[str, set[int]] = field(default_factory=dict)
    """In a step, by name: how many values each tensor had that took part in such a collective."""
    state_values: list[dict[str, int]] = field(default_factory=list)
    """By engine: values on this rank of the masters ("params") and of each moment."""
    kinds: list[str] = field(default_factory=list)
    devices: set[str] = field(default_factory=set)
    resumed: float = 0.0


def parameters_of(shapes: dict[str, tuple[int, ...]], mesh: Mesh, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """The same on all replicas; every ep rank has its own experts."""
    made = {}
    for number, (name, shape) in enumerate(shapes.items()):
        expert = name in EXPERTS
        generator = torch.Generator().manual_seed(seed + 100 * number + (mesh.ep.rank if expert else 0))
        made[name] = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        made[name].sharding = Sharding(0, "ep", 2 * mesh.ep.size, expert=True) if expert else Sharding()
    return made


def give_gradients(parameters: list[dict[str, Any]], mesh: Mesh, seed: int) -> None:
    """As the reducer leaves them: fp32, equal on all replicas, here some of them too small for fp16."""
    for number, name in enumerate(parameters[0]):
        rank = mesh.ep.rank if name in EXPERTS else 0
        generator = torch.Generator().manual_seed(seed + 100 * number + rank)
        gradient = torch.randn(parameters[0][name].shape, generator=generator) * 10.0 ** -(number % 3 * 4)
        for one in parameters:
            one[name].main_grad = gradient.clone()


def difference(sharded: ShardedOptimizer, native: Optimizer) -> dict[str, float]:
    """The largest one of parameters, masters and each moment."""
    off: dict[str, float] = {}
    for name, parameter in sharded.parameters.items():
        pairs = {"parameter": (parameter, native.parameters[name]), "master": (sharded.read(name), native.read(name))}
        for moment in native.moments:
            pairs[moment] = sharded.read(name, moment), native.read(name, moment)
        for what, (found, wanted) in pairs.items():
            off[what] = max(off.get(what, 0.0), (found.double() - wanted.double()).abs().max().item())
    return off


def arguments_of(offload: str, optimizer: str) -> Arguments:
    return Arguments().replace(zero_stage=1, offload_optimizer=offload, optimizer=optimizer, weight_decay=0.3)


def sharded_of(parameters: dict[str, Any], mesh: Mesh, arguments: Arguments) -> ShardedOptimizer:
    return ShardedOptimizer(
        parameters.items(),
        mesh,
        engine_config(arguments),
        lambda groups: inner_optimizer(arguments, groups),
        arguments.optimizer.weight_decay,
    )


def collectives_of(profile: torch.profiler.profile) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for event in profile.events():
        if event.name.startswith("c10d::") and not event.name.startswith("c10d::barrier"):
            sizes = [torch.Size(shape).numel() for shape in event.input_shapes if shape]
            found.setdefault(event.name, set()).update(sizes)
    return found


def on_each_rank(dtype: str, offload: str, optimizer: str, sets: list[str], seed: int) -> dict[str, Found]:
    return {which: compare(dtype, offload, optimizer, which, seed) for which in sets}


def compare(dtype: str, offload: str, optimizer: str, which: str, seed: int) -> Found:
    """Three steps beside the native optimizer, then the state into a fresh one, then two more with all."""
    mesh = Mesh.create(Layout(ep=2))
    arguments = arguments_of(offload, optimizer)
    ours, theirs, fresh = (parameters_of(SETS[which], mesh, DTYPES[dtype], seed) for _ in range(3))
    native, sharded = Optimizer(theirs.items(), arguments.optimizer), sharded_of(ours, mesh, arguments)
    found = Found()
    assert sharded.moments == native.moments
    assert not any(found_off for found_off in difference(sharded, native).values()), "before the first step"
    for step in range(3):
        give_gradients([ours, theirs], mesh, seed + step)
        native.step(0.1 / (step + 1))
        if step == 1:
            with torch.profiler.profile(record_shapes=True) as profile:
                sharded.step(0.1 / (step + 1))
            found.operations = collectives_of(profile)
        else:
            sharded.step(0.1 / (step + 1))
    resumed = sharded_of(fresh, mesh, arguments)
    resumed.prepare(3)
    for name in ours:
        for moment in (None, *sharded.moments):
            resumed.write(name, sharded.read(name, moment), moment)
    resumed.written()
    for step in (3, 4):
        give_gradients([ours, theirs, fresh], mesh, seed + step)
        for each in (native, sharded, resumed):
            each.step(0.05)
    found.off = difference(sharded, native)
    found.resumed = max(difference(resumed, sharded).values())  # type: ignore[arg-type]
    for inner in sharded.inner:
        values: dict[str, int] = {}
        for partition in (partition for group in inner.param_groups for partition in group["params"]):
            state = {"params": partition, **{name: inner.state[partition][name] for name in sharded.moments}}
            for name, tensor in state.items():
                values[name] = values.get(name, 0) + tensor.numel()
                found.devices.add(f"{tensor.device.type} {tensor.dtype}")
        found.state_values.append(values)
        found.kinds.append(f"{type(inner).__module__.split('.')[0]} {type(inner).__name__}")
    return found


FAST = (("bf16", "none", "adamw"), ("fp32", "cpu", "adamw"))
CASES = [
    pytest.param(dtype, offload, optimizer, marks=() if (dtype, offload, optimizer) in FAST else pytest.mark.full)
    for dtype in DTYPES
    for offload in ("none", "cpu")
    for optimizer in ("adamw", "sgd")
]


@pytest.mark.parametrize(("dtype", "offload", "optimizer"), CASES)
def test_steps_are_those_of_the_native_optimizer(run_ranks: RunRanks, dtype: str, offload: str, optimizer: str) -> None:
    seed = int(torch.randint(1 << 30, ()))
    print(f"seed {seed}")
    host_adam = offload == "cpu" and optimizer == "adamw"
    kind = "deepspeed DeepSpeedCPUAdam" if host_adam else {"adamw": "training FusedAdamW"}.get(optimizer)
    rounding = {"fp32": 0.0, "bf16": 2.0**-6, "fp16": 2.0**-9}[dtype]  # of a master near the middle of two values
    # A fresh machine compiles cpu_adam first.
    sets = ["odd"] if host_adam else list(SETS)  # DeepSpeedCPUAdam asks for a second what the CPU can do
    for by_set in run_ranks(RANKS, on_each_rank, dtype, offload, optimizer, sets, seed, timeout=500.0):
        for which, found in by_set.items():
            bound = 1e-6 if host_adam else BOUNDS[which]
            assert max(off for what, off in found.off.items() if what != "parameter") <= bound, (which, found.off)
            assert found.off["parameter"] <= (bound + rounding if bound else 0.0), (which, found.off)
            assert found.resumed == 0.0, f"{which}: a resumed optimizer goes on bit for bit"
            assert set(found.kinds) == {kind or "training DecoupledSGD"}
            assert found.devices == {"cpu torch.float32"}
            # Parameters are gathered, gradients not reduced. Of offloaded ones DeepSpeed takes a norm: one value.
            gathered = {name for name in found.operations if "gather" in name}
            assert gathered
            others = [sizes for name, sizes in found.operations.items() if name not in gathered]
            assert set().union(*others) <= ({1} if offload == "cpu" else set()), (which, found.operations)
            assert_a_share(found.state_values, SETS[which])


def assert_a_share(state_values: list[dict[str, int]], shapes: dict[str, tuple[int, ...]]) -> None:
    """Of masters and moments each rank has full/replicas, but for alignment."""
    kinds = [[shape for name, shape in shapes.items() if (name in EXPERTS) == expert] for expert in (False, True)]
    for values, group, replicas in zip(state_values, kinds, (RANKS, RANKS // 2), strict=False):
        full = sum(torch.Size(shape).numel() for shape in group)
        padding = 8 * len(group) + 2 * 2 * replicas  # 16 bytes a parameter, two values a rank and group of decay
        for count in values.values():
            assert full <= count * replicas <= full + padding, (values, full)


def bytes_alive() -> int:
    """Of all tensors' memory in this process, shared memory once."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def bytes_on_each_rank(dtype: str, offload: str) -> tuple[int, int, int, int]:
    """What a stage 1 optimizer adds to parameters and main gradients, after three steps; parameters and values."""
    mesh = Mesh.create(Layout())
    arguments = arguments_of(offload, "adamw")
    shapes = {"large": (1000, 301), "matrix": (333, 101), "vector": (999,)}
    parameters = parameters_of(shapes, mesh, DTYPES[dtype], 0)
    give_gradients([parameters], mesh, 0)
    sharded_of(parameters_of(FEW, mesh, DTYPES[dtype], 0), mesh, arguments)  # DeepSpeed keeps the newest engine
    before = bytes_alive()
    sharded = sharded_of(parameters, mesh, arguments)
    for _ in range(3):
        sharded.step(0.1)
    values = sum(parameter.numel() for parameter in parameters.values())
    return bytes_alive() - before, values, mesh.ledger.bytes("dp_cp"), mesh.dp_cp.size


@pytest.mark.parametrize(
    ("dtype", "offload"),
    [("bf16", "none"), *(pytest.param(d, o, marks=pytest.mark.full) for d, o in (("fp32", "none"), ("bf16", "cpu")))],
)
def test_only_a_share_of_masters_and_moments_stays_in_memory(run_ranks: RunRanks, dtype: str, offload: str) -> None:
    size = DTYPES[dtype].itemsize
    for alive, values, sent, ranks in run_ranks(RANKS, bytes_on_each_rank, dtype, offload, timeout=500.0):
        # Offloaded, gradients and what is gathered are the host's too: a part each, and one parameter as a buffer.
        host = (4 + size) * values / ranks + 2 * size * 301_000 if offload == "cpu" else 0
        assert 12 * values / ranks <= alive <= 1.02 * (12 * values / ranks + host), (alive, values)
        assert sent == pytest.approx(3 * size * values * (ranks - 1) / ranks, rel=0.01)
