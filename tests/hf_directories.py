"""Directories as Hugging Face has them, made up: random weights in shards with an index, config.json, a tokenizer.

Used by the tests of converting and of tokenizers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.config import DeepSeekConfig
from model.hf import global_shapes, to_hf

BOS, EOS, USER = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>"
"""As DeepSeek spells them: the first two are special, the third is an added token of a text."""


def random_tensors(config: DeepSeekConfig, seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Every tensor of a published directory, the MTP layers' copies included; router biases are fp32."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
        values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        if name.endswith("e_score_correction_bias"):
            return values
        return (1 + values if name.endswith("norm.weight") else values).to(dtype)

    whole = ((name, drawn(name, shape)) for name, shape in global_shapes(config).items())
    return {name: tensor.contiguous().clone() for name, tensor in to_hf(whole, config)}


def write_directory(
    directory: Path, config: DeepSeekConfig, tensors: dict[str, Tensor], shards: int = 3, **extra: Any
) -> None:
    """Safetensors in `shards` files, neighbours in different ones, and config.json with `extra` keys."""
    directory.mkdir(parents=True)
    weight_map = {
        name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(sorted(tensors))
    }
    for file in set(weight_map.values()):
        held = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_file(held, directory / file, {"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(config.to_dict() | extra))


def read_directory(directory: Path) -> dict[str, Tensor]:
    """All tensors, each from the file that the index names."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = {name: load_file(directory / name) for name in set(index["weight_map"].values())}
    assert sum(map(len, files.values())) == len(index["weight_map"])
    return {name: files[file][name] for name, file in index["weight_map"].items()}


def write_tokenizer(directory: Path, vocab_size: int = 300, **config: Any) -> None:
    """A byte-level BPE as DeepSeek's: tokenizer.json, tokenizer_config.json (with `config`); trained on this file."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    directory.mkdir(parents=True, exist_ok=True)
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    made.add_tokens([tokenizers.AddedToken(USER, special=False, normalized=False)])
    assert made.get_vocab_size() == vocab_size
    made.save(str(directory / "tokenizer.json"))
    if not config:
        config = {"bos_token": {"__type": "AddedToken", "content": BOS}, "eos_token": EOS, "add_bos_token": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
