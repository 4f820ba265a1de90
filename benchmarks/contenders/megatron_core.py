"""megatron-core's training step, for train_step.py: its DeepSeek-V3 parts in the local spec, on CPU by a shim.

TP, PP, DP, EP in the environment choose the layout; tensor parallelism is with sequence parallelism.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from benchmarks.contenders import common
from benchmarks.contenders.megatron_on_cpu import patch_megatron, redirect_torch

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
redirect_torch()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig  # noqa: E402

patch_megatron()

TP, PP, EP = common.variable("TP"), common.variable("PP"), common.variable("EP")
# Megatron's name -> Hugging Face's: of the whole model, and of what is in a layer.
_NAMES = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}


def transformer_config() -> MLATransformerConfig:
    """common.CONFIG in Megatron's words."""
    model = common.CONFIG
    return MLATransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        multi_latent_attention=True,
        q_lora_rank=model.q_lora_rank,
        kv_lora_rank=model.kv_lora_rank,
        qk_head_dim=model.qk_nope_head_dim,
        qk_pos_emb_head_dim=model.qk_rope_head_dim,
        v_head_dim=model.v_head_dim,
        qk_layernorm=True,
        rope_type="rope",
        rotary_scaling_factor=1.0,  # plain positions: no stretching, no temperature
        layernorm_epsilon=model.rms_norm_eps,
        num_moe_experts=model.n_routed_experts,
        moe_router_topk=model.num_experts_per_tok,
        moe_ffn_hidden_size=model.moe_intermediate_size,
        moe_shared_expert_intermediate_size=model.shared_intermediate_size,
        moe_router_num_groups=model.n_group,
        moe_router_group_topk=model.topk_group,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.0,
        moe_router_topk_scaling_factor=model.routed_scaling_factor,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        tensor_model_parallel_size=TP,
        pipeline_model_parallel_size=PP,
        expert_model_parallel_size=EP,
        sequence_parallel=TP > 1,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        batch_p2p_comm=False,
        deallocate_pipeline_outputs=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
    )


@torch.no_grad()
def load(model: GPTModel, directory: str) -> None:
    """This rank's part of the shared weights. Raises KeyError for a parameter that has no counterpart."""
    first_layer = parallel_state.get_pipeline_model_parallel_rank() * (common.CONFIG.num_hidden_layers // PP)
    first_expert = parallel_state.get_expert_model_parallel_rank() * (common.CONFIG.n_routed_experts // EP)
    with safe_open(Path(directory) / "model.safetensors", framework="pt") as file:
        for name, parameter in model.named_parameters():
            sources = _sources(name, first_layer, first_expert)
            shape = (parameter.shape[0] // len(sources), *parameter.shape[1:])
            parameter.copy_(torch.cat([_part(file.get_tensor(source), shape) for source in sources]))


def _sources(name: str, first_layer: int, first_expert: int) -> list[str]:
    """Hugging Face's tensors that a parameter holds, one under the other: an expert's gate and up, or one."""
    if name in _NAMES:
        return [_NAMES[name]]
    _, _, number, rest = name.split(".", 3)
    layer = f"model.layers.{int(number) + first_layer}"
    if rest in _LAYER_NAMES:
        return [f"{layer}.{_LAYER_NAMES[rest]}"]
    expert, matrix, _ = rest.rsplit(".", 2)
    if ".local_experts." in expert:  # numbered from 0 on each rank
        expert = f"mlp.experts.{first_expert + int(expert.rpartition('.')[2])}"
    halves = {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)}[matrix]
    return [f"{layer}.{expert}.{half}.weight" for half in halves]


def _part(whole: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """This tensor-parallel rank's block, along the dimension in which the sizes differ."""
    for dim, (full, mine) in enumerate(zip(whole.shape, shape, strict=True)):
        if full != mine:
            return whole.chunk(TP, dim)[parallel_state.get_tensor_model_parallel_rank()]
    return whole


def main(directory: str) -> None:
    torch.set_num_threads(1)
    rank = common.variable("RANK", 0)
    dist.init_process_group("gloo", rank=rank, world_size=common.variable("WORLD_SIZE"))
    parallel_state.initialize_model_parallel(TP, PP, expert_model_parallel_size=EP, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    dp_rank, dp_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    init_num_microbatches_calculator(rank, None, common.MICRO_BATCH * common.MICRO_BATCHES, common.MICRO_BATCH, dp_size)
    config = transformer_config()
    spec = get_gpt_layer_local_spec(
        num_experts=common.CONFIG.n_routed_experts,
        moe_grouped_gemm=False,
        qk_layernorm=True,
        multi_latent_attention=True,
        normalization="RMSNorm",
    )
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model = GPTModel(
        config,
        spec,
        vocab_size=common.CONFIG.vocab_size,
        max_sequence_length=common.LENGTH,
        position_embedding_type="rope",
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=False,
    )
    load(model, directory)
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=dp_size > 1)
    models = [DistributedDataParallel(config, settings, model)]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=common.LR,
            adam_beta1=common.BETAS[0],
            adam_beta2=common.BETAS[1],
            adam_eps=common.EPS,
            weight_decay=common.WEIGHT_DECAY,
            clip_grad=common.CLIP,
            bf16=False,
            fp16=False,
        ),
        models,
        use_gloo_process_groups=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if dp_size > 1:
        config.no_sync_func = models[0].no_sync
    positions = torch.arange(common.LENGTH).expand(common.MICRO_BATCH, -1)
    future = torch.triu(torch.ones(1, 1, common.LENGTH, common.LENGTH, dtype=torch.bool), 1)
    forward_backward = get_forward_backward_func()

    def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = output.float().mean()
        return loss, {"loss": loss.detach().clone()}

    def forward(iterator: Any, module: Any) -> tuple[torch.Tensor, Any]:
        tokens, labels = next(iterator)
        return module(tokens, positions, future, labels=labels), loss_of

    def step(batches: common.Batches) -> float | None:
        for one in models:
            one.zero_grad_buffer()
        optimizer.zero_grad()
        reports = forward_backward(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=models[0],
            num_microbatches=len(batches),
            seq_length=common.LENGTH,
            micro_batch_size=common.MICRO_BATCH,
            forward_only=False,
        )
        optimizer.step()
        if not reports:
            return None
        loss = torch.stack([report["loss"] for report in reports]).mean()
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        return float(loss) / dp_size

    common.serve(step, dp_rank, dp_size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
