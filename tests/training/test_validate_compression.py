"""What a codec can't be told is refused before any rank waits; what can't pay is warned of, with its numbers."""

from __future__ import annotations

import typing
from typing import Any

import pytest

from kernels.backend import BACKENDS, VARIABLE
from kernels.select_top import ENTRY_BYTES
from model.config import DeepSeekConfig
from parallel.compression.options import CODECS, EXCLUDABLE, CompressionOptions, ResidualName, TransportName
from tests.training.test_validate import arguments, config, errors  # noqa: F401 (fixtures)
from training.arguments import Arguments, CompressionArguments, GradCompression, Kernels
from training.command_line import from_yaml, parse, to_yaml
from training.compression import _OPS
from training.failures import ConfigurationError
from training.validate import validate
from training.validate_compression import (
    _DENSITY,
    _ENTRY_BYTES,
    _EXCLUDABLE,
    _NO_RESIDUAL,
    _USED,
    compression_warnings,
)

ONE_STAGE = {"pipeline_model_parallel_size": 1, "tensor_model_parallel_size": 1}


def asked(base: Arguments, codec: str, **flags: Any) -> Arguments:
    """`base` with --grad-compression CODEC and its parameters by their short names."""
    return base.replace(grad_compression=codec, **{f"grad_compression_{name}": x for name, x in flags.items()})


@pytest.mark.parametrize(
    ("codec", "flags"),
    [
        ("bf16", {"inner_size": 2, "residual": "bf16"}),
        ("fp8", {"block_size": 32, "exclude": ("vector", "head")}),
        ("int8", {"block_size": 4096, "warmup_steps": 5, "residual": "int8", "decay": 0.5}),
        ("int4", {"inner_size": 1, "exclude": ()}),
        ("1bit", {"block_size": 256, "inner_size": 2}),
        ("topk", {"density": 1.0, "topk_transport": "gather"}),
        ("powersgd", {"rank": 1, "residual": "none"}),
        ("none", {}),
    ],
)
def test_each_codec_takes_its_parameters(
    arguments: Arguments,  # noqa: F811
    config: DeepSeekConfig,  # noqa: F811
    codec: str,
    flags: dict[str, Any],
) -> None:
    validate(asked(arguments, codec, **flags), config, 8)


@pytest.mark.parametrize(
    ("codec", "flags", "parts"),
    [
        ("int8", {"block_size": 100}, ["--grad-compression-block-size 100", "power of two", "32 to 4096", "int8"]),
        ("int8", {"block_size": 8192}, ["block-size 8192", "32 to 4096"]),
        ("int8", {"block_size": 0}, ["block-size 0", "32 to 4096"]),
        ("1bit", {"block_size": 128}, ["block-size 128", "256 to 4096", "1bit"]),
        ("bf16", {"block_size": 256}, ["block-size 256 is for", "fp8, int8, int4, 1bit, not bf16"]),
        ("int8", {"density": 0.1}, ["density 0.1 is for --grad-compression topk, not int8", "leave it out"]),
        ("int8", {"topk_transport": "gather"}, ["topk-transport gather is for", "topk, not int8"]),
        ("int8", {"rank": 4}, ["rank 4 is for --grad-compression powersgd, not int8"]),
        ("topk", {"inner_size": 2}, ["inner-size 2 is for", "bf16, fp8, int8, int4, 1bit, not topk"]),
        ("powersgd", {"inner_size": 2}, ["inner-size 2 is for", "not powersgd"]),
        ("none", {"residual": "fp32"}, ["residual fp32 is for", "powersgd, not none"]),
        ("none", {"warmup_steps": 3}, ["warmup-steps 3 is for", "not none"]),
        ("none", {"exclude": ("vector",)}, ["exclude vector is for", "not none"]),
        ("int8", {"warmup_steps": -1}, ["warmup-steps -1", "not be negative"]),
        ("powersgd", {"rank": 0}, ["rank 0", "at least 1"]),
        ("topk", {"density": 0.0}, ["density 0.0", "above 0"]),
        ("topk", {"density": 1.5}, ["density 1.5", "at most 1"]),
        ("topk", {"density": float("nan")}, ["density nan", "finite"]),
        ("int4", {"decay": -0.5}, ["decay -0.5", "above 0"]),
        ("int4", {"decay": 1.01}, ["decay 1.01", "at most 1"]),
        ("int4", {"decay": 0.9, "residual": "none"}, ["decay needs a residual", "leave one of them out"]),
        ("bf16", {"decay": 0.9}, ["decay needs a residual and bf16 has none", "--grad-compression-residual"]),
        ("int4", {"exclude": ("vector", "norm")}, ["exclude norm: unknown", "vector router embedding head"]),
        ("int4", {"inner_size": 0}, ["inner-size 0", "at least 1"]),
        ("int4", {"inner_size": 4}, ["inner-size 4 doesn't divide the 2 ranks", "8 ranks / tensor 2 / pipeline 2"]),
    ],
)
def test_each_mistake_is_one_error_with_numbers_and_fix(
    arguments: Arguments,  # noqa: F811
    config: DeepSeekConfig,  # noqa: F811
    codec: str,
    flags: dict[str, Any],
    parts: list[str],
) -> None:
    found = errors(asked(arguments, codec, **flags), config)
    assert len(found) == 1, found
    assert not [part for part in parts if part not in found[0]], found[0]


def test_hops_fit_the_ranks_of_experts_too(arguments: Arguments, config: DeepSeekConfig) -> None:  # noqa: F811
    wide = arguments.replace(global_batch_size=24, tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
    asked_for = asked(wide, "int8", inner_size=4)
    validate(asked_for.replace(expert_model_parallel_size=8), config, 24)  # of 3 ranks: one hop
    validate(asked_for.replace(expert_model_parallel_size=2), config, 24)
    (error,) = errors(asked_for.replace(expert_model_parallel_size=4), config, 24)
    assert "inner-size 4 doesn't divide the 6 ranks that gradients of experts" in error
    assert "24 ranks of a stage / expert 4" in error and "use one of 1, 2, 3, 6" in error


def warned(codec: str, world_size: int = 8, **flags: Any) -> list[str]:
    return list(compression_warnings(asked(Arguments().replace(**ONE_STAGE), codec, **flags), world_size))


def test_what_can_not_help_is_warned_of() -> None:
    assert warned("int8", warmup_steps=99) == [] == warned("none", world_size=1)
    (never,) = warned("int8", warmup_steps=100)
    assert "int8 never begins" in never and "--grad-compression-warmup-steps 100 are all of --train-iters 100" in never
    (alone,) = warned("int8", world_size=1)
    assert "does nothing" in alone and "1 rank" in alone
    # Ranks that split the tensors still sum what they all have whole.
    two = Arguments().replace(tensor_model_parallel_size=2, grad_compression="int8")
    assert list(compression_warnings(two, 2)) == []


@pytest.mark.parametrize(
    ("transport", "density", "world_size", "parts"),
    [
        # (N−1) · 8 · density beside 2(N−1)/N · 4 and half of it.
        ("gather", 0.05, 8, None),
        ("gather", 0.0625, 8, ["sends 3.5 bytes", "7 in fp32 and 3.5 in bf16", "density 0.125", "below 0.0625 less"]),
        ("gather", 0.125, 8, ["sends 7 bytes", "8 ranks"]),
        ("gather", 0.01, 64, ["density 0.01 by gather over 64 ranks", "below density 0.0156"]),
        # 2(N−1)/N · 8 · density, whatever N.
        ("region", 0.24, 64, None),
        ("region", 0.25, 8, ["sends 3.5 bytes", "7 in fp32 and 3.5 in bf16", "density 0.5", "below 0.25 less"]),
        (None, 0.5, 2, ["by region over 2 ranks", "sends 4 bytes", "4 in fp32 and 2 in bf16"]),
        (None, None, 1000, None),
    ],
)
def test_top_k_beyond_break_even_is_warned_of_with_its_own_formula(
    transport: str | None, density: float | None, world_size: int, parts: list[str] | None
) -> None:
    told = warned("topk", world_size, topk_transport=transport, density=density)
    if parts is None:
        assert told == []
    else:
        (text,) = told
        assert not [part for part in parts if part not in text], text


def test_kernels_come_from_the_environment_unless_given() -> None:
    assert set(typing.get_args(Kernels)) == set(BACKENDS) and VARIABLE == "KERNELS"
    assert parse([], {"KERNELS": "torch"}).compression.kernels == "torch"
    assert parse(["--kernels", "native"], {"KERNELS": "torch"}).compression.kernels == "native"
    assert parse([], {}).compression.kernels is None
    with pytest.raises(ConfigurationError, match="KERNELS is 'tpu': set auto, torch"):
        parse([], {"KERNELS": "tpu"})


def test_what_flags_know_without_torch_is_what_the_options_say() -> None:
    assert set(typing.get_args(GradCompression)) == {"none", *CODECS} == set(_USED)
    assert set(_OPS) == set(CODECS) and _EXCLUDABLE == EXCLUDABLE
    assert _ENTRY_BYTES == ENTRY_BYTES and CompressionOptions("topk").density == _DENSITY
    without = {codec for codec in CODECS if CompressionOptions(codec).residual_dtype == "none"}
    assert without == set(_NO_RESIDUAL)
    for name, words in (("residual", ResidualName), ("topk_transport", TransportName)):
        of_flag, _ = typing.get_args(typing.get_type_hints(CompressionArguments)[f"grad_compression_{name}"])
        assert typing.get_args(of_flag) == typing.get_args(words)


def test_flags_of_compression_survive_the_command_line_and_yaml() -> None:
    words = ["--grad-compression", "1bit", "--grad-compression-exclude", "vector", "head"]
    found = parse([*words, "--grad-compression-block-size=512", "--grad-compression-warmup-steps", "7"], {})
    flags = found.compression
    assert (flags.grad_compression, flags.grad_compression_exclude) == ("1bit", ("vector", "head"))
    assert (flags.grad_compression_block_size, flags.grad_compression_warmup_steps) == (512, 7)
    assert from_yaml(to_yaml(found)) == found
    assert parse(["--grad-compression-exclude"], {}).compression.grad_compression_exclude == ()
    assert from_yaml("grad_compression_exclude: []\n").compression.grad_compression_exclude == ()
    for codec in typing.get_args(GradCompression):
        assert from_yaml(f"grad_compression: {codec}\n").compression.grad_compression == codec
