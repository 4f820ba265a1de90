"""A trained model alone: found in a directory, checked, and loaded on any layout without optimizer or gradients.

Lives here: from a run, a checkpoint or a Hugging Face directory to the stage of this rank. May import the rooms below.
Everything that can be wrong is found from headers, before ranks meet and before there is a tensor.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from data.tokenizer import Tokenizer, load_tokenizer
from model.config import DeepSeekConfig
from model.deepseek import DeepSeekStage
from model.hf import HFDirectory, global_shapes, parts_of_block
from model.options import ModelOptions
from parallel.launch import init_distributed
from parallel.mesh import Layout, Mesh
from parallel.pipeline.placement import as_ranges, balanced
from parallel.sharding import Sharding, sharding_of
from training import checkpoint, weights
from training.command_line import from_yaml
from training.failures import ConfigurationError
from training.hf_files import FILES
from training.inference_arguments import InferenceArguments
from training.pipeline import model_costs
from training.precision import DTYPES, check_device
from training.rng import check_agreement
from training.validate import read_model_config
from training.validate_layout import flag_of, layout_errors

_TOKENIZERS = ("tokenizer.json", "tokenizer.model")
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)


@dataclass(frozen=True)
class ModelSource:
    """Where a model lies. path: a step's directory, with fp32 masters, or one of safetensors; config: as it is there;
    tokenizer: beside it, or the one that its run was given, None where there is none."""

    path: Path
    is_checkpoint: bool
    config: DeepSeekConfig
    tokenizer: Path | None

    @classmethod
    def find(cls, directory: Path) -> ModelSource:
        """Of a run (its newest checkpoint), a directory of checkpoints, a step's, or a Hugging Face directory.

        Raises ConfigurationError where none is there, or what is there isn't whole.
        """
        if not directory.is_dir():
            raise ConfigurationError(f"--load {directory} is no directory: give a run's, a checkpoint's or a model's")
        step = checkpoint.find(directory)
        try:
            if step is not None:
                return cls(step, True, checkpoint.read_config(step), _tokenizer_of(directory, step))
            if any((directory / name).exists() for name in FILES):
                config = DeepSeekConfig.from_file(directory / "config.json")
                HFDirectory(directory, config)
                return cls(directory, False, config, _tokenizer_of(directory, directory))
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(f"--load {error}") from error
        raise ConfigurationError(
            f"--load {directory} holds no complete checkpoint and no safetensors: give a run's directory, one of its "
            f"checkpoints, or a directory with {' or '.join(FILES)}"
        )


def _tokenizer_of(given: Path, step: Path) -> Path | None:
    for place in (given, step, step / "tokenizer"):
        for name in _TOKENIZERS:
            if (place / name).is_file():
                return place / name
    try:
        told = from_yaml((step / "config.yaml").read_text(encoding="utf-8")).data.tokenizer_model
    except (OSError, ConfigurationError):  # no run's, or of another version: then the flag must say it
        return None
    return Path(told) if told and Path(told).is_file() else None


@dataclass(frozen=True)
class Model:
    """This rank's stage in eval mode, without multi-token prediction, and what it takes to use it."""

    config: DeepSeekConfig
    mesh: Mesh
    stage: DeepSeekStage
    dtype: torch.dtype


@dataclass(frozen=True)
class Request:
    """What was asked for, checked: the first half of loading, before ranks meet."""

    arguments: InferenceArguments
    source: ModelSource
    tokenizer: Tokenizer | None

    @classmethod
    def check(
        cls, arguments: InferenceArguments, seq_length: int = 0, micro_batch_size: int = 1, needs_tokenizer: bool = True
    ) -> Request:
        """Find the model and the tokenizer, and check both against each other and the layout against the ranks.

        seq_length: of a training forward; 0 where tokens come one at a time. Raises ConfigurationError.
        """
        source = ModelSource.find(Path(arguments.load))
        if arguments.model is not None:
            weights.check_model(source.config, read_model_config(arguments.as_run()), source.path)
        known = arguments.tokenizer_model or source.tokenizer
        tokenizer = _tokenizer(arguments, source) if needs_tokenizer or known else None
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        asked = arguments.as_run()
        sizes = {flag_of(name): getattr(asked.parallel, name) for name in _SIZES}
        errors = [f"{flag} {size} must be at least 1" for flag, size in sizes.items() if size < 1]
        if arguments.context_parallel_size > 1 and not seq_length:
            errors.append(
                f"--context-parallel-size {arguments.context_parallel_size} splits a sequence over ranks, and a step "
                "brings one token of each: use 1 (tensor, pipeline and expert parallelism work)"
            )
        if not errors:
            model_ranks = math.prod(list(sizes.values())[:3])
            asked = asked.replace(  # one micro-batch a replica
                seq_length=seq_length or arguments.tensor_model_parallel_size,
                micro_batch_size=micro_batch_size,
                global_batch_size=micro_batch_size * max(world_size // model_ranks, 1),
            )
            errors = list(layout_errors(asked, source.config, world_size))
        if errors:
            raise ConfigurationError(*errors)
        return cls(arguments, source, tokenizer)

    def load(self) -> Model:
        """Meet the other ranks and load this rank's part. Collective over the world."""
        arguments = self.arguments
        try:
            device = init_distributed(arguments.distributed_backend)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        check_agreement(arguments.as_run(), Mesh.create(Layout(), device).world)
        layout = Layout(
            tp=arguments.tensor_model_parallel_size,
            pp=arguments.pipeline_model_parallel_size,
            cp=arguments.context_parallel_size,
            ep=arguments.expert_model_parallel_size,
        )
        check_device(arguments.precision, device)
        return load_model(self.source, Mesh.create(layout, device), DTYPES[arguments.precision])


def load_model(source: ModelSource, mesh: Mesh, dtype: torch.dtype = torch.float32) -> Model:
    """This rank's part of the model, on the mesh's device: its parameters in `dtype`, and nothing else. Collective.

    Layers are balanced over the pipeline's ranks by what a token costs, multi-token prediction is left out. Router
    biases stay fp32. What isn't in `dtype` in the files is converted as it is read.
    """
    # Balance of experts is training's: its losses would add a message to each layer.
    config = dataclasses.replace(source.config, num_nextn_predict_layers=0, aux_loss_alpha=0.0)
    counts = balanced(model_costs(config, 1), tuple(range(mesh.pp.size)))
    layers = as_ranges(counts)[mesh.pp.rank]
    with torch.device("meta"):
        stage = DeepSeekStage(config, mesh, layers, mesh.pp.is_first, mesh.pp.is_last, ModelOptions())
    _give_memory(stage.eval(), mesh.device, dtype)
    if source.is_checkpoint:
        checkpoint.load_model(stage, source.path, mesh)
    else:
        files = HFDirectory(source.path, source.config)
        shapes = global_shapes(config)
        held = [*stage.named_parameters(), *((name, x) for name, x in stage.named_buffers() if name in shapes)]
        files.fill(
            part
            for name, tensor in held
            for part in parts_of_block(
                name, tensor.detach(), getattr(tensor, "sharding", Sharding()), source.config, mesh
            )
        )
    return Model(config, mesh, stage, dtype)


def _give_memory(stage: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Zeros for every parameter, in `dtype`, and buffer that was built on the meta device; no gradients."""
    for module in stage.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            zeros = nn.Parameter(torch.zeros(parameter.shape, dtype=dtype, device=device), requires_grad=False)
            zeros.sharding = sharding_of(parameter)  # type: ignore[attr-defined]
            setattr(module, name, zeros)
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, name, torch.zeros_like(buffer, device=device))


def _tokenizer(arguments: InferenceArguments, source: ModelSource) -> Tokenizer:
    path = arguments.tokenizer_model or source.tokenizer
    if path is None:
        raise ConfigurationError(
            f"--tokenizer-model is missing: neither is there one beside {source.path} ({', '.join(_TOKENIZERS)}) nor "
            "does its run name one that is still there"
        )
    try:
        return load_tokenizer(path, source.config.vocab_size)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--{error}") from error
