"""What all contenders of train_step.py share: the model, its weights, the text, and how they are asked for a step.

May import `model`. A contender is `python -m benchmarks.contenders.NAME DIRECTORY`, one process a rank with torchrun's
variables set. It reads a step's number a line and answers with the step's seconds and loss, a JSON object a line.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from model.config import DeepSeekConfig
from model.hf import global_shapes, to_hf

# A small V3. Of its four groups of experts one is kept, so that Megatron's sum of the best k/kept scores of a group is
# V3's sum of the best two, as it is for the published model. No auxiliary loss: transformers has none.
CONFIG = DeepSeekConfig(
    model_type="deepseek_v3",
    vocab_size=512,
    hidden_size=256,
    intermediate_size=1024,
    moe_intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    q_lora_rank=64,
    kv_lora_rank=32,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=1,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    first_k_dense_replace=0,
    max_position_embeddings=256,
)
LENGTH, MICRO_BATCH, MICRO_BATCHES = 256, 2, 4
TOKENS = LENGTH * MICRO_BATCH * MICRO_BATCHES
"""Of one step, over all ranks."""

# AdamW on matrices with decay, on norms without; clipping at 1; the same in all contenders.
LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0


def write_weights(directory: Path, seed: int) -> None:
    """The model's random weights as a Hugging Face directory, from which every contender starts."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in global_shapes(CONFIG).items():
        if name.endswith("e_score_correction_bias"):
            tensors[name] = torch.zeros(shape)
        elif len(shape) == 1:
            tensors[name] = torch.ones(shape)
        else:
            tensors[name] = 0.02 * torch.randn(shape, generator=generator)
    exported = {name: tensor.clone() for name, tensor in to_hf(tensors.items(), CONFIG)}
    save_file(exported, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG.to_dict()))


Batches = list[tuple[torch.Tensor, torch.Tensor]]


def micro_batches(step: int, rank: int, ranks: int) -> Batches:
    """Tokens and labels [b, s] of each micro-batch of one of `ranks` data-parallel ranks. int64.

    Half of the tokens follow from the one before, so that there is something to learn.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (MICRO_BATCHES, MICRO_BATCH, LENGTH + 1)
    tokens = torch.randint(0, CONFIG.vocab_size, shape, generator=generator)
    follows = torch.rand(shape, generator=generator) < 0.5
    for i in range(1, LENGTH + 1):
        tokens[..., i] = torch.where(follows[..., i], (3 * tokens[..., i - 1] + 1) % CONFIG.vocab_size, tokens[..., i])
    return [(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in tokens[rank::ranks]]


def variable(name: str, default: int = 1) -> int:
    """A whole number from the environment: RANK, WORLD_SIZE, TP, PP, DP, EP."""
    return int(os.environ.get(name, default))


def serve(step: Callable[[Batches], float | None], rank: int = 0, ranks: int = 1) -> None:
    """Answer with the time and the loss of `step(micro-batches)` until the input ends; a rank without a loss: null.

    rank, ranks: data-parallel ones; each gets its micro-batches of the step, which are made before the clock starts.
    """
    # What libraries print goes to stderr: the answers have the pipe to themselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    gc.freeze()  # as this project's trainer does: collections then leave out what was made before the first step
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        batches = micro_batches(int(line), rank, ranks)
        started = time.perf_counter()
        loss = step(batches)
        print(json.dumps({"seconds": time.perf_counter() - started, "loss": loss}), file=answers)
