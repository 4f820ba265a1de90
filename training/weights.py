"""The model whole, in 16 bits, beside a checkpoint; and starting a run from such a directory or a published one.

Lives here: `weights/` of a step's directory. May import the rooms below. Names, shapes and files are those of Hugging
Face's directories (`model.hf`), so transformers loads what is written, and what it publishes can be started from.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch

from model.config import DeepSeekConfig
from model.hf import HFDirectory, global_shapes, parts_of_block
from parallel.comm import all_gather, gather_objects
from parallel.mesh import Mesh
from parallel.sharding import Sharding, sharding_of
from training.durable import fsync, write_safetensors, write_text
from training.engine import Engine
from training.failures import ConfigurationError

DIRECTORY = "weights"
INDEX = "model.safetensors.index.json"
FILES = (INDEX, "model.safetensors")
"""One of them is in every directory of weights, the second where all is in one file."""
_CONFIG = "config.json"
_FILE_BYTES = 2 << 30
"""Of one file, and with one parameter what a rank holds of the model beyond its own part while it saves."""


def save(engine: Engine, directory: Path, file_bytes: int = _FILE_BYTES) -> None:
    """Write the masters, rounded, to `directory`: safetensors, their index, config.json. Collective.

    bf16, or fp16 where the run has it; router biases stay fp32. A parameter that is cut over tp is put together on the
    tp ranks; experts stay where they are, since each is a tensor of its own in the files. All is on disk on return.
    """
    mesh, config = engine.mesh, engine.config
    dtype = torch.float16 if engine.dtype == torch.float16 else torch.bfloat16
    directory.mkdir(exist_ok=True)
    files = _Files(directory, mesh.rank, file_bytes)
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
        index = {"metadata": {"total_size": sum(size for _, size in of_ranks)}, "weight_map": weight_map}
        write_text(directory / INDEX, json.dumps(index, indent=1, sort_keys=True))
        family = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3"}[config.model_type]
        described = {"architectures": [f"{family}ForCausalLM"]} | config.to_dict()
        described |= {"torch_dtype": str(dtype).removeprefix("torch.")}
        write_text(directory / _CONFIG, json.dumps(described, indent=1))
        fsync(directory)


def load_weights(engine: Engine, directory: Path) -> None:
    """Fill masters, parameters and router biases from a directory of weights; moments become zero. Collective.

    Any layout, ZeRO stage and precision reads any directory, ours or Hugging Face's, FP8 included. Raises
    ConfigurationError on every rank, before anything changes: for another model, naming the fields that differ, and
    for missing, unknown or misshaped tensors, all at once.
    """
    mesh, optimizer, problem = engine.mesh, engine.optimizer, None
    try:
        config = DeepSeekConfig.from_file(directory / _CONFIG)
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


class _Files:
    """One rank's safetensors: tensors are kept until a file is full."""

    def __init__(self, directory: Path, rank: int, file_bytes: int):
        self.directory, self.rank, self.file_bytes = directory, rank, file_bytes
        self.weight_map: dict[str, str] = {}
        self.total_bytes = 0
        self._kept: dict[str, torch.Tensor] = {}
        self._kept_bytes = self._written = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._kept and self._kept_bytes + tensor.nbytes > self.file_bytes:
            self.flush()
        self._kept[name] = tensor.cpu().contiguous()
        self._kept_bytes += tensor.nbytes

    def flush(self) -> None:
        if not self._kept:
            return
        self._written += 1
        path = self.directory / f"model-rank{self.rank:05d}-{self._written:05d}.safetensors"
        write_safetensors(path, self._kept, {"format": "pt"})
        self.weight_map.update(dict.fromkeys(self._kept, path.name))
        self.total_bytes += self._kept_bytes
        self._kept, self._kept_bytes = {}, 0
