"""From flags to engines. (Replaced by branch zero1's at the merge.)

Lives here: x.
"""

from __future__ import annotations

from typing import Any

import torch

from parallel.zero_engine import ZeroEngine


def zero_engine(stage: Any, named: Any, mesh: Any, arguments: Any) -> ZeroEngine:
    flags, optimizer = arguments.zero, arguments.optimizer
    zero: dict[str, Any] = {"stage": flags.zero_stage, "overlap_comm": False}
    zero["stage3_param_persistence_threshold"] = 0
    zero["reduce_bucket_size"] = 1 << 20
    for what in ("optimizer", "param"):
        device = getattr(flags, f"offload_{what}") or "none"
        if device != "none":
            zero[f"offload_{what}"] = {"device": device, "nvme_path": flags.nvme_path, "pin_memory": False}
            if device == "nvme":
                zero[f"offload_{what}"] |= {"buffer_size": 1 << 20}
    offloaded = (flags.offload_optimizer or "none") != "none"

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        if optimizer.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=optimizer.lr, momentum=optimizer.sgd_momentum)
        kind: Any = DeepSpeedCPUAdam if offloaded else torch.optim.AdamW
        return kind(groups, lr=optimizer.lr, betas=(optimizer.adam_beta1, optimizer.adam_beta2), eps=optimizer.adam_eps)

    config = {"zero_optimization": zero, "gradient_clipping": optimizer.clip_grad}
    return ZeroEngine(stage, named, mesh, config, make, optimizer.weight_decay)
