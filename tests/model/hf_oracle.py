"""transformers' model of one of our configurations, with random weights, as the oracle for logits and gradients.

May import `model`; transformers where it is used only, since ranks that import a test module don't need it.
transformers 5.24: no MTP, no auxiliary loss, V2 ignores norm_topk_prob (compare with false); its grouped expert path
refuses odd sizes, so the oracle takes the eager one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from model.config import DeepSeekConfig, YarnScaling
from model.hf import global_shapes, hf_tensors, to_hf

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
    theirs._experts_implementation = theirs._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(theirs).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not name.endswith("inv_freq"):
                tensor.copy_(_random(name, tuple(tensor.shape), generator))
    return model


def random_weights(config: DeepSeekConfig, seed: int) -> dict[str, Tensor]:
    """Every tensor of the model, MTP layers included, whole and by global name."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _random(name, shape, generator) for name, shape in global_shapes(config).items()}


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=generator)
    if name.endswith("e_score_correction_bias"):
        return values * 0.1
    if name.endswith("norm.weight"):
        return 1 + values * 0.3
    return values * shape[-1] ** -0.5  # keeps activations near 1 through the layers, so that no gradient vanishes


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


def save_exported(weights: dict[str, Tensor], config: DeepSeekConfig, directory: Path) -> None:
    """Our whole tensors as one file of Hugging Face's names, with config.json."""
    tensors = {name: tensor.clone() for name, tensor in to_hf(weights.items(), config)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config.to_dict()))


class Oracle(nn.Module):
    """transformers' model and, where the configuration has MTP, its drafting layers, trained as the V3 report does."""

    def __init__(self, config: DeepSeekConfig, main: nn.Module, mtp: nn.Module | None = None) -> None:
        super().__init__()
        self.config, self.main, self.mtp = config, main, mtp

    @classmethod
    def from_directory(cls, config: DeepSeekConfig, directory: Path) -> Oracle:
        """Both parts as transformers loads them itself, so that the names of the MTP layers are tested as well."""
        import transformers
        from transformers.modeling_layers import MtpModel

        main = transformers.DeepseekV3ForCausalLM.from_pretrained(
            directory, dtype=torch.float32, experts_implementation="eager", attn_implementation="eager"
        )
        depths = range(config.num_hidden_layers, config.num_layers_with_mtp)
        main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{i}\." for i in depths]  # 61 for V3 only
        return cls(config, main, MtpModel.from_pretrained(main))

    def forward(self, sequences: Tensor) -> Iterator[Tensor]:
        """Logits of the main head [b, s, V], then of MTP depth k [b, s-k, V], from s+1 tokens a sequence.

        Depth k (2412.19437, eq. 21) sees token i+k at position i; positions that need tokens beyond the end are cut.
        """
        length = sequences.shape[1] - 1
        hidden = self.main.model(input_ids=sequences[:, :length], use_cache=False).last_hidden_state
        yield self.main.lm_head(hidden)
        for depth in range(1, self.config.num_mtp_layers + 1):
            seen = length - depth
            positions = torch.arange(seen).unsqueeze(0)
            tokens = sequences[:, depth : depth + seen]
            hidden = self.mtp.forward_layer(depth - 1, hidden[:, :seen], positions, None, input_ids=tokens)
            yield self.mtp.shared_head(hidden)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and router biases as transformers holds them, MTP layers under their numbers in a directory."""
        yield from _tensors(self.main)
        for name, tensor in _tensors(self.mtp) if self.mtp is not None else ():
            if name.startswith("layers."):
                _, depth, rest = name.split(".", 2)
                rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
                yield f"model.layers.{self.config.num_hidden_layers + int(depth)}.{rest}", tensor


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name.endswith("correction_bias"))


def logits_and_gradients(
    oracle: Oracle, sequences: Tensor, loss_mask: Tensor, mtp_loss_scaling_factor: float
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logits of each head, and by global name the gradient of the masked mean loss plus λ/D times that of the depths.

    sequences [b, s+1]; loss_mask [b, s] of the labels; at depth k all labels from i to i+k must count.
    """
    logits = list(oracle(sequences))
    loss = torch.zeros(())
    for depth, head_logits in enumerate(logits):
        seen = head_logits.shape[1]
        labels = sequences[:, depth + 1 : depth + 1 + seen]
        mask = torch.stack([loss_mask[:, step : step + seen] for step in range(depth + 1)]).prod(0)
        losses = torch.nn.functional.cross_entropy(head_logits.flatten(0, 1), labels.flatten(), reduction="none")
        share = mtp_loss_scaling_factor / (len(logits) - 1) if depth else 1.0
        loss = loss + share * (losses * mask.flatten()).sum() / mask.sum()
    loss.backward()
    # A buffer has no gradient; itself it stands in, so that every global name is accounted for.
    tensors = {name: t if t.grad is None else t.grad for name, t in oracle.named_tensors()}
    ours = under_global_names(tensors, oracle.config)
    return [x.detach() for x in logits], {name: g for name, g in ours.items() if not name.endswith("correction_bias")}
