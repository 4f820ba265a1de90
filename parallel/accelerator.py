"""DeepSpeed's view of this process's device, set before anything else of DeepSpeed is used.

Lives here: the choice, and what a CPU is spared. Imports torch, and DeepSpeed inside the function.
"""

from __future__ import annotations

import os
from typing import Any

import torch


def choose_accelerator(device: torch.device) -> None:
    """Let DeepSpeed use this kind of device, whatever else the host has. May be called again.

    On a CPU it would compile an all-reduce through shared memory when it starts (25 s, and an error without a
    compiler), which inference alone calls: here it doesn't find that op, and goes without.
    """
    os.environ["DS_ACCELERATOR"] = device.type  # before the import, which else looks for one, and warns
    from deepspeed.accelerator import get_accelerator, set_accelerator

    if device.type != "cpu" or get_accelerator().get_op_builder("ShareMemCommBuilder") is None:
        return
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class WithoutSharedMemory(CPU_Accelerator):
        def get_op_builder(self, class_name: str) -> Any:
            return None if class_name == "ShareMemCommBuilder" else super().get_op_builder(class_name)

    set_accelerator(WithoutSharedMemory())
