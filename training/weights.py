"""The model whole, in 16 bits, beside a checkpoint; and starting a run from such a directory or a published one.

Lives here: `weights/` of a step's directory. May import the rooms below. Names, shapes and files are those of Hugging
Face's directories (`model.hf`), so transformers loads what is written, and what it publishes can be started from.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from model.config import DeepSeekConfig
from model.hf import HFDirectory, global_shapes, parts_of_block
from parallel.comm import all_gather, gather_objects
from parallel.mesh import Mesh
from parallel.sharding import Sharding, sharding_of
from training.durable import fsync
from training.engine import Engine
from training.failures import ConfigurationError
from training.hf_files import CONFIG, FILE_BYTES, HFFiles, write_config, write_index

DIRECTORY = "weights"


def save(engine: Engine, directory: Path, file_bytes: int = FILE_BYTES) -> None:
    """Write the masters, rounded, to `directory`: safetensors, their index, config.json. Collective.

    bf16, or fp16 where the run has it; router biases stay fp32. A parameter that is cut over tp is put together on the
    tp ranks; experts stay where they are, since each is a tensor of its own in the files. All is on disk on return.
    """
    mesh, config = engine.mesh, engine.config
    dtype = torch.float16 if engine.dtype == torch.float16 else torch.bfloat16
    directory.mkdir(exist_ok=True)
    files = HFFiles(directory, f"model-rank{mesh.rank:05d}", file_bytes)
    for name, parameter in engine.optimizer.parameters.items():
        sharding = sharding_of(parameter)
        block = engine.optimizer.read(name).detach()  # on every rank: collective where replicas share it
        if sharding.owned(mesh):
            block = block.to(dtype)
            if sharding.split_dim is not None and not sharding.expert:
                block, sharding = _put_together(block, sharding, mesh), Sharding()
            if sharding.expert or mesh.tp.is_first:
                for part in parts_of_block(name, block, sharding, config, mesh):
                    files.add(part.hf_name, part.view)
        del block  # before the next is read
    if mesh.stage.is_first:
        for name, buffer in engine.named_buffers():
            for part in parts_of_block(name, buffer.detach().clone(), Sharding(), config, mesh):
                files.add(part.hf_name, part.view)
    files.flush()
    of_ranks = gather_objects((files.weight_map, files.total_bytes), mesh.world)
    if mesh.world.is_first:
        weight_map = {name: file for names, _ in of_ranks for name, file in names.items()}
        write_index(directory, weight_map, sum(size for _, size in of_ranks))
        write_config(directory, config, dtype)
        fsync(directory)


def load_weights(engine: Engine, directory: Path) -> None:
    """Fill masters, parameters and router biases from a directory of weights; moments become zero. Collective.

    Any layout, ZeRO stage and precision reads any directory, ours or Hugging Face's, FP8 included. Raises
    ConfigurationError on every rank, before anything changes: for another model, naming the fields that differ, and
    for missing, unknown or misshaped tensors, all at once.
    """
    mesh, optimizer, problem = engine.mesh, engine.optimizer, None
    try:
        config = DeepSeekConfig.from_file(directory / CONFIG)
        check_model(config, engine.config, directory)
        source = HFDirectory(directory, config)
    except (OSError, ValueError, ConfigurationError) as error:
        problem = str(error)
    if problems := [text for text in gather_objects(problem, mesh.world) if text is not None]:
        raise ConfigurationError(problems[0])
    optimizer.prepare(0)
    for name, parameter in optimizer.parameters.items():
        sharding = sharding_of(parameter)
        shape = sharding.block_shape(global_shapes(config)[name], mesh)
        block = torch.zeros(shape, device=mesh.device)  # padding stays zero
        source.fill(parts_of_block(name, block, sharding, config, mesh))
        optimizer.write(name, block)
    for name, buffer in engine.named_buffers():
        source.fill(parts_of_block(name, buffer, Sharding(), config, mesh))
    optimizer.written()


def check_model(saved: DeepSeekConfig, ours: DeepSeekConfig, path: Path) -> None:
    """Raises ConfigurationError with the fields that differ, those aside which change no tensor's meaning."""
    differences = [
        f"{field.name} {getattr(saved, field.name)!r} there, {getattr(ours, field.name)!r} here"
        for field in dataclasses.fields(DeepSeekConfig)
        if field.name not in ("extra", "aux_loss_alpha", "initializer_range")
        and getattr(saved, field.name) != getattr(ours, field.name)
    ]
    if differences:
        raise ConfigurationError(f"{path} is of another model: {'; '.join(differences)}")


def _put_together(block: torch.Tensor, sharding: Sharding, mesh: Mesh) -> torch.Tensor:
    """The whole parameter on every rank of the axis that it is cut over, without padding."""
    axis = sharding.axis_of(mesh)
    assert axis is not None and sharding.split_dim is not None
    rows = all_gather(block.movedim(sharding.split_dim, 0).contiguous(), axis)[: sharding.full_size]
    return rows.movedim(0, sharding.split_dim)
