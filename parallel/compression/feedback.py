"""Error feedback: what a code didn't carry is added to the next step's values, so nothing of a gradient is lost.

Lives here: the residual of one stretch of values, in two phases. Imports `kernels` and the options only. EF-SGD
(1901.09847); residuals in few bits after LoCo (2407.04480).
"""

from __future__ import annotations

import torch

from kernels.quantize import dequantize, quantize
from kernels.wire import WireFormat
from parallel.compression.options import ResidualName

INT8_BLOCK = 256
_INT8 = WireFormat("int8", INT8_BLOCK)
_DTYPES = {"none": torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16}


class ErrorFeedback:
    """The residual of n values (for int8 a multiple of 256), and its shadow, which takes its place at a step's commit.

    An early bucket is on its way before a later one is known to hold Inf, hence the two: encoding reads the residual
    and writes the shadow; `commit` swaps them, `discard` forgets the shadow. decay: factor on what is kept.
    """

    def __init__(self, n: int, dtype: ResidualName, device: torch.device, decay: float = 1.0):
        self.dtype, self.decay, self.n = dtype, decay, n
        self._written = False
        if dtype == "int8":
            self._kept = torch.zeros((2, 1, _INT8.wire_bytes(n)), dtype=torch.uint8, device=device)
        else:
            self._kept = torch.zeros((2, 0 if dtype == "none" else n), dtype=_DTYPES[dtype], device=device)
        self._now = 0
        self._write: torch.Tensor | None = None  # where the next residual goes, while an encoding is open

    def open(self, rows: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The residual to add and the tensor for the next one, [rows, n / rows], fp32 or bf16; None: no feedback."""
        if self.dtype == "none":
            return None, None
        if self.dtype == "int8":
            values = torch.empty((1, self.n), device=self._kept.device)
            self._write = dequantize(self._kept[self._now], _INT8, values).view(rows, -1)
            return self._write, self._write
        self._write = self._kept[1 - self._now].view(rows, -1)
        return self._kept[self._now].view(rows, -1), self._write

    def close(self) -> None:
        """The next residual is written."""
        if self._write is None:
            return
        if self.decay != 1.0:
            self._write.mul_(self.decay)
        if self.dtype == "int8":
            quantize(self._write.view(1, -1), _INT8, self._kept[1 - self._now])
        self._write = None
        self._written = True

    def commit(self) -> None:
        """The step was taken: its residual counts, if it has one."""
        self._now ^= self._written
        self._written = False

    def discard(self) -> None:
        """The step was skipped: as if nothing had been sent."""
        self._written = False

    def rescale(self, factor: float) -> None:
        """Multiply the residual: gradients come in another unit (loss scale) from now on."""
        if self.dtype == "int8":
            scales, _, _ = _INT8.split(self._kept[self._now], self.n)
            scales.mul_(factor)
        else:
            self._kept[self._now].mul_(factor)

    def value(self) -> torch.Tensor:
        """The residual in fp32 [n]; zeros without feedback."""
        if self.dtype == "none":
            return torch.zeros(self.n, device=self._kept.device)
        if self.dtype == "int8":
            return dequantize(self._kept[self._now], _INT8, torch.empty((1, self.n), device=self._kept.device))[0]
        return self._kept[self._now].float()

    def stored(self, start: int, stop: int) -> list[torch.Tensor]:
        """Views of all that is kept of the values from start to stop (int8: at multiples of 256): to save and load."""
        if self.dtype == "none":
            return []
        if self.dtype == "int8":
            scales, _, codes = _INT8.split(self._kept[self._now], self.n)
            return [scales[0, start // INT8_BLOCK : -(-stop // INT8_BLOCK)], codes[0, start:stop]]
        return [self._kept[self._now][start:stop]]
