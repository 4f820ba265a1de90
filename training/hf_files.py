"""Writing a directory as Hugging Face has them: safetensors, file by file, their index, config.json.

Lives here: what a run's 16-bit weights and `tools/hf_checkpoint.py` share. May import `model`. Source: the index format
of safetensors; names and shapes are `model.hf`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from model.config import DeepSeekConfig
from training.durable import write_safetensors, write_text

INDEX = "model.safetensors.index.json"
FILES = (INDEX, "model.safetensors")
"""One of them is in every directory of weights, the second where all is in one file."""
CONFIG = "config.json"
FILE_BYTES = 2 << 30
"""Of one file, and with one parameter what who writes holds in memory."""


class HFFiles:
    """Files NAME-00001.safetensors, NAME-00002 … in `directory`: tensors are kept until a file is full.

    weight_map: of each tensor its file. Tensors that share memory must not overlap.
    """

    def __init__(self, directory: Path, name: str, file_bytes: int = FILE_BYTES):
        self.directory, self.name, self.file_bytes = directory, name, file_bytes
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
        path = self.directory / f"{self.name}-{self._written:05d}.safetensors"
        write_safetensors(path, self._kept, {"format": "pt"})
        self.weight_map.update(dict.fromkeys(self._kept, path.name))
        self.total_bytes += self._kept_bytes
        self._kept, self._kept_bytes = {}, 0

    def number(self) -> None:
        """Name all that were written as published directories do: NAME-00001-of-00007.safetensors."""
        names = {}
        for i in range(1, self._written + 1):
            old = f"{self.name}-{i:05d}.safetensors"
            names[old] = f"{self.name}-{i:05d}-of-{self._written:05d}.safetensors"
            (self.directory / old).rename(self.directory / names[old])
        self.weight_map = {tensor: names[file] for tensor, file in self.weight_map.items()}


def write_index(directory: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(weight_map)}
    write_text(directory / INDEX, json.dumps(index, indent=1, sort_keys=True))


def write_config(directory: Path, config: DeepSeekConfig, dtype: torch.dtype) -> None:
    """config.json, for weights of this dtype.

    Without auto_map, which names program files that aren't carried along: transformers and vLLM have their own.
    """
    family = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3"}[config.model_type]
    described = {"architectures": [f"{family}ForCausalLM"]} | config.to_dict()
    named = str(dtype).removeprefix("torch.")
    described |= {"torch_dtype": named, **({"dtype": named} if "dtype" in described else {})}  # transformers 5's name
    described.pop("auto_map", None)
    write_text(directory / CONFIG, json.dumps(described, indent=1))
