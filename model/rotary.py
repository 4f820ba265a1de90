"""Rotary position embedding over interleaved pairs (2i, 2i+1), with YaRN's stretched frequencies.

May import torch and `model.config`.
Source: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071) in the form of DeepSeek's inference code.

Shapes: s sequence, b batch, n heads, r rotated width (qk_rope_head_dim), h = r/2 pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model.config import DeepSeekConfig, YarnScaling


def rotary_frequencies(config: DeepSeekConfig) -> tuple[Tensor, float]:
    """Angles per position, and what cos and sin are multiplied by.

    Returns `inv_freq_h` fp32 [r/2] in radians a token, on the CPU, and the attention factor (1 without YaRN and for
    all released models). With YaRN, pair i gets nᵢrᵢ + eᵢ(1−rᵢ), where eᵢ = θ^(−2i/r), nᵢ = eᵢ/factor and rᵢ ramps
    from 0 at the last pair that keeps its frequency to 1 at the first that is interpolated.
    """
    width = config.qk_rope_head_dim
    # The fp32 steps, in this order, are the reference's: positions near the context's end amplify a last-bit change.
    period_h = config.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width)
    plain_h = 1.0 / period_h
    yarn = config.rope_scaling
    if yarn is None:
        return plain_h, 1.0
    low, high = yarn_range(yarn, width, config.rope_theta)
    ramp_h = ((torch.arange(width // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    keep_h = 1 - ramp_h
    return 1.0 / (yarn.factor * period_h) * (1 - keep_h) + plain_h * keep_h, yarn.attention_factor


def yarn_range(yarn: YarnScaling, width: int, theta: float) -> tuple[float, float]:
    """Pairs `low` and `high` between which YaRN's ramp climbs: 10 and 23 for all released models.

    The pair that turns `rot` times in the original context is r·ln(length / (rot·2π)) / (2·ln θ).
    """

    def pair(rotations: float) -> float:
        length = yarn.original_max_position_embeddings
        return width * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair(yarn.beta_fast)), 0)
    high = min(math.ceil(pair(yarn.beta_slow)), width - 1)
    return low, high if high != low else high + 0.001  # a step instead of a ramp, as in the reference


def rotation(positions_bs: Tensor, inv_freq: Tensor, factor: float) -> Tensor:
    """factor · e^(iφ) of every position's angles φ: complex64 [s, b, 1, r/2], for `kernels.latent_heads`.

    `positions_bs` is int64 [b, s] and may differ from sample to sample (documents that restart at 0);
    `inv_freq` is fp32 [r/2]. Angles are computed in fp32, like the reference's.
    """
    angles_sb1h = (positions_bs.t().unsqueeze(-1).float() * inv_freq.to(positions_bs.device)).unsqueeze(2)
    return torch.complex(angles_sb1h.cos() * factor, angles_sb1h.sin() * factor)
