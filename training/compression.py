"""Compressed gradients in a run: from flags to options and kernels, and what is told and recorded of them.

May import `parallel` and `kernels`. Bytes are those that rank 0 sends of gradients, copies on other pipeline ranks
aside.
"""

from __future__ import annotations

from collections import Counter

import torch

from kernels import backend
from parallel.buckets import Bucket
from parallel.compression.low_rank import matrices
from parallel.compression.options import CompressionOptions
from parallel.gradients import Gradients
from parallel.sharding import sharding_of
from training.advice import Exchange
from training.arguments import CompressionArguments
from training.failures import ConfigurationError

_BLOCK_OPS = ("quantize", "dequantize", "decode_sum_encode")
_OPS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("bf16", "fp8", "int8", "int4"), _BLOCK_OPS),
    "1bit": ("sign_pack", "sign_unpack", "decode_sum_encode"),
    "topk": ("select_top", "scatter_sum"),
    "powersgd": (),
}
"""The ops of `kernels` that a codec runs on."""


def compression_options(flags: CompressionArguments) -> CompressionOptions | None:
    """The options that the flags ask for, with the options' defaults; None where nothing is compressed."""
    if flags.grad_compression == "none":
        return None
    asked = {
        "block_size": flags.grad_compression_block_size,
        "residual": flags.grad_compression_residual,
        "decay": flags.grad_compression_decay,
        "density": flags.grad_compression_density,
        "topk_transport": flags.grad_compression_topk_transport,
        "rank": flags.grad_compression_rank,
        "inner_size": flags.grad_compression_inner_size,
        "exclude": flags.grad_compression_exclude,
    }
    return CompressionOptions(flags.grad_compression, **{name: x for name, x in asked.items() if x is not None})  # type: ignore[arg-type]


def choose_kernels(options: CompressionOptions, device: torch.device) -> None:
    """Choose, and so log, the implementation of every op that these options run on.

    Raises ConfigurationError where --kernels forces one that can't serve an op here.
    """
    ops = _OPS[options.name]
    if options.inner_size > 1:
        ops += ("decode_sum",)
    if options.residual_dtype == "int8":
        ops += ("quantize", "dequantize")
    try:
        for op in dict.fromkeys(ops):
            backend.pick(op, device.type)
    except ValueError as error:
        raise ConfigurationError(f"--kernels (or the environment's {backend.VARIABLE}): {error}") from error


def what_is_compressed(reducer: Gradients) -> str | None:
    """One line: how many of this rank's gradients are compressed, how, and what travels in fp32 all the same."""
    if reducer.compression is None:
        return None
    options = reducer.compression.options
    compressed, exact = Counter[str](), Counter[str]()
    for bucket in reducer.buckets:
        for parameter in bucket.parameters:
            if why := _why_exact(options, parameter, bucket):
                exact[why] += 1
            else:
                compressed.update(parameters=1, values=parameter.numel())
    detail = {
        "topk": f", density {options.density:g} by {options.topk_transport}",
        "powersgd": f", rank {options.rank}",
        "bf16": "",
    }.get(options.name, f" in blocks of {options.block}")
    hops = f", in two hops with {options.inner_size} inner ranks" if options.inner_size > 1 else ""
    rest = ", ".join(f"{count} of {kind}" for kind, count in exact.items()) or "none"
    return (
        f"gradients of {compressed['parameters']} parameters, {4 * compressed['values'] / 2**20:.3g} MiB in fp32 on "
        f"this rank, travel as {options.name}{detail}{hops}, residual {options.residual_dtype}; in fp32 as ever: "
        f"{rest}"
    )


def _why_exact(options: CompressionOptions, parameter: torch.nn.Parameter, bucket: Bucket) -> str | None:
    """What it is that makes its gradient travel as it is; None where it is compressed."""
    if bucket.axis.size == 1:
        return "a single replica"
    if bucket.reduction is not None:
        too_small = options.name == "powersgd" and matrices(parameter.shape, options.rank) is None
        return f"a shape too small for rank {options.rank}" if too_small else None
    role = sharding_of(parameter).role
    return role if role in options.exclude else "vector"


def record_of(reducer: Gradients) -> dict[str, float]:
    """What the last step's reduction took on this rank, by the names of metrics.jsonl; {} where nothing is compressed.

    Bytes are those of all gradients, compressed or not. Seconds and error are of what was compressed, and 0 in warm-up.
    """
    if reducer.compression is None:
        return {}
    fp32 = sum(map(_fp32_bytes, reducer.buckets))
    statistics = reducer.compression_statistics()
    if statistics is None:
        names = ("grad_compression_error", "grad_encode_seconds", "grad_wire_seconds", "grad_decode_seconds")
        return {"grad_sent_bytes": fp32, "grad_compression_ratio": 1.0, **dict.fromkeys(names, 0.0)}
    exact = sum(_fp32_bytes(bucket) for bucket in reducer.buckets if bucket.reduction is None)
    sent = exact + statistics.bytes_sent
    return {
        "grad_sent_bytes": sent,
        "grad_compression_ratio": fp32 / sent,
        "grad_compression_error": statistics.error,
        "grad_encode_seconds": statistics.encode_seconds,
        "grad_wire_seconds": statistics.wire_seconds,
        "grad_decode_seconds": statistics.decode_seconds,
    }


def exchange_of(reducer: Gradients) -> Exchange | None:
    """The compressed part of the last step's reduction, as the watch takes it; None where it was all in fp32."""
    statistics = reducer.compression_statistics()
    if statistics is None:
        return None
    codec = statistics.encode_seconds + statistics.decode_seconds
    sent = statistics.bytes_sent
    return Exchange(sent, sent * statistics.ratio, statistics.wire_seconds, codec)


def _fp32_bytes(bucket: Bucket) -> int:
    """What an all-reduce of the bucket's gradients sends, padding aside."""
    values = sum(parameter.numel() for parameter in bucket.parameters)
    return round(2 * (bucket.axis.size - 1) / bucket.axis.size * 4 * values)
