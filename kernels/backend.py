"""Which implementation of an op runs: torch's reference, a C function, a Triton kernel or CUDA C++.

Lives here: the choice, and its one switch, the environment variable KERNELS. Imports `kernels` only, and an
implementation not before it is chosen. Each choice is logged once for each op and device: a run's log tells them all.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

VARIABLE = "KERNELS"
BACKENDS = ("auto", "torch", "native", "triton", "cuda")
"""auto: by device and what is there. torch: the reference, anywhere. native: C on a CPU. triton: on a GPU, or on a CPU
in Triton's interpreter (TRITON_INTERPRET=1). cuda: CUDA C++ on a GPU; ops that have none run as under auto."""

IMPLEMENTATIONS: dict[str, dict[str, str]] = {
    "quantize": {"native": "kernels.native", "triton": "kernels.triton_ops.quantize"},
    "dequantize": {"native": "kernels.native", "triton": "kernels.triton_ops.quantize"},
    "sign_pack": {"cuda": "kernels.cuda", "native": "kernels.native", "triton": "kernels.triton_ops.sign_pack"},
    "sign_unpack": {"cuda": "kernels.cuda", "native": "kernels.native", "triton": "kernels.triton_ops.sign_pack"},
    "decode_sum": {"cuda": "kernels.cuda", "native": "kernels.native", "triton": "kernels.triton_ops.decode_sum"},
    "decode_sum_encode": {
        "cuda": "kernels.cuda",
        "native": "kernels.native",
        "triton": "kernels.triton_ops.decode_sum",
    },
    "select_top": {"native": "kernels.native", "triton": "kernels.triton_ops.select_top"},
    "scatter_sum": {"native": "kernels.native", "triton": "kernels.triton_ops.select_top"},
    "bucket_pack": {"native": "kernels.native", "triton": "kernels.triton_ops.bucket_pack"},
}
"""Op -> backend -> the module with a function of the op's name and arguments, best first. The reference is in the op's
own file."""


def pick(op: str, device: str) -> Callable[..., Any] | None:
    """The implementation of an op on a device type, "cpu" or "cuda"; None: the reference.

    Raises ValueError, naming op and device, where KERNELS forces a backend that can't serve them.
    """
    return _pick(op, device, os.environ.get(VARIABLE, "auto"))


@contextmanager
def forced(backend: str) -> Iterator[None]:
    """Inside, this process's ops run on `backend`."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = backend
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


@functools.cache
def _pick(op: str, device: str, asked: str) -> Callable[..., Any] | None:
    if asked not in BACKENDS:
        raise ValueError(f"{VARIABLE}={asked}: choose among {', '.join(BACKENDS)}")
    modules = IMPLEMENTATIONS[op]
    free = asked == "auto" or (asked == "cuda" and asked not in modules and _usable(asked, device))
    usable = [backend for backend in modules if (free or asked == backend) and _usable(backend, device)]
    if not free and asked not in ("torch", *usable):
        raise ValueError(
            f"{VARIABLE}={asked}: {op} on {device} can't be served by it here (there are: torch, "
            f"{', '.join(modules)}); native needs a C compiler, triton a GPU or TRITON_INTERPRET=1, cuda a GPU and nvcc"
        )
    chosen = next(iter(usable), "torch")
    logger.info("kernel %s on %s: %s", op, device, chosen, extra={"terminal": False})
    return None if chosen == "torch" else getattr(importlib.import_module(modules[chosen]), op)


def _usable(backend: str, device: str) -> bool:
    if backend == "triton":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return importlib.util.find_spec("triton") is not None and (device == "cuda" or interpreted)
    if backend == "native":
        return device == "cpu" and importlib.import_module("kernels.native").available()
    if backend == "cuda":
        return device == "cuda" and importlib.import_module("kernels.cuda").available()
    raise ValueError(f"backend {backend!r} is not known")
