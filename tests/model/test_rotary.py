"""Rotary embedding and YaRN against direct complex rotation, published numbers and transformers.

May import `model`. Source of the numbers: the published configurations and DeepSeek's inference code.
"""

from __future__ import annotations

import cmath
import dataclasses
import math
from pathlib import Path

import pytest
import torch

from kernels.latent_heads import rotate
from model.config import DeepSeekConfig, YarnScaling
from model.rotary import rotary_frequencies, rotation, yarn_range

MODELS = Path(__file__).parents[2] / "configs" / "models"


def load(name: str) -> DeepSeekConfig:
    return DeepSeekConfig.from_file(MODELS / f"{name}.json")


@pytest.mark.parametrize(
    "name, scale", [("deepseek_v3", 0.135234), ("deepseek_v2", 0.135234), ("deepseek_v2_lite", 0.114721)]
)
def test_yarn_numbers_of_the_released_models(name: str, scale: float) -> None:
    config = load(name)
    assert config.rope_scaling is not None
    assert yarn_range(config.rope_scaling, config.qk_rope_head_dim, config.rope_theta) == (10, 23)
    inv_freq, factor = rotary_frequencies(config)
    assert factor == 1.0
    assert config.softmax_scale == pytest.approx(scale, abs=5e-7)
    plain, _ = rotary_frequencies(dataclasses.replace(config, rope_scaling=None))
    assert torch.equal(inv_freq[:11], plain[:11])  # pairs up to `low` keep their frequency
    torch.testing.assert_close(inv_freq[23:], plain[23:] / 40, rtol=1e-6, atol=0)
    middle = 5 / 13  # pair 15 of the ramp from 10 to 23
    assert inv_freq[15].item() == pytest.approx(plain[15].item() * (middle / 40 + 1 - middle), rel=1e-6)


def test_frequencies_without_yarn_and_softmax_scale_of_plain_rope() -> None:
    config = load("tiny_v3")
    inv_freq, factor = rotary_frequencies(config)
    assert factor == 1.0 and inv_freq.dtype == torch.float32
    expected = [10000 ** (-2 * i / 16) for i in range(8)]
    torch.testing.assert_close(inv_freq, torch.tensor(expected), rtol=1e-6, atol=0)
    assert config.softmax_scale == pytest.approx(48**-0.5)


def test_attention_factor_scales_cos_and_sin_where_mscales_differ() -> None:
    yarn = YarnScaling(factor=40, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=0.0)
    _, factor = rotary_frequencies(dataclasses.replace(load("deepseek_v3"), rope_scaling=yarn))
    assert factor == pytest.approx(0.1 * math.log(40) + 1)
    turn = rotation(torch.tensor([[0, 7]]), torch.tensor([0.3]), factor).flatten()
    torch.testing.assert_close(turn.real, factor * torch.tensor([1.0, math.cos(2.1)]))
    torch.testing.assert_close(turn.imag, factor * torch.tensor([0.0, math.sin(2.1)]))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2**-8)])
def test_rotation_equals_complex_numbers_with_positions_of_each_sample(dtype: torch.dtype, tolerance: float) -> None:
    s, b, n, r = 5, 2, 3, 6
    x = torch.randn(s, b, n, r).to(dtype)
    positions = torch.tensor([[0, 1, 2, 0, 1], [3, 4, 0, 1, 2]])
    inv_freq = torch.tensor([1.0, 0.1, 0.01])
    out = rotate(x, rotation(positions, inv_freq, 1.5))
    assert out.dtype == dtype and out.shape == x.shape and out.is_contiguous()
    for t in range(s):
        for sample in range(b):
            for head in range(n):
                for i in range(3):
                    pair = complex(*x[t, sample, head, 2 * i : 2 * i + 2].tolist())
                    turned = 1.5 * pair * cmath.exp(1j * positions[sample, t].item() * inv_freq[i].item())
                    got = complex(*out[t, sample, head, 2 * i : 2 * i + 2].tolist())
                    assert abs(got - turned) <= tolerance * max(abs(turned), 1.0)


def test_scores_depend_on_the_distance_only() -> None:
    inv_freq, factor = rotary_frequencies(load("deepseek_v3"))
    q, k = torch.randn(2, 1, 1, 1, 64).unbind(0)

    def score(q_position: int, k_position: int) -> float:
        turned = [
            rotate(x, rotation(torch.tensor([[p]]), inv_freq, factor)) for x, p in ((q, q_position), (k, k_position))
        ]
        return (turned[0] * turned[1]).sum().item()

    assert score(100, 40) == pytest.approx(score(60, 0), abs=1e-3)
    assert score(100, 40) != pytest.approx(score(100, 41), abs=1e-3)


def test_gradient_turns_back() -> None:
    x = torch.randn(4, 2, 3, 8, dtype=torch.float32, requires_grad=True)
    turn = rotation(torch.randint(0, 99, (2, 4)), torch.rand(4), 1.0)
    grad = torch.randn(4, 2, 3, 8)
    rotate(x, turn).backward(grad)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, rotate(grad, turn.conj()))


def test_takes_a_slice_of_wider_heads_at_an_odd_offset() -> None:
    wide = torch.randn(3, 2, 2, 11)
    turn = rotation(torch.randint(0, 99, (2, 3)), torch.rand(3), 1.0)
    assert torch.equal(rotate(wide[..., 5:], turn), rotate(wide[..., 5:].clone(), turn))


@pytest.mark.parametrize("model_class", ["DeepseekV2", "DeepseekV3"])
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2_lite", "tiny_v3", "tiny_v2"])
def test_angles_equal_transformers_also_beyond_the_original_context(model_class: str, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = load(name)
    values = config.to_dict()
    values["model_type"] = {"DeepseekV2": "deepseek_v2", "DeepseekV3": "deepseek_v3"}[model_class]
    theirs = getattr(transformers, f"{model_class}Config")(**values)
    module = __import__(f"transformers.models.{theirs.model_type}.modeling_{theirs.model_type}", fromlist=["x"])
    last = config.max_position_embeddings - 1
    positions = torch.tensor([[0, 1, 17, 511, 513, 1025, last - 1, last]])
    reference = getattr(module, f"{model_class}RotaryEmbedding")(theirs)(torch.zeros(1), positions)
    inv_freq, factor = rotary_frequencies(config)
    turn = rotation(positions, inv_freq, factor)[:, 0, 0]
    if model_class == "DeepseekV3":
        half = config.qk_rope_head_dim // 2
        reference = torch.complex(reference[0][..., :half], reference[1][..., :half])
    torch.testing.assert_close(reference[0].real, turn.real, atol=1e-6, rtol=0)
    torch.testing.assert_close(reference[0].imag, turn.imag, atol=1e-6, rtol=0)


def test_one_token_behind_an_odd_latent_is_rotated_too() -> None:
    # Its view is contiguous and begins at an odd value, where complex numbers can't lie.
    wide = torch.randn(1, 1, 1, 11)
    turn = rotation(torch.tensor([[7]]), torch.rand(3), 1.0)
    assert torch.equal(rotate(wide[..., 5:], turn), rotate(wide[..., 5:].clone(), turn))
