"""Checkpoints that know no layout: saved by any mesh, loaded by any other, bit for bit.

Lives here: the one user of torch.distributed.checkpoint. May import the rooms below. Every tensor is stored under its
global name with its global shape (DTensor metadata made from the parameter's `sharding`); a checkpoint is a directory
`step_00000010/` that appears by one rename when everything in it is on disk.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from data.tokenizer import copy_tokenizer
from model.config import DeepSeekConfig
from model.hf import global_shapes
from parallel.comm import barrier, gather_objects
from parallel.mesh import Axis, Mesh
from parallel.sharding import Sharding, sharding_of, valid_part
from training import residuals, weights
from training.durable import fsync, write_text
from training.engine import Engine
from training.failures import ConfigurationError
from training.hf_files import FILES
from training.stored import StoredTensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# torch.distributed.checkpoint and DTensor are imported where they are used: 1.5 s that the first step needn't wait for.

logger = logging.getLogger(__name__)

META = "meta.json"
FORMAT = 1
TOKENIZER = "tokenizer"
"""Directory in a checkpoint: the tokenizer's files, and where it was imported, its config.json."""
_NAME = re.compile(r"step_(\d{8,})")
_CHUNK_BYTES = 256 << 20
"""What a rank holds at a time, beyond its own shards, while it loads state that replicas share."""


@dataclass(frozen=True)
class Position:
    """Where the run stands: optimizer steps done, and sequences consumed (which is the whole state of the data)."""

    step: int
    consumed_samples: int


def newest(directory: Path) -> Path | None:
    """The complete checkpoint of the highest step in `directory`, None where there is none."""
    found = [
        (int(match[1]), path)
        for path in (directory.iterdir() if directory.is_dir() else [])
        if (match := _NAME.fullmatch(path.name)) and (path / META).exists()
    ]
    return max(found)[1] if found else None


def find(directory: Path) -> Path | None:
    """The checkpoint that a directory is, or the newest of a run's or of its checkpoints; None where there is none."""
    if (directory / META).exists():
        return directory
    return newest(directory) or newest(directory / "checkpoints")


def find_weights(directory: Path) -> Path:
    """What `load_weights` takes: `directory` itself, where it holds safetensors; of the checkpoint that `find` finds
    the 16-bit weights, else itself. ConfigurationError where there is nothing."""
    step = find(directory)
    for place in (directory, *([] if step is None else [step / weights.DIRECTORY])):
        if any((place / name).exists() for name in FILES):
            return place
    if step is None:
        raise ConfigurationError(
            f"{directory} holds neither weights nor a complete checkpoint: give a run, a checkpoint, or a directory "
            f"with {' or '.join(FILES)}"
        )
    return step


def save(engine: Engine, directory: Path, position: Position, arguments_yaml: str) -> Path:
    """Write `directory`/step_… . Collective. An interrupted save leaves no step_ directory; an earlier one stays whole.

    Stored: fp32 masters, optimizer moments, router biases, the step and samples consumed, the model's configuration,
    the flags, the tokenizer; where gradients are compressed, each rank's residuals (see `residuals`); where asked for,
    the model in 16 bits (see `weights`). Training draws no random numbers after initialisation, so no generator's state
    is needed to go on bit for bit. What ZeRO shards over replicas is put together one parameter at a time, and kept on
    the host by one replica each: a rank holds about 1/shards of the whole beyond its own.
    """
    import torch.distributed.checkpoint as dcp

    mesh = engine.mesh
    final = directory / f"step_{position.step:08d}"
    partial = directory / f".{final.name}.partial"
    if mesh.world.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier(mesh.world)
    with _quiet():
        dcp.save(_to_write(engine), checkpoint_id=partial, no_dist=mesh.world_size == 1)
    if engine.reducer.compression is not None:
        residuals.save(engine.reducer, partial)
    if engine.arguments.checkpoint.save_16bit_weights:
        weights.save(engine, partial / weights.DIRECTORY)
    barrier(mesh.world)  # all is on disk before the rename
    if mesh.world.is_first:
        meta = {
            "format": FORMAT,
            **dataclasses.asdict(position),
            "optimizer": engine.arguments.optimizer.optimizer,
            "global_batch_size": engine.arguments.training.global_batch_size,
            "layout": dataclasses.asdict(mesh.layout) | {"world_size": mesh.world_size},
            "zero_stage": engine.arguments.zero.zero_stage or 0,
            "loss_scale": None if engine.loss_scale is None else engine.loss_scale.state(),
            "torch": torch.__version__,
            "model": engine.config.to_dict(),
        }
        write_text(partial / "config.yaml", arguments_yaml)
        if tokenizer := engine.arguments.data.tokenizer_model:
            _carry(tokenizer, partial / TOKENIZER)
        write_text(partial / META, json.dumps(meta, indent=1))
        fsync(partial)
        replaced = directory / f".{final.name}.replaced"
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        fsync(directory)
        shutil.rmtree(replaced, ignore_errors=True)
    barrier(mesh.world)
    return final


def load(engine: Engine, path: Path) -> Position:
    """Fill masters, parameters, moments and router biases from the checkpoint at `path`. Collective.

    Raises ConfigurationError, before anything changes, for a checkpoint of another model, optimizer or format, and for
    one that was imported and has weights alone.
    """
    meta = _agreed_meta(engine, path)
    if meta["optimizer"] is None:
        raise ConfigurationError(
            f"{path} holds weights alone, without an optimizer's state: start from it, at step 0, with "
            "--pretrained-checkpoint"
        )
    if meta["optimizer"] != engine.arguments.optimizer.optimizer:
        raise ConfigurationError(
            f"{path} was saved with --optimizer {meta['optimizer']}, this run has "
            f"--optimizer {engine.arguments.optimizer.optimizer}: use the same"
        )
    batch = engine.arguments.training.global_batch_size
    if meta["global_batch_size"] != batch:
        raise ConfigurationError(
            f"{path} was saved with --global-batch-size {meta['global_batch_size']}, this run has {batch}: the "
            f"schedule of the learning rate and the data would not fit together; use {meta['global_batch_size']}"
        )
    engine.optimizer.prepare(meta["step"])
    _fill(engine, path, engine.optimizer.moments)
    engine.optimizer.written()
    if engine.loss_scale is not None:
        if state := meta.get("loss_scale"):
            engine.loss_scale.load(state)
        else:
            logger.info("%s has no loss scale: it starts at %g", path, engine.loss_scale.value)
    engine.steps_done = meta["step"]
    residuals.load(engine.reducer, path)
    return Position(meta["step"], meta["consumed_samples"])


def load_weights(engine: Engine, directory: Path) -> None:
    """Fill masters, parameters and router biases from what `find_weights` found; moments become zero. Collective.

    Any layout, ZeRO stage and precision reads any directory. Raises ConfigurationError, before anything changes, for
    another model, a damaged directory and another format.
    """
    if not (directory / META).exists():
        weights.load_weights(engine, directory)
        return
    _agreed_meta(engine, directory)
    engine.optimizer.prepare(0)
    _fill(engine, directory, ())
    engine.optimizer.written()


def load_model(stage: nn.Module, path: Path, mesh: Mesh) -> None:
    """Fill the stage's parameters and router biases, in their dtype, from the checkpoint at `path`. Collective.

    Nothing of the optimizer is read, nor what the stage leaves out (multi-token prediction, say).
    """
    import torch.distributed.checkpoint as dcp

    device_meshes = _DeviceMeshes(mesh)
    state = {
        stored_key(name): device_meshes.as_part(parameter.detach(), sharding_of(parameter))
        for name, parameter in stage.named_parameters()
    }
    persistent = stage.state_dict(keep_vars=True).keys()
    state |= {stored_key(name): buffer for name, buffer in stage.named_buffers() if name in persistent}
    with _quiet():
        dcp.load(state, checkpoint_id=path, no_dist=mesh.world_size == 1)


def read_config(path: Path) -> DeepSeekConfig:
    """The model of the checkpoint at `path`, checked against the tensors in it, of which none is read.

    Raises ConfigurationError for what is no complete checkpoint, or whose tensors aren't those of its configuration.
    """
    config, stored = DeepSeekConfig.from_dict(read_meta(path)["model"]), StoredTensors(path).shapes
    wrong = []
    for name, shape in global_shapes(config).items():
        if (found := stored.get(stored_key(name))) is None:
            wrong.append(f"{name} is missing")
        elif found != shape:
            wrong.append(f"{name} is {list(found)}, its configuration makes it {list(shape)}")
    if wrong:
        raise ConfigurationError("\n  ".join([f"{path} doesn't hold the model of its configuration:", *wrong]))
    return config


def read_meta(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself; ConfigurationError where it is none, or of another format."""
    try:
        meta = json.loads((path / META).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} is no complete checkpoint: {error}") from error
    if meta.get("format") != FORMAT:
        raise ConfigurationError(f"{path} has checkpoint format {meta.get('format')}, this version reads {FORMAT}")
    return meta


def _agreed_meta(engine: Engine, path: Path) -> dict[str, Any]:
    """`read_meta`, the same on every rank and of the engine's model. Collective."""
    meta = read_meta(path)
    if gather_objects(meta, engine.mesh.world).count(meta) != engine.mesh.world_size:
        raise ConfigurationError(f"ranks read different checkpoints at {path}: is the directory shared by all hosts?")
    weights.check_model(DeepSeekConfig.from_dict(meta["model"]), engine.config, path)
    return meta


def _carry(tokenizer: str, directory: Path) -> None:
    """Keep the tokenizer beside the model. That its files are gone is no reason to lose a checkpoint."""
    directory.mkdir()
    try:
        for copy in copy_tokenizer(tokenizer, directory):
            fsync(copy)
        fsync(directory)
    except OSError as error:
        logger.warning("the checkpoint has no tokenizer: %s", error)


def stored_key(name: str, moment: str | None = None) -> str:
    """Under which a master, a router's bias or a moment is stored."""
    return f"model.{name}" if moment is None else f"optimizer.{moment}.{name}"


def _live(engine: Engine, moments: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """What this rank has itself, under global names: these very tensors are written, and filled when loading."""
    optimizer, device_meshes = engine.optimizer, _DeviceMeshes(engine.mesh)
    state = {stored_key(name): buffer for name, buffer in engine.named_buffers()}
    for name, parameter in optimizer.parameters.items():
        if optimizer.shards(name) is None:
            for moment in (None, *moments):
                value = optimizer.read(name, moment).detach()
                state[stored_key(name, moment)] = device_meshes.as_part(value, sharding_of(parameter))
    return state


def _to_write(engine: Engine) -> dict[str, torch.Tensor]:
    """`_live`, and of what replicas share the blocks dealt to this rank. Collective over each parameter's shards.

    A key may be absent elsewhere: torch.distributed.checkpoint writes what it finds, once.
    """
    optimizer, device_meshes = engine.optimizer, _DeviceMeshes(engine.mesh)
    state = _live(engine, optimizer.moments)
    dealt: dict[str, list[int]] = {}  # axis -> bytes that each of its ranks got, the same on all of them
    for name, parameter in optimizer.parameters.items():
        shards = optimizer.shards(name)
        if shards is None:
            continue
        for moment in (None, *optimizer.moments):
            value = optimizer.read(name, moment).detach()
            given = dealt.setdefault(shards.name, [0] * shards.size)
            keeper = given.index(min(given))
            given[keeper] += value.nbytes
            if keeper == shards.rank:
                state[stored_key(name, moment)] = device_meshes.as_part(value.cpu(), sharding_of(parameter))
            del value  # before the next is read
    return state


def _fill(engine: Engine, path: Path, moments: tuple[str, ...]) -> None:
    """The reverse of `_to_write`: shared state is read in chunks, whole, of which each rank takes its shard."""
    import torch.distributed.checkpoint as dcp

    mesh, optimizer, shapes = engine.mesh, engine.optimizer, global_shapes(engine.config)
    no_dist, device_meshes = mesh.world_size == 1, _DeviceMeshes(mesh)
    with _quiet():
        dcp.load(_live(engine, moments), checkpoint_id=path, no_dist=no_dist)
    chunks: list[list[tuple[str, str | None, tuple[int, ...]]]] = []
    room = 0
    for name, parameter in optimizer.parameters.items():
        if optimizer.shards(name) is None:
            continue
        shape = sharding_of(parameter).block_shape(shapes[name], mesh)
        for moment in (None, *moments):
            size = 4 * math.prod(shape)
            if size > room:
                chunks.append([])
                room = _CHUNK_BYTES
            chunks[-1].append((name, moment, shape))
            room -= size
    for i in range(max(gather_objects(len(chunks), mesh.world))):  # stages have other numbers of them
        wanted = chunks[i] if i < len(chunks) else []
        blocks = {(name, moment): torch.zeros(shape, device=mesh.device) for name, moment, shape in wanted}
        parts = {
            stored_key(name, moment): device_meshes.as_part(block, sharding_of(optimizer.parameters[name]))
            for (name, moment), block in blocks.items()
        }
        with _quiet():
            dcp.load(parts, checkpoint_id=path, no_dist=no_dist)
        for (name, moment), block in blocks.items():
            optimizer.write(name, block, moment)


class _DeviceMeshes:
    """torch's names for our axes, made when first asked for."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._made: dict[tuple[str, str], DeviceMesh] = {}

    def as_part(self, local: torch.Tensor, sharding: Sharding) -> torch.Tensor:
        """This rank's block as a part of the global tensor; a whole tensor as it is (one of its copies is stored)."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        axis: Axis | None = sharding.axis_of(self.mesh)
        if axis is None or axis.group is None:
            return local
        key = (axis.name, local.device.type)  # not the mesh's device: a block kept for writing is on the host
        if key not in self._made:
            self._made[key] = DeviceMesh.from_group(axis.group, local.device.type)
        shape = torch.Size(sharding.global_shape(local.shape))
        assert sharding.split_dim is not None
        return DTensor.from_local(
            valid_part(local, sharding, self.mesh),
            self._made[key],
            [Shard(sharding.split_dim)],
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )


class _quiet(warnings.catch_warnings):
    """torch warns about its own deprecated internals on every save and load."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", module=r"torch\.")
