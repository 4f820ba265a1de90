"""A launch of a Triton kernel as data: what it is compiled for, and with which arguments it runs.

Lives here: the launch, and its lock in the interpreter. Imports torch and triton. An op makes a launch and runs it; a
test compiles the same launch for a GPU that isn't there.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction

_INTERPRETER = threading.Lock()
"""Triton's interpreter patches triton.language and keeps the program's place in a global: one launch at a time. On a
GPU nothing is locked."""


@dataclass(frozen=True)
class Launch:
    """One launch of `kernel` over a grid of `programs`, none where that is 0.

    arguments: in the kernel's order; the first is a tensor, whose device it runs on. constants: its constexpr
    parameters. Products aren't fused with sums (`enable_fp_fusion`): that would round once where the reference rounds
    twice.
    """

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments: the constants and the compiler's options.

        Told no limit of registers, the assembler aims at one that lets more programs run at once, and where it misses
        it by a little, it spills. The limit lets two programs of 8 warps run at once.
        """
        registers = min(255, 32768 // (32 * self.num_warps))
        return {**self.constants, "num_warps": self.num_warps, "maxnreg": registers, "enable_fp_fusion": False}

    def run(self) -> None:
        if not self.programs:
            return
        one_at_a_time = isinstance(self.kernel, InterpretedFunction)
        with _INTERPRETER if one_at_a_time else contextlib.nullcontext(), torch.cuda.device_of(self.arguments[0]):
            self.kernel[(self.programs,)](*self.arguments, **self.options)


def as_integers(values: torch.Tensor | None) -> torch.Tensor | None:
    """bf16 as int16, which kernels convert by integer arithmetic; other dtypes as they are."""
    return values.view(torch.int16) if values is not None and values.dtype == torch.bfloat16 else values
