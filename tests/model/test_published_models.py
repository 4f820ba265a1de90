"""The published models at their full size: built without memory, on one rank and as every rank of a cluster has them.

The real modules are built on the meta device, where tensors have shapes only. A rank of thousands is this process under
torch's `fake` backend, which makes groups without anyone to meet.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from model.config import DeepSeekConfig
from model.deepseek import DeepSeekStage, build_stages
from model.flops import parameter_count
from model.hf import global_shapes
from model.options import ModelOptions
from parallel.mesh import Layout, Mesh
from parallel.sharding import Sharding, global_slice, sharding_of, valid_part
from training.arguments import Arguments
from training.pipeline import layers_of_stages

MODELS = Path(__file__).parents[2] / "configs" / "models"
META = torch.device("meta")
V3_LAYOUT, V3_WORLD = Layout(pp=16, ep=64), 2048
"""How DeepSeek-V3 was trained (2412.19437, section 3.2)."""


def published(name: str) -> DeepSeekConfig:
    return DeepSeekConfig.from_file(MODELS / f"{name}.json")


@contextmanager
def rank_of(layout: Layout, world: int, rank: int) -> Iterator[Mesh]:
    """The mesh of one rank among `world`, on the meta device."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield Mesh.create(layout, META)
    finally:
        dist.destroy_process_group()


@dataclass
class Held:
    """What ranks hold of one parameter. pieces: (start, stop) on the split dimension -> how many ranks have it."""

    shape: tuple[int, ...]
    sharding: Sharding
    pieces: Counter[tuple[int, int]] = field(default_factory=Counter)
    owned: int = 0
    """Elements for which a rank says that it counts them in the norm, so that each is counted once."""


def shards(config: DeepSeekConfig, layout: Layout, world: int, ranks: Iterable[int]) -> dict[str, Held]:
    """Every parameter that `ranks` hold, by global name, from the modules that each of them builds."""
    placement = tuple(range(layout.pp))
    flags = Arguments().replace(pipeline_model_parallel_size=layout.pp)
    layer_counts = layers_of_stages(flags, config, placement)
    found: dict[str, Held] = {}
    gc.freeze()  # else half of the time goes into collections that look through what imports have made
    for rank in ranks:
        with rank_of(layout, world, rank) as mesh:
            for stage in build_stages(config, mesh, placement, ModelOptions(), 0, layer_counts).values():
                for name, parameter in stage.named_parameters():
                    add_shard(found, name, parameter, mesh)
    gc.unfreeze()
    return found


def add_shard(found: dict[str, Held], name: str, parameter: torch.nn.Parameter, mesh: Mesh) -> None:
    """Asserts that this rank's block has the size that its annotation promises, and counts it."""
    sharding = sharding_of(parameter)
    shape = sharding.global_shape(parameter.shape)
    held = found.setdefault(name, Held(shape, sharding))
    assert (held.shape, held.sharding) == (shape, sharding), f"{name} isn't the same on all ranks"
    split, part, valid = sharding.split_dim, slice(0, shape[0]), valid_part(parameter, sharding, mesh)
    if split is not None:
        axis = sharding.axis_of(mesh)
        assert axis is not None and parameter.shape[split] == -(-shape[split] // axis.size), name
        part = global_slice(sharding, mesh)
    assert valid.shape[split or 0] == part.stop - part.start, name
    held.pieces[part.start, part.stop] += 1
    held.owned += valid.numel() if sharding.owned(mesh) else 0


def assert_whole(found: dict[str, Held], layout: Layout, world: int, stages: int) -> None:
    """Pieces tile every parameter without gap or overlap, each on as many ranks as the layout has replicas of it."""
    stage = world // layout.pp
    for name, held in found.items():
        split = held.sharding.split_dim
        cuts = [0] + [stop for start, stop in sorted(held.pieces) if stop > start]
        assert [start for start, stop in sorted(held.pieces) if stop > start] == cuts[:-1], name
        assert cuts[-1] == held.shape[split or 0], name
        blocks = 1 if split is None else {"tp": layout.tp, "ep": layout.ep}[str(held.sharding.axis)]
        copies = max(1, min(stages, len(held.sharding.pipeline_ranks)))
        assert set(held.pieces.values()) == {stage // blocks * copies}, name
        assert sum(held.pieces.values()) == stage * copies, name
        assert held.owned == torch.Size(held.shape).numel(), name


def elements(found: dict[str, Held]) -> int:
    return sum(torch.Size(held.shape).numel() for held in found.values())


def parameters_of(config: DeepSeekConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of everything that is trained, as Hugging Face's files have it."""
    return {name: shape for name, shape in global_shapes(config).items() if not name.endswith("correction_bias")}


def whole_model(name: str) -> DeepSeekStage:
    return build_stages(published(name), Mesh.create(Layout(), META), (0,), ModelOptions(), seed=0)[0]


@pytest.mark.parametrize(
    ("name", "total"),
    [("deepseek_v2_lite", 15_706_484_224), ("deepseek_v2", 235_741_434_880), ("deepseek_v3", 671_026_419_200)],
)
def test_modules_have_exactly_the_published_number_of_parameters(name: str, total: int) -> None:
    """Published totals count the router's biases, which aren't trained, and leave multi-token prediction out."""
    config, stage = published(name), whole_model(name)
    mtp = tuple(f"layers.{layer}." for layer in range(config.num_hidden_layers, config.num_layers_with_mtp))
    sizes = {path: weight.numel() for path, weight in stage.named_parameters()}
    biases = {path: bias.numel() for path, bias in stage.named_buffers() if path.endswith("correction_bias")}
    of_main = sum(size for path, size in sizes.items() if not path.startswith(mtp))
    assert of_main + sum(size for path, size in biases.items() if not path.startswith(mtp)) == total
    count = parameter_count(config)
    assert (of_main, sum(sizes.values()) - of_main) == (count.total, count.mtp)
    assert {path: tuple(weight.shape) for path, weight in stage.named_parameters()} == parameters_of(config)


def test_ranks_of_v3s_first_and_last_stage_hold_their_layers_once() -> None:
    """With embedding and multi-token prediction; all stages are in the next test."""
    config, stage = published("deepseek_v3"), V3_WORLD // V3_LAYOUT.pp
    found = shards(config, V3_LAYOUT, V3_WORLD, [*range(stage), *range(V3_WORLD - stage, V3_WORLD)])
    assert_whole(found, V3_LAYOUT, V3_WORLD, stages=2)
    whole = parameters_of(config)
    assert {name: held.shape for name, held in found.items()} == {name: whole[name] for name in found}
    assert {"embed_tokens.weight", "layers.0.mlp.gate_up_proj.weight", "layers.61.eh_proj.weight"} <= found.keys()


@pytest.mark.full
def test_shards_of_all_2048_ranks_add_up_to_v3() -> None:
    config, started = published("deepseek_v3"), time.process_time()
    found = shards(config, V3_LAYOUT, V3_WORLD, range(V3_WORLD))
    assert_whole(found, V3_LAYOUT, V3_WORLD, stages=V3_LAYOUT.pp)
    assert {name: held.shape for name, held in found.items()} == parameters_of(config)
    assert elements(found) == parameter_count(config).total + parameter_count(config).mtp == 682_636_472_320
    assert time.process_time() - started < 120  # of this process, whatever else the machine does


@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2, ep=4), Layout(tp=4, pp=3, ep=2)], ids=str)
def test_shards_of_split_matrices_add_up(layout: Layout) -> None:
    """A vocabulary that tp doesn't divide, beside experts that span tensor-parallel ranks."""
    config, world = dataclasses.replace(published("tiny_v3"), vocab_size=1023), layout.pp * 8
    found = shards(config, layout, world, range(world))
    assert_whole(found, layout, world, stages=layout.pp)
    assert {name: held.shape for name, held in found.items()} == parameters_of(config)


def test_a_shard_that_is_missing_or_doubled_is_noticed() -> None:
    config, layout = published("tiny_v3"), Layout(pp=2, ep=4)
    for ranks in ([0, 1, 2, 4, 5, 6, 7], [0, 1, 2, 3, 3, 4, 5, 6, 7], [*range(7), 6]):
        with pytest.raises(AssertionError):
            assert_whole(shards(config, layout, 8, ranks), layout, 8, stages=2)
