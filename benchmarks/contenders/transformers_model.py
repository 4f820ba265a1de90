"""transformers' DeepseekV3ForCausalLM with torch's fused AdamW, for train_step.py; with DP 2 inside torch's DDP."""

from __future__ import annotations

import contextlib
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import DeepseekV3ForCausalLM

from benchmarks.contenders import common


def main(directory: str) -> None:
    torch.set_num_threads(1)
    rank, world = common.variable("RANK", 0), common.variable("WORLD_SIZE")
    model = DeepseekV3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.train()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": common.WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, common.LR, common.BETAS, common.EPS, fused=True)
    wrapped = model
    if world > 1:
        dist.init_process_group("gloo")
        wrapped = DistributedDataParallel(model)

    def step(batches: common.Batches) -> float:
        total = torch.zeros(())
        for i, (tokens, labels) in enumerate(batches):
            last = i == len(batches) - 1
            with wrapped.no_sync() if world > 1 and not last else contextlib.nullcontext():
                output = wrapped(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False)
                (output.loss / len(batches)).backward()
            total += output.loss.detach() / len(batches)
        torch.nn.utils.clip_grad_norm_(parameters, common.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if world > 1:
            dist.all_reduce(total)
        return float(total) / world

    common.serve(step, rank, world)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
