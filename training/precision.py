"""Numbers of a run: what is computed and kept in which dtype, the loss scale of fp16, and whether a device can do it.

Lives here: decisions, no arithmetic of the model. May import `kernels` and `parallel`. Sources: mixed precision
(1710.03740); the loss scale follows DeepSpeed's DynamicLossScaler step by step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernels.attention import attention
from kernels.grouped_matmul import grouped_matmul
from kernels.matmul import linear, product_dtype
from kernels.permute import combine
from kernels.rms_norm import rms_norm
from kernels.swiglu import swiglu
from parallel.launch import compute_capability
from training.arguments import INITIAL_LOSS_SCALE, TrainingArguments
from training.failures import ConfigurationError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Row:
    """What one part of a step is computed or kept in. dtype: None for the run's --precision; note: what else holds."""

    what: str
    dtype: str | None
    note: str = ""

    def of(self, precision: str) -> str:
        """Under this --precision."""
        return self.dtype or precision


TABLE = (
    Row("weights", None, "parameters of forward and backward"),
    Row("activations", None, "and their gradients, and messages of pipeline, tensor, context and expert parallelism"),
    Row("matrix products", None, "their inputs; sums are fp32, rounded once"),
    Row("attention's softmax", "fp32", "inside the kernel; its inputs and output are activations"),
    Row("norms", "fp32", "inside the kernel; its inputs and output are activations"),
    Row("rotary angles", "fp32", "cos and sin, and the product with queries and keys"),
    Row("router scores", "fp32", "from the product with the router's weight on: choice, weights, losses of balance"),
    Row("router bias", "fp32"),
    Row("logits", None),
    Row("cross entropy", "fp32", "from the logits on, whatever their dtype"),
    Row("loss", "fp64", "one number: fp32's sum over tokens, divided by the global batch's exact count"),
    Row("weight gradients", None, "of one micro-batch; fp32 products add theirs to the sum at once"),
    Row("gradient accumulation", "fp32", "main_grad, divided by the loss scale as it is added"),
    Row("gradient reduction", "fp32", "or --grad-compression's code on the wire; sums are fp32 either way"),
    Row("gradient norm", "fp32", "sums of rows in fp32, of these in fp64"),
    Row("master weights", "fp32", "under fp32 the weights themselves"),
    Row("first moment", "fp32", "or bf16: --exp-avg-dtype; computed in fp32"),
    Row("second moment", "fp32", "or bf16: --exp-avg-sq-dtype; computed in fp32"),
)


def table_lines() -> list[str]:
    """The table in Markdown, as docs/precision.md shows it."""
    lines = ["| | " + " | ".join(DTYPES) + " | |", "|---|" + "---|" * len(DTYPES) + "---|"]
    return lines + [f"| {row.what} | {' | '.join(row.of(name) for name in DTYPES)} | {row.note} |" for row in TABLE]


class LossScale:
    """The factor on fp16's losses, which keeps small gradients above fp16's smallest number, 6e-8.

    An overflow halves it, after `hysteresis` - 1 overflows that don't, but never below `minimum`; once `window` steps
    in a row have been taken after the first one, the next doubles it (DeepSpeed counts so), and makes up the
    hysteresis. constant: it never changes. All ranks see the same overflows, so all have the same scale.
    """

    def __init__(
        self,
        initial: float = INITIAL_LOSS_SCALE,
        minimum: float = 1.0,
        window: int = 1000,
        hysteresis: int = 1,
        constant: bool = False,
    ):
        self.value = initial
        self.minimum, self.window, self.hysteresis, self.constant = minimum, window, hysteresis, constant
        self._taken = 0  # steps since the last overflow
        self._left = hysteresis  # overflows until one lowers the scale

    @classmethod
    def from_arguments(cls, training: TrainingArguments) -> LossScale | None:
        """As the flags say; None where there is nothing to scale, as fp32 and bf16 have the same range."""
        if training.precision != "fp16":
            return None
        if training.loss_scale is not None:
            return cls(training.loss_scale, constant=True)
        given = {
            "initial": training.initial_loss_scale,
            "minimum": training.min_loss_scale,
            "window": training.loss_scale_window,
            "hysteresis": training.hysteresis,
        }
        return cls(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]

    def update(self, overflow: bool) -> bool:
        """After a step, which was taken unless its gradient overflowed. Whether that is worth another attempt.

        It isn't at the minimum, nor with a constant scale.
        """
        if self.constant:
            return False
        if not overflow:
            self._taken += 1
            if self._taken > 1 and (self._taken - 1) % self.window == 0:
                self.value *= 2
                self._left = self.hysteresis
            return False
        self._taken = 0
        if self._left > 1:
            self._left -= 1
            return True
        if self.value <= self.minimum:
            return False
        self.value = max(self.value / 2, self.minimum)
        return True

    def limit(self) -> str:
        """Why it can't be lowered, in words."""
        return (
            f"--loss-scale {self.value:.10g} is constant"
            if self.constant
            else f"--min-loss-scale is {self.minimum:.10g}"
        )

    def state(self) -> dict[str, Any]:
        """For a checkpoint: numbers that JSON keeps exactly."""
        return {"value": self.value, "taken": self._taken, "left": self._left}

    def load(self, state: dict[str, Any]) -> None:
        """From `state()`. The flags win where they are others now: a constant one, a higher minimum."""
        if not self.constant:
            self.value = max(float(state["value"]), self.minimum)
            self._taken, self._left = int(state["taken"]), min(int(state["left"]), self.hysteresis)


_BF16_SINCE, _FP16_SINCE = (8, 0), (5, 3)


def check_device(precision: str, device: torch.device) -> str | None:
    """What to warn of where this precision runs on this device, but slowly.

    Raises ConfigurationError with the reason where it can't: a GPU without fp16, or a torch without an operation.
    """
    dtype, capability = DTYPES[precision], compute_capability(device)
    if precision == "fp32":
        return None
    if precision == "fp16" and capability is not None and capability < _FP16_SINCE:
        raise ConfigurationError(
            f"--precision fp16 needs a GPU of compute capability {_FP16_SINCE[0]}.{_FP16_SINCE[1]} and this one has "
            f"{capability[0]}.{capability[1]}: use --precision fp32"
        )
    try:
        _try_kernels(dtype, device)
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigurationError(
            f"--precision {precision} doesn't work on this {device.type} with torch {torch.__version__}, which says "
            f"{str(error).splitlines()[0]!r}: use --precision fp32"
        ) from error
    if precision == "bf16" and capability is not None and capability < _BF16_SINCE:
        return (
            f"--precision bf16 on a GPU of compute capability {capability[0]}.{capability[1]}, which has no "
            "instructions for it (8.0 and newer have): it is emulated, slowly; --precision fp16 is fast there"
        )
    if product_dtype(torch.empty(0, dtype=dtype, device=device)) != dtype:
        return (
            f"--precision {precision} on a CPU that has no instructions for it: matrix products are computed in fp32 "
            "on copies, so it saves no time"
        )
    return None


def _try_kernels(dtype: torch.dtype, device: torch.device) -> None:
    """Run the model's operations, backward too, on a few values of this dtype."""
    x = torch.ones((16, 2, 16), dtype=dtype, device=device, requires_grad=True)
    weight = torch.ones((16, 16), dtype=dtype, device=device)
    ends = torch.tensor([32], dtype=torch.int32, device=device)
    order = torch.arange(32, device=device)
    y = linear(rms_norm(x, weight[0], 1e-6), weight).unsqueeze(2)
    y = attention(y, y, y, 0.25)
    rows = grouped_matmul(y.flatten(0, 1), weight.unsqueeze(0), ends)
    rows = swiglu(torch.cat([rows, rows], dim=-1), rows[:, 0])
    combine(rows, order, order.unsqueeze(1)).float().sum().backward()
