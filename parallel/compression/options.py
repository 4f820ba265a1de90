"""What of gradient compression is chosen, as data.

Lives here: the options, and which parameters they cover. Imports `parallel.sharding` only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from parallel.sharding import sharding_of

CodecName = Literal["bf16", "fp8", "int8", "int4", "1bit", "topk", "powersgd"]
CODECS: tuple[CodecName, ...] = ("bf16", "fp8", "int8", "int4", "1bit", "topk", "powersgd")
ResidualName = Literal["none", "fp32", "bf16", "int8"]
TransportName = Literal["region", "gather"]
EXCLUDABLE = ("vector", "router", "embedding", "head")
_DEFAULT_BLOCK = {"1bit": 1024}


@dataclass(frozen=True)
class CompressionOptions:
    """How gradients are compressed where replicas sum them.

    name: the codec. block_size: values that share a scale; by default 256, for 1bit 1024. residual: numbers in which
    error feedback keeps what the code doesn't carry, or "none"; by default fp32, for bf16 none. decay: factor on the
    residual at every step. density: topk's share of values. topk_transport: each rank sums a region and sends on its
    largest ("region"), or everyone gets all entries ("gather"). rank: of powersgd's factors. inner_size: neighbours on
    the axis that reduce among themselves first (two hops). exclude: what is never compressed: "vector", or a role of
    `Sharding`. Raises ValueError for what doesn't exist or can't be.
    """

    name: CodecName
    block_size: int | None = None
    residual: ResidualName | None = None
    decay: float = 1.0
    density: float = 0.01
    topk_transport: TransportName = "region"
    rank: int = 8
    inner_size: int = 1
    exclude: tuple[str, ...] = ("vector", "router", "embedding")

    def __post_init__(self) -> None:
        if self.name not in CODECS:
            raise ValueError(f"gradient compression {self.name!r} is not known: choose among {', '.join(CODECS)}")
        if self.inner_size > 1 and self.name in ("topk", "powersgd"):
            raise ValueError(f"{self.name} has no second hop: inner size {self.inner_size} must be 1")
        for what, share in (("density", self.density), ("decay", self.decay)):
            if not 0 < share <= 1:
                raise ValueError(f"{what} {share} must be above 0 and at most 1")
        for what, count in (("rank", self.rank), ("inner size", self.inner_size)):
            if count < 1:
                raise ValueError(f"{what} {count} must be at least 1")
        words = (("residual", self.residual, ResidualName), ("topk transport", self.topk_transport, TransportName))
        for what, word, known in words:
            if word is not None and word not in get_args(known):
                raise ValueError(f"{what} {word!r} is not known: choose among {', '.join(get_args(known))}")
        if isinstance(self.exclude, str) or not set(self.exclude) <= set(EXCLUDABLE):
            raise ValueError(f"exclude {self.exclude!r}: it is a tuple of some of {', '.join(EXCLUDABLE)}")

    @property
    def block(self) -> int:
        return self.block_size or _DEFAULT_BLOCK.get(self.name, 256)

    @property
    def residual_dtype(self) -> ResidualName:
        """`residual`, its default spelt out."""
        return self.residual or ("none" if self.name == "bf16" else "fp32")

    def covers(self, parameter: torch.Tensor) -> bool:
        """Whether this parameter's gradient is compressed."""
        kinds = {"vector" if parameter.ndim < 2 else "", sharding_of(parameter).role}
        return not kinds & set(self.exclude)
