"""Checkpoints that know no layout: saved by any mesh, loaded by any other, bit for bit.

Lives here: the one user of torch.distributed.checkpoint. May import the rooms below. Every tensor is stored under its
global name with its global shape (DTensor metadata made from the parameter's `sharding`); a checkpoint is a directory
`step_00000010/` that appears by one rename when everything in it is on disk.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from model.config import DeepSeekConfig
from parallel.comm import barrier, gather_objects
from parallel.mesh import Axis, Mesh
from parallel.sharding import Sharding, sharding_of, valid_part
from training import residuals
from training.engine import Engine
from training.failures import ConfigurationError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# torch.distributed.checkpoint and DTensor are imported where they are used: 1.5 s that the first step needn't wait for.

logger = logging.getLogger(__name__)

META = "meta.json"
FORMAT = 1
_NAME = re.compile(r"step_(\d{8,})")


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


def save(engine: Engine, directory: Path, position: Position, arguments_yaml: str) -> Path:
    """Write `directory`/step_… . Collective. An interrupted save leaves no step_ directory; an earlier one stays whole.

    Stored: fp32 masters, optimizer moments, router biases, the step and samples consumed, the model's configuration,
    the flags; where gradients are compressed, each rank's residuals (see `residuals`). Training draws no random numbers
    after initialisation, so no generator's state is needed to go on bit for bit.
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
        dcp.save(_state(engine), checkpoint_id=partial, no_dist=mesh.world_size == 1)
    if engine.reducer.compression is not None:
        residuals.save(engine.reducer, partial)
        barrier(mesh.world)  # all are on disk before the rename
    if mesh.world.is_first:
        meta = {
            "format": FORMAT,
            **dataclasses.asdict(position),
            "optimizer": engine.arguments.optimizer.optimizer,
            "global_batch_size": engine.arguments.training.global_batch_size,
            "layout": dataclasses.asdict(mesh.layout) | {"world_size": mesh.world_size},
            "torch": torch.__version__,
            "model": engine.config.to_dict(),
        }
        (partial / "config.yaml").write_text(arguments_yaml, encoding="utf-8")
        (partial / META).write_text(json.dumps(meta, indent=1), encoding="utf-8")
        for file in ("config.yaml", META, "."):
            _fsync(partial / file)
        replaced = directory / f".{final.name}.replaced"
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        _fsync(directory)
        shutil.rmtree(replaced, ignore_errors=True)
    barrier(mesh.world)
    return final


def load(engine: Engine, path: Path) -> Position:
    """Fill masters, parameters, moments and router biases from the checkpoint at `path`. Collective.

    Raises ConfigurationError, before anything changes, for a checkpoint of another model, optimizer or format.
    """
    meta = _read_meta(path)
    if gather_objects(meta, engine.mesh.world).count(meta) != engine.mesh.world_size:
        raise ConfigurationError(f"ranks read different checkpoints at {path}: is the directory shared by all hosts?")
    _check_model(DeepSeekConfig.from_dict(meta["model"]), engine.config, path)
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
    with _quiet():
        import torch.distributed.checkpoint as dcp

        dcp.load(_state(engine), checkpoint_id=path, no_dist=engine.mesh.world_size == 1)
    engine.optimizer.written()
    engine.steps_done = meta["step"]
    residuals.load(engine.reducer, path)
    return Position(meta["step"], meta["consumed_samples"])


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads((path / META).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} is no complete checkpoint: {error}") from error
    if meta.get("format") != FORMAT:
        raise ConfigurationError(f"{path} has checkpoint format {meta.get('format')}, this version reads {FORMAT}")
    return meta


def _check_model(saved: DeepSeekConfig, ours: DeepSeekConfig, path: Path) -> None:
    differences = [
        f"{field.name} {getattr(saved, field.name)!r} there, {getattr(ours, field.name)!r} here"
        for field in dataclasses.fields(DeepSeekConfig)
        if field.name not in ("extra", "aux_loss_alpha", "initializer_range")
        and getattr(saved, field.name) != getattr(ours, field.name)
    ]
    if differences:
        raise ConfigurationError(f"{path} is a checkpoint of another model: {'; '.join(differences)}")


def _state(engine: Engine) -> dict[str, torch.Tensor]:
    """Every tensor of the run under its global name; loading writes into these very tensors."""
    mesh = engine.mesh
    device_meshes: dict[str, DeviceMesh] = {}
    optimizer = engine.optimizer
    state: dict[str, torch.Tensor] = {}
    for name, parameter in optimizer.parameters.items():
        sharding = sharding_of(parameter)
        state[f"model.{name}"] = _global(optimizer.read(name).detach(), sharding, mesh, device_meshes)
        for moment in optimizer.moments:
            state[f"optimizer.{moment}.{name}"] = _global(optimizer.read(name, moment), sharding, mesh, device_meshes)
    for name, buffer in engine.named_buffers():
        state[f"model.{name}"] = buffer
    return state


def _global(local: torch.Tensor, sharding: Sharding, mesh: Mesh, device_meshes: dict[str, DeviceMesh]) -> torch.Tensor:
    """This rank's block as a part of the global tensor; a whole tensor as it is (one of its copies is stored)."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    axis: Axis | None = sharding.axis_of(mesh)
    if axis is None or axis.group is None:
        return local
    if axis.name not in device_meshes:
        device_meshes[axis.name] = DeviceMesh.from_group(axis.group, mesh.device.type)
    shape = torch.Size(sharding.global_shape(local.shape))
    assert sharding.split_dim is not None
    return DTensor.from_local(
        valid_part(local, sharding, mesh),
        device_meshes[axis.name],
        [Shard(sharding.split_dim)],
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _quiet(warnings.catch_warnings):
    """torch warns about its own deprecated internals on every save and load."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", module=r"torch\.")
