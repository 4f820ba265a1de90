"""What is measured in a step and where it is written: metrics.jsonl, TensorBoard, and the meter of speed and memory.

Imports nothing of ours. One rank writes (decision 9). A record maps names to numbers: step, loss, valid_loss, lr,
grad_norm, tokens, step_seconds, tokens_per_second, tflops_per_device, mfu, peak_memory_gib, memory_share and whatever
else is known; sent_bytes maps each axis to a number.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

Record = Mapping[str, Any]


class MetricsFile:
    """metrics.jsonl: one JSON object a line, one line a step, on disk as soon as it is written.

    Opened at `resumed_step` (0: anew), it drops the lines of later steps, and a torn last line, so that no step of a
    resumed run appears twice. A value that isn't finite is written as null, which JSON has, unlike NaN.
    """

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            os.truncate(path, _end_of_step(path, resumed_step))
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Append one step. Raises KeyError where `record` has no step."""
        record = {"step": record["step"], **record}
        finite = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in record.items()}
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _end_of_step(path: Path, step: int) -> int:
    """Bytes of `path` up to the end of the last whole line whose step is at most `step`."""
    end = 0
    with path.open("rb") as lines:
        for line in lines:
            try:
                if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                    break
            except (ValueError, KeyError, TypeError):
                break
            end += len(line)
    return end


# TensorBoard sorts groups by name and opens the first ones: a group answers one question, and the first three have few
# charts, so that they fit on one page. A record's names that have no place here go to "5_more".
_TAGS = {
    "loss": "1_learn/loss",
    "valid_loss": "1_learn/loss_validation",
    "bigram_loss": "1_learn/loss_validation_of_bigrams",
    "grad_norm": "1_learn/norm_of_gradient",
    "tokens_per_second": "2_speed/tokens_per_second",
    "step_seconds": "2_speed/step_seconds",
    "grad_reduce_exposed_seconds": "2_speed/step_seconds_waiting_for_gradients",
    "tflops_per_device": "2_speed/model_tflops_per_device",
    "mfu": "2_speed/mfu",
    "peak_memory_gib": "3_fit/memory_peak_gib",
    "memory_share": "3_fit/memory_share",
    "grad_sent_bytes": "3_wire/bytes_of_gradients",
    "grad_compression_ratio": "3_wire/times_fewer_than_fp32",
    "grad_compression_error": "3_wire/error_of_the_code",
    "grad_encode_seconds": "3_wire/seconds_encoding",
    "grad_wire_seconds": "3_wire/seconds_on_the_wire",
    "grad_decode_seconds": "3_wire/seconds_decoding",
    "lr": "4_detail/learning_rate",
    "mtp_loss": "4_detail/loss_of_mtp",
    "aux_loss": "4_detail/loss_of_balance",
    "device_loss": "4_detail/loss_of_balance_of_devices",
    "communication_loss": "4_detail/loss_of_balance_of_communication",
    "z_loss": "4_detail/loss_of_router_z",
    "expert_max_violation": "4_detail/expert_max_violation",
    "expert_dropped_share": "4_detail/expert_dropped_share",
    "sent_bytes": "4_detail/sent_bytes",
    "loss_scale": "4_detail/loss_scale",
    "overflows": "4_detail/loss_scale_overflows",
    "tokens": "4_detail/tokens",
    "loss_tokens": "4_detail/tokens_with_loss",
}
_CHARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "does it learn": {
        "loss, validation, bigram model": ("loss", "valid_loss", "bigram_loss"),
        "gradient norm": ("grad_norm",),
    },
    "how fast is it": {
        "tokens per second": ("tokens_per_second",),
        "seconds of a step, and of it waiting for gradients": ("step_seconds", "grad_reduce_exposed_seconds"),
        "model TFLOP/s of a device": ("tflops_per_device",),
        "share of the peak (MFU)": ("mfu",),
    },
    "does it fit": {
        "peak memory of the fullest rank, GiB": ("peak_memory_gib",),
        "share of the memory there is": ("memory_share",),
    },
    "does compression pay": {
        "bytes of gradients that rank 0 sends": ("grad_sent_bytes",),
        "error of the code, a share of what was encoded": ("grad_compression_error",),
        "seconds encoding, on the wire, decoding": ("grad_encode_seconds", "grad_wire_seconds", "grad_decode_seconds"),
    },
}
"""Charts of TensorBoard's page "Custom Scalars": question -> title -> names of a record that share the chart."""


class TensorBoard:
    """TensorBoard's event files. Points after `resumed_step` that an interrupted run left are hidden."""

    def __init__(self, directory: Path, resumed_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # half a second, which only the writing rank pays

        self._writer = SummaryWriter(
            str(directory), purge_step=resumed_step + 1 if resumed_step else None, flush_secs=10
        )
        self._has_charts = False

    def write(self, record: Record) -> None:
        """Show every number of `record` at its step; names that have no place of their own go to "5_more".

        What maps names to numbers gets a chart for each, such as sent_bytes_of_tp.
        """
        if not self._has_charts:
            self._writer.add_custom_scalars(_charts(record))
            self._has_charts = True
        for name, value in record.items():
            tag = _TAGS.get(name, f"5_more/{name}")
            numbers = {f"{tag}_of_{part}": x for part, x in value.items()} if isinstance(value, dict) else {tag: value}
            for tag, number in numbers.items():
                if name != "step" and isinstance(number, int | float):
                    self._writer.add_scalar(tag, number, record["step"])

    def image(self, name: str, pixels: np.ndarray, step: int) -> None:
        """Show a picture, uint8 [height, width, 3]."""
        self._writer.add_image(name, pixels, step, dataformats="HWC")

    def text(self, name: str, text: str) -> None:
        """Show `text` as it is, in a fixed-width font, under `name`: the configuration."""
        self._writer.add_text(name, "\n".join("    " + line for line in text.splitlines()))

    def close(self) -> None:
        self._writer.close()


def _charts(record: Record) -> dict[str, dict[str, list[Any]]]:
    """The layout of Custom Scalars without charts that would stay empty: none of their names is in the first record."""
    layout = {
        question: {
            title: ["Multiline", [f"^{_TAGS[name]}$" for name in names]]
            for title, names in charts.items()
            if any(name in record for name in names)
        }
        for question, charts in _CHARTS.items()
    }
    return {question: charts for question, charts in layout.items() if charts}


# Dense bf16 TFLOP/s, from NVIDIA's data sheets. A name is matched word by word; the first row that fits counts.
_PEAK_TFLOPS = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("GH200", 989.4),
    ("H200", 989.4),
    ("H100", 989.4),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("GB200", 2500.0),
    ("B200", 2250.0),
)


def known_peak_tflops(device_name: str) -> float | None:
    """Dense bf16 peak of a GPU by CUDA's name for it, such as "NVIDIA H100 80GB HBM3"; None where it isn't known."""
    words = set(re.findall(r"\w+", device_name))
    return next((peak for name, peak in _PEAK_TFLOPS if set(name.split()) <= words), None)


class Meter:
    """Speed of steps and the memory of this rank. `start` before a step, `stop` after its loss is on the CPU.

    `flops_per_token` as model.flops counts them; `devices` is the world size. `peak_tflops` of one device (default:
    looked up for known GPUs) gives MFU, a share of the bf16 peak whatever the precision; without one MFU is absent.
    """

    def __init__(
        self, flops_per_token: float, devices: int, device: torch.device, peak_tflops: float | None = None
    ) -> None:
        self._flops_per_token = flops_per_token
        self._devices = devices
        self._device = device
        if peak_tflops is None and device.type == "cuda":
            peak_tflops = known_peak_tflops(torch.cuda.get_device_name(device))
        self._peak_tflops = peak_tflops
        self._started = time.perf_counter()

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self, tokens: int) -> dict[str, float]:
        """Measurements of a step that trained on `tokens` tokens over all ranks."""
        seconds = max(time.perf_counter() - self._started, 1e-9)
        tflops = self._flops_per_token * tokens / seconds / self._devices / 1e12
        measured = {
            "step_seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "tflops_per_device": tflops,
            "peak_memory_gib": peak_memory_bytes(self._device) / 2**30,
        }
        if self._peak_tflops:
            measured["mfu"] = tflops / self._peak_tflops
        if (share := memory_share(self._device)) is not None:
            measured["memory_share"] = share
        return measured


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this rank has held: of tensors on its GPU, or of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def memory_share(device: torch.device) -> float | None:
    """How full the memory is, 0 to 1: what this rank's allocator took of its GPU at most, or what all processes of the
    host hold of its memory now. None on a CPU host that isn't Linux.
    """
    if device.type == "cuda":
        # Reserved rather than allocated: what fragmentation wastes makes a run fail too.
        return torch.cuda.max_memory_reserved(device) / torch.cuda.get_device_properties(device).total_memory
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return 1 - kib["MemAvailable"] / kib["MemTotal"]
