"""transformers' model of one of our configurations, with random weights, as the oracle for logits and gradients.

May import `model`; transformers where it is used only, since ranks that import a test module don't need it.
transformers 5.24: no MTP, no auxiliary loss, V2 ignores norm_topk_prob (compare with false); its grouped expert path
refuses odd sizes, so the oracle takes the eager one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model.config import DeepSeekConfig, YarnScaling
from model.hf import global_shapes, hf_tensors

YARN = YarnScaling(factor=4, original_max_position_embeddings=32, mscale=0.707, mscale_all_dim=0.707)


def tiny_config(model_type: str, **changes: Any) -> DeepSeekConfig:
    """Three layers, odd widths where tp 2 allows them; no MTP and no auxiliary loss, which transformers lacks.

    transformers' V2 rotates through complex views, so what lies before the rotated values must be even there.
    """
    v3 = model_type == "deepseek_v3"
    values: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": 203,
        "hidden_size": 72,
        "intermediate_size": 90,
        "moe_intermediate_size": 36,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "q_lora_rank": 25,
        "kv_lora_rank": 19 if v3 else 18,
        "qk_nope_head_dim": 11 if v3 else 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 13,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 4 if v3 else 1,
        "topk_group": 2 if v3 else 1,
        "topk_method": "noaux_tc" if v3 else "greedy",
        "scoring_func": "sigmoid" if v3 else "softmax",
        "norm_topk_prob": v3,
        "routed_scaling_factor": 2.5 if v3 else 1.0,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 128,
    }
    return DeepSeekConfig(**{**values, **changes})


def transformers_model(config: DeepSeekConfig, seed: int) -> nn.Module:
    """`DeepseekV3ForCausalLM` or `DeepseekV2ForCausalLM` in fp32, every tensor random: norms and router biases too."""
    import transformers

    family = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3"}[config.model_type]
    theirs = getattr(transformers, f"{family}Config")(**config.to_dict())
    theirs._experts_implementation = "eager"
    theirs._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(theirs).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
            elif tensor.ndim >= 2:  # keeps activations near 1 through the layers, so that no gradient vanishes
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5)
            elif name.endswith("norm.weight"):
                tensor.copy_(1 + torch.randn(tensor.shape, generator=generator) * 0.3)
    return model


def save(model: nn.Module, directory: Path, max_shard_size: str = "60KB") -> None:
    """As transformers writes it: config.json, several shards of safetensors, their index."""
    model.save_pretrained(directory, max_shard_size=max_shard_size)  # type: ignore[operator]


def under_global_names(tensors: dict[str, Tensor], config: DeepSeekConfig) -> dict[str, Tensor]:
    """transformers' in-memory tensors (experts already fused) as ours, whole, by global name."""
    ours = {}
    for name, shape in global_shapes(config).items():
        if f"model.{name}" in tensors:
            ours[name] = tensors[f"model.{name}"]
        else:
            pieces = hf_tensors(name, config)
            ours[name] = torch.stack([tensors[p.hf_name] for p in pieces]) if len(pieces) == 2 else tensors[name]
        assert tuple(ours[name].shape) == shape, name
    return ours


def logits_and_gradients(
    model: nn.Module, config: DeepSeekConfig, tokens: Tensor, labels: Tensor, loss_mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits [b, s, V], and the gradient by global name of the masked mean loss over all tokens [b, s]."""
    logits = model(input_ids=tokens, use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    ((losses * loss_mask.flatten()).sum() / loss_mask.sum()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    # A buffer has no gradient; it is listed so that every global name is accounted for.
    gradients.update({name: buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias")})
    ours = under_global_names(gradients, config)
    return logits.detach(), {name: g for name, g in ours.items() if not name.endswith("correction_bias")}
