"""AdamW here is torch's, number for number, without what torch's own class imports."""

from __future__ import annotations

import subprocess
import sys

import torch

from training.optimizer import AdamW


def test_adamw_is_torchs_bit_for_bit() -> None:
    seed = torch.seed()
    print(f"seed {seed}")
    ours, theirs = ([torch.empty(37, 5), torch.empty(11)] for _ in range(2))
    for one, other in zip(ours, theirs, strict=True):
        other.copy_(one.normal_())

    def groups(parameters: list[torch.Tensor]) -> list[dict]:
        return [
            {"params": parameters[:1], "weight_decay": 0.1},
            {"params": parameters[1:], "weight_decay": 0.0},
        ]

    mine = AdamW(groups(ours), 1e-3, (0.9, 0.95), 1e-8)
    reference = torch.optim.AdamW(groups(theirs), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for step in range(5):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for group in (*mine.param_groups, *reference.param_groups):
            group["lr"] = 1e-3 * (step + 1)
        mine.step()
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        for kind, value in reference.state[other].items():
            assert torch.equal(mine.state[one][kind], value)


def test_a_step_doesnt_import_what_costs_seconds() -> None:
    program = """
import sys, torch, training.trainer
from training.optimizer import AdamW
parameter = torch.ones(2)
parameter.grad = torch.ones(2)
AdamW([{"params": [parameter], "weight_decay": 0.0}], 1e-3, (0.9, 0.95), 1e-8).step()
slow = ("torch._dynamo", "sympy", "deepspeed", "torch.distributed.checkpoint")
print([name for name in slow if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
