"""Parameters and FLOPs against published numbers. Imports model.flops and model.config only."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from model.config import DeepSeekConfig
from model.flops import flops_per_token, parameter_count

MODELS = Path(__file__).parents[2] / "configs" / "models"


def published(name: str) -> DeepSeekConfig:
    return DeepSeekConfig.from_file(MODELS / f"{name}.json")


def test_flops_of_v3_agree_with_nvidias_published_rows() -> None:
    v3 = published("deepseek_v3")
    without_mtp = dataclasses.replace(v3, num_nextn_predict_layers=0)
    assert flops_per_token(without_mtp, 4096) == pytest.approx(250.4e9, rel=0.0005)
    assert flops_per_token(v3, 4096) == pytest.approx(260.6e9, rel=0.0005)
    for nvidia in (249.1e9, 249.7e9):
        assert flops_per_token(without_mtp, 4096) == pytest.approx(nvidia, rel=0.006)


def test_attention_grows_with_half_the_sequence() -> None:
    v3 = dataclasses.replace(published("deepseek_v3"), num_nextn_predict_layers=0)
    per_layer = 2 * 4096 * 128 * (192 + 128) / 2
    assert flops_per_token(v3, 8192) - flops_per_token(v3, 4096) == pytest.approx(3 * 61 * per_layer, rel=1e-12)


def test_v2_lite_has_exactly_its_published_parameters() -> None:
    count = parameter_count(published("deepseek_v2_lite"))
    assert count.total == 15_706_484_224
    assert count.mtp == 0


@pytest.mark.parametrize(
    ("name", "total", "activated"),
    [("deepseek_v2_lite", 15.7e9, 2.4e9), ("deepseek_v2", 236e9, 21e9), ("deepseek_v3", 671e9, 36.6e9)],
)
def test_totals_that_the_reports_name_the_models_by(name: str, total: float, activated: float) -> None:
    count = parameter_count(published(name))
    assert count.total == pytest.approx(total, rel=0.002)
    assert count.activated == pytest.approx(activated, rel=0.025)


def test_mtp_of_v3_is_one_block_and_its_projection() -> None:
    # 11.5 B by the model card
    assert parameter_count(published("deepseek_v3")).mtp == pytest.approx(11.5e9, rel=0.01)
