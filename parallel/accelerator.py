"""DeepSpeed's view of this process's device, set before anything else of DeepSpeed is used.

Lives here: the choice, what a CPU is spared, and where ops are compiled. Imports torch, and DeepSpeed in the function.
"""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

import torch


def keep_extensions_apart() -> None:
    """Let this Python environment compile ops into a directory of its own, unless TORCH_EXTENSIONS_DIR names one.

    Torch's default is the same for all of a user's environments with this version of Python. Each of them would compile
    an op anew that another one compiled, in turns, since the commands name the headers of one torch.
    """
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        from torch.utils.cpp_extension import get_default_build_root

        environment = hashlib.sha256(f"{sys.prefix} {sys.version} {torch.__file__}".encode()).hexdigest()[:12]
        os.environ["TORCH_EXTENSIONS_DIR"] = os.path.join(get_default_build_root(), environment)


def choose_accelerator(device: torch.device) -> None:
    """Let DeepSpeed use this kind of device, whatever else the host has. May be called again.

    On a CPU it would compile an all-reduce through shared memory when it starts (25 s, and an error without a
    compiler), which inference alone calls: here it doesn't find that op, and goes without.
    """
    keep_extensions_apart()
    os.environ["DS_ACCELERATOR"] = device.type  # before the import, which else looks for one, and warns
    from deepspeed.accelerator import get_accelerator, set_accelerator

    if device.type != "cpu" or get_accelerator().get_op_builder("ShareMemCommBuilder") is None:
        return
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class WithoutSharedMemory(CPU_Accelerator):
        def get_op_builder(self, class_name: str) -> Any:
            return None if class_name == "ShareMemCommBuilder" else super().get_op_builder(class_name)

    set_accelerator(WithoutSharedMemory())
