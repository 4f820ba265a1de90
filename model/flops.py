"""What a model weighs and costs: parameters, and floating-point operations of a training step for each token.

May import model.config and the standard library; free of torch, so that planning can use it. Counts follow the
DeepSeek-V2/V3 reports (arXiv 2405.04434, 2412.19437); one multiply-add is two operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from model.config import DeepSeekConfig


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of trainable parameters."""

    total: int
    """Embedding, layers, final norm and head: the number a model is named by (V3: 671 B)."""
    activated: int
    """Of `total`, those that one token is multiplied with: its chosen experts only, without the embedding's look-up."""
    mtp: int
    """Multi-token prediction, which `total` leaves out and which shares embedding and head."""


def parameter_count(config: DeepSeekConfig) -> ParameterCount:
    """Parameters of the whole model, before any splitting or padding; the router's bias isn't trained, nor counted."""
    table = config.vocab_size * config.hidden_size
    layers = range(config.num_hidden_layers)
    total = 2 * table + config.hidden_size + sum(_layer(config, layer, config.n_routed_experts) for layer in layers)
    activated = table + config.hidden_size + sum(_layer(config, layer, config.num_experts_per_tok) for layer in layers)
    mtp = 0
    for layer in _mtp_layers(config):
        # enorm, hnorm, shared_head.norm and eh_proj, then a whole block
        mtp += 3 * config.hidden_size + 2 * config.hidden_size**2 + _layer(config, layer, config.n_routed_experts)
    return ParameterCount(total, activated, mtp)


def flops_per_token(config: DeepSeekConfig, seq_length: int) -> float:
    """Model FLOPs of forward and backward for one token of a sequence of `seq_length`, multi-token prediction included.

    Three times the forward pass (the backward pass is two products for each one of the forward's); recomputation isn't
    counted, nor is the half of attention that the causal mask removes. V3 at 4096: 250.4 GFLOP, 260.6 with its MTP
    layer.
    """
    parts = forward_flops(config, seq_length)
    return 3 * (sum(layer.products + layer.attention for layer in (*parts.layers, *parts.last)))


class PartFlops(NamedTuple):
    """Forward FLOPs of one token: products with weights, whose gradient is a product too, and those of attention."""

    products: float
    attention: float


@dataclass(frozen=True)
class ForwardFlops:
    """Forward FLOPs of one token in each layer, and in what the last stage has besides: the head and MTP layers."""

    layers: tuple[PartFlops, ...]
    last: tuple[PartFlops, ...]


def forward_flops(config: DeepSeekConfig, seq_length: int) -> ForwardFlops:
    """Part by part, for one token of a sequence of `seq_length`. The embedding only looks up."""
    head = config.vocab_size * config.hidden_size
    # A token looks back at seq_length / 2 others on average: q·k over a head's key width, p·v over its value width.
    width = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    attention = 2 * width * seq_length / 2

    def block(layer: int, more: int = 0) -> PartFlops:
        return PartFlops(2.0 * (_matmul_parameters(config, layer) + more), attention)

    last = [PartFlops(2.0 * head, 0.0)]
    last += [block(layer, head + 2 * config.hidden_size**2) for layer in _mtp_layers(config)]
    return ForwardFlops(tuple(map(block, range(config.num_hidden_layers))), tuple(last))


def _mtp_layers(config: DeepSeekConfig) -> range:
    return range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers)


def _layer(config: DeepSeekConfig, layer: int, experts: int) -> int:
    """Parameters of one block with `experts` of its routed experts."""
    norms = 2 * config.hidden_size + config.kv_lora_rank + (config.q_lora_rank or 0)
    return norms + _attention(config) + _mlp(config, layer, experts)


def _matmul_parameters(config: DeepSeekConfig, layer: int) -> int:
    """Parameters of one block that a token is multiplied with; norms are left out."""
    return _attention(config) + _mlp(config, layer, config.num_experts_per_tok)


def _attention(config: DeepSeekConfig) -> int:
    """Matrices of multi-head latent attention, V2 report eq. 37-47."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    q_width = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    q = config.q_lora_rank * (hidden + q_width) if config.q_lora_rank else hidden * q_width
    kv_a = hidden * (config.kv_lora_rank + config.qk_rope_head_dim)
    kv_b = config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
    return q + kv_a + kv_b + heads * config.v_head_dim * hidden


def _mlp(config: DeepSeekConfig, layer: int, experts: int) -> int:
    """Gate, up and down of the dense MLP; or the router, `experts` routed experts and the shared ones."""
    if not config.is_moe_layer(layer):
        return 3 * config.hidden_size * config.intermediate_size
    width = config.moe_intermediate_size * (experts + config.n_shared_experts)
    return config.hidden_size * config.n_routed_experts + 3 * config.hidden_size * width
