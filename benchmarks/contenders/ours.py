"""This project's training step, for train_step.py. TP, PP, DP, EP in the environment choose the layout."""

from __future__ import annotations

import sys

import torch

from benchmarks.contenders import common
from model.hf import load_hf_directory
from model.microbatch import MicroBatch
from parallel.launch import destroy, init_distributed
from parallel.mesh import Layout, Mesh
from training.arguments import Arguments
from training.engine import Engine


def main(directory: str) -> None:
    torch.set_num_threads(1)
    device = init_distributed("gloo")
    layout = Layout(tp=common.variable("TP"), pp=common.variable("PP"), ep=common.variable("EP"))
    mesh = Mesh.create(layout, device)
    arguments = Arguments().replace(
        adam_beta1=common.BETAS[0],
        adam_beta2=common.BETAS[1],
        adam_eps=common.EPS,
        weight_decay=common.WEIGHT_DECAY,
        clip_grad=common.CLIP,
        router_bias_update_rate=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
    )
    engine = Engine(common.CONFIG, arguments, mesh)
    for stage in engine.stages.values():
        load_hf_directory(directory, stage, common.CONFIG, mesh)

    def step(batches: common.Batches) -> float:
        made = []
        for tokens, labels in batches:
            mask = torch.ones(tokens.shape)
            made.append(MicroBatch(tokens, labels, mask, torch.arange(common.LENGTH).expand_as(tokens)))
        return engine.train_step(made, common.LR).losses["lm"]

    common.serve(step, mesh.dp.rank, mesh.dp.size)
    destroy()


if __name__ == "__main__":
    main(sys.argv[1])
