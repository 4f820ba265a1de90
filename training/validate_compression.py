"""Cross-checks of compressed gradients: what a codec can't be told is refused, what can't pay is warned of.

Free of torch, as `validate` is, which asks for these. Formulas: bytes that a rank sends of n
gradients summed over N ranks. fp32 all-reduce 2(N−1)/N · 4n; top-k by gather (N−1) · 8·density·n, by regions
2(N−1)/N · 8·density·n, an entry being an fp32 value and an int32 place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from training.arguments import Arguments, CompressionArguments
from training.validate_layout import divisors, flag_of

_EVERY_CODEC = ("residual", "decay", "exclude", "warmup_steps")
_HOPS = ("inner_size",)
_USED: dict[str, tuple[str, ...]] = {
    "none": (),
    "bf16": (*_EVERY_CODEC, *_HOPS),
    "fp8": (*_EVERY_CODEC, *_HOPS, "block_size"),
    "int8": (*_EVERY_CODEC, *_HOPS, "block_size"),
    "int4": (*_EVERY_CODEC, *_HOPS, "block_size"),
    "1bit": (*_EVERY_CODEC, *_HOPS, "block_size"),
    "topk": (*_EVERY_CODEC, "density", "topk_transport"),
    "powersgd": (*_EVERY_CODEC, "rank"),
}
"""Codec -> the parameters --grad-compression-… that it has."""
_PREFIX = "grad_compression_"
_NO_RESIDUAL = ("bf16",)
"""Codecs without error feedback unless it is asked for."""
_LEAST_BLOCK = {"1bit": 256}
_BLOCKS = (32, 4096)
_EXCLUDABLE = ("vector", "router", "embedding", "head")
_ENTRY_BYTES = 8
_DENSITY = 0.01


def compression_errors(arguments: Arguments, world_size: int) -> Iterator[str]:
    """Everything wrong with compressing gradients as `arguments` ask, on `world_size` ranks."""
    flags = arguments.compression
    yield from _check_use(flags)
    codec, block = flags.grad_compression, flags.grad_compression_block_size
    least, most = _LEAST_BLOCK.get(codec, _BLOCKS[0]), _BLOCKS[1]
    if block is not None and (block & (block - 1) or not least <= block <= most):
        yield f"--grad-compression-block-size {block} must be a power of two from {least} to {most} for {codec}"
    for name in ("density", "decay"):
        value = getattr(flags, _PREFIX + name)
        if value is not None and value > 1:
            yield f"{flag_of(_PREFIX + name)} {value} must be above 0 and at most 1"
    residual = flags.grad_compression_residual
    if flags.grad_compression_decay is not None and residual == "none":
        yield "--grad-compression-decay needs a residual and --grad-compression-residual is none: leave one of them out"
    if flags.grad_compression_decay is not None and residual is None and codec in _NO_RESIDUAL:
        yield (
            f"--grad-compression-decay needs a residual and {codec} has none by default: add "
            "--grad-compression-residual, or leave the decay out"
        )
    if unknown := [name for name in flags.grad_compression_exclude if name not in _EXCLUDABLE]:
        yield (
            f"--grad-compression-exclude {' '.join(unknown)}: unknown; there are, with spaces between them, "
            f"{' '.join(_EXCLUDABLE)}"
        )
    yield from _check_hops(arguments, world_size)


def compression_warnings(arguments: Arguments, world_size: int) -> Iterator[str]:
    """What works and is hardly meant: compression that never begins, has nobody to send to, or sends more than fp32."""
    flags, steps = arguments.compression, arguments.training.train_iters
    codec, warmup = flags.grad_compression, flags.grad_compression_warmup_steps
    if codec == "none":
        return
    if warmup >= steps:
        yield (
            f"--grad-compression {codec} never begins: --grad-compression-warmup-steps {warmup} are all of "
            f"--train-iters {steps}"
        )
    ranks = world_size // arguments.parallel.pipeline_model_parallel_size
    if ranks == 1:
        yield f"--grad-compression {codec} does nothing: there is 1 rank a stage, so no gradient is sent"
    elif codec == "topk" and (text := _beyond_break_even(flags, ranks)):
        yield text


def _check_use(flags: CompressionArguments) -> Iterator[str]:
    """A parameter that the codec hasn't would be a mistake about what runs."""
    codec = flags.grad_compression
    for field in dataclasses.fields(flags):
        name = field.name.removeprefix(_PREFIX)
        value = getattr(flags, field.name)
        if not field.name.startswith(_PREFIX) or value == field.default or name in _USED[codec]:
            continue
        has = [other for other, names in _USED.items() if name in names]
        text = " ".join(map(str, value)) if isinstance(value, tuple) else value
        yield (
            f"{flag_of(field.name)} {text} is for --grad-compression {', '.join(has)}, not {codec}: leave it out, or "
            "change the codec"
        )


def _check_hops(arguments: Arguments, world_size: int) -> Iterator[str]:
    """Groups of inner ranks have equal sizes on every axis that gradients are summed over."""
    parallel, inner = arguments.parallel, arguments.compression.grad_compression_inner_size
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp, ep = parallel.context_parallel_size, parallel.expert_model_parallel_size
    if inner is None or min(inner, tp, pp, cp, ep) < 1 or world_size % (tp * pp * cp) or world_size // pp % ep:
        return  # said already
    if "inner_size" not in _USED[arguments.compression.grad_compression]:
        return
    stage = world_size // pp
    if stage // tp % inner:
        yield (
            f"--grad-compression-inner-size {inner} doesn't divide the {stage // tp} ranks that gradients are summed "
            f"over ({world_size} ranks / tensor {tp} / pipeline {pp}): use a divisor of it, {divisors(stage // tp)}"
        )
    elif stage // ep > inner and stage // ep % inner:
        yield (
            f"--grad-compression-inner-size {inner} doesn't divide the {stage // ep} ranks that gradients of experts "
            f"are summed over ({stage} ranks of a stage / expert {ep}): use one of "
            f"{divisors(math.gcd(stage // tp, stage // ep))}"
        )


def _beyond_break_even(flags: CompressionArguments, ranks: int) -> str | None:
    """What top-k sends beside an all-reduce over so many ranks, where that is less; bytes of one gradient."""
    density = _DENSITY if flags.grad_compression_density is None else flags.grad_compression_density
    transport = flags.grad_compression_topk_transport or "region"
    both_ways = 2 * (ranks - 1) / ranks
    fp32, bf16 = 4 * both_ways, 2 * both_ways
    if transport == "gather":
        sent = (ranks - 1) * _ENTRY_BYTES * density
        even = {"fp32": 1 / ranks, "bf16": 0.5 / ranks}
    else:
        sent = both_ways * _ENTRY_BYTES * density
        even = {"fp32": 0.5, "bf16": 0.25}
    beaten = [name for name, bytes_sent in (("fp32", fp32), ("bf16", bf16)) if sent >= bytes_sent]
    if not beaten:
        return None
    return (
        f"--grad-compression topk at density {density:g} by {transport} over {ranks} ranks sends {sent:.3g} bytes a "
        f"gradient, an all-reduce {fp32:.3g} in fp32 and {bf16:.3g} in bf16: below density {even['fp32']:.3g} it sends "
        f"less than fp32, below {even['bf16']:.3g} less than bf16; lower --grad-compression-density, or leave "
        "--grad-compression out"
    )
