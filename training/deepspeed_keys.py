"""The keys of DeepSpeed's JSON file as tables: what each holds, and what becomes of it here.

Imports nothing but the standard library; `deepspeed_config` reads files by these tables, and a test compares them with
the DeepSpeed that is installed. Names follow DeepSpeed 0.19.8, https://www.deepspeed.ai/docs/config-json/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Use = Literal["flag", "passed", "fixed", "refused"]
"""flag: one of ours says the same, so they must agree. passed: DeepSpeed gets it. fixed: here it has one value, and
another one is left out with a notice. refused: whoever writes it expects what this project does by other means."""


@dataclass(frozen=True)
class Key:
    """kind: bool, int, float, str, list, dict (a section), or the tuple of all values it may have.

    line: why it is fixed or refused, and what to use here. nothing: values that ask for nothing (beside "auto", null,
    and, where a key is refused, what is switched off). stages: those whose engine uses it. section: the keys within.
    least: of whole numbers, the first that DeepSpeed works with.
    """

    kind: type | tuple[Any, ...]
    use: Use
    line: str = ""
    nothing: tuple[Any, ...] = ()
    stages: tuple[int, ...] = (1, 2, 3)
    section: Mapping[str, Key] = field(default_factory=dict)
    least: int = 0


def _passed(kind: type, *names: str) -> dict[str, Key]:
    return {name: Key(kind, "passed") for name in names}


def _same(key: Key, *names: str) -> dict[str, Key]:
    return dict.fromkeys(names, key)


_FP32 = ("fp32", "float32", "float", "torch.float32")
DTYPES = {
    "fp32": _FP32,
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    "fp16": ("fp16", "float16", "half", "torch.float16"),
}
"""--precision -> how DeepSpeed's file may spell it."""

OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd"}
"""DeepSpeed's name, in small letters -> --optimizer. Its Adam decays weights as AdamW does."""

_OPTIMIZER_PARAMS = {
    **_same(Key(float, "flag"), "lr", "eps", "weight_decay", "momentum", "max_grad_norm"),
    "betas": Key(list, "flag"),
    **_same(Key(bool, "fixed", "", (True, False)), "torch_adam", "fused", "foreach"),
    "adam_w_mode": Key(bool, "refused", "weight decay is decoupled here, as AdamW's", (True,)),
    "bias_correction": Key(bool, "refused", "Adam's moments are always corrected here", (True,)),
    "amsgrad": Key(bool, "refused", "--optimizer has adamw and sgd without it"),
    "fp32_optimizer_states": Key(bool, "refused", "use --exp-avg-dtype and --exp-avg-sq-dtype", (True,)),
    **_same(Key(bool, "refused", "--optimizer sgd has plain momentum"), "nesterov", "maximize"),
    "dampening": Key(float, "refused", "--optimizer sgd has plain momentum", (0,)),
}

_OPTIMIZER = {
    "type": Key(str, "flag"),
    "params": Key(dict, "flag", section=_OPTIMIZER_PARAMS),
    "legacy_fusion": Key(bool, "fixed", "the optimizer is this project's"),
}

_MASTERS = "masters are fp32 here; --exp-avg-dtype bf16 and --exp-avg-sq-dtype bf16 keep Adam's moments in 16 bits"

_FP16 = {
    "enabled": Key(bool, "flag"),
    "loss_scale": Key(float, "flag"),
    **_same(Key(int, "flag"), "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"),
    "consecutive_hysteresis": Key(bool, "refused", "--hysteresis counts again after each doubling of the loss scale"),
    "auto_cast": Key(bool, "fixed", "inputs are tokens, there is nothing to cast"),
    "fp16_master_weights_and_grads": Key(bool, "refused", _MASTERS),
}

_BF16 = {
    "enabled": Key(bool, "flag"),
    "immediate_grad_update": Key(bool, "fixed", "gradients are added in fp32 as they come", (False,)),
    "check_grad_overflow": Key(bool, "fixed", "a step whose gradients aren't finite is never taken", (True,)),
    **_same(Key(bool, "refused", _MASTERS), "bf16_master_weights_and_grads", "bf16_optimizer_states"),
}

_DATA_TYPES = {
    "grad_accum_dtype": Key(str, "refused", "gradients are added in fp32; leave it out", _FP32),
    "param_dtype": Key(str, "flag"),
    "buffer_dtype": Key(str, "refused", "each buffer's type is the model's own; leave it out"),
    "keep_in_fp32_modules": Key(
        list, "refused", "what is fp32 is the model's own, docs/precision.md; leave it out", ([],)
    ),
}

_OFFLOAD = {
    "device": Key(("none", "cpu", "nvme"), "flag"),
    "nvme_path": Key(str, "flag"),
    **_passed(int, "buffer_count"),
    **_passed(bool, "pin_memory"),
}
_SUPERCHIPS = "not there: the optimizer's step is DeepSpeed's plain one on the host"

OFFLOAD_OPTIMIZER = {
    **_OFFLOAD,
    **_passed(bool, "pipeline_read", "pipeline_write", "fast_init"),
    "ratio": Key(float, "refused", "not there: all optimizer states are offloaded, or none", (1,)),
    "super_offload": Key(bool, "refused", _SUPERCHIPS),
    "cpuadam_cores_perc": Key(float, "fixed", _SUPERCHIPS, (0.8,)),
}

OFFLOAD_PARAM = {**_OFFLOAD, **_passed(int, "buffer_size", "max_in_cpu")}

_ENGINE_REDUCES = "at stage 1 gradients come reduced from this project's reducer (--overlap-grad-reduce)"
_OUR_CHECKPOINTS = "checkpoints are this project's own: --save, --save-interval, --load"
_QUANTIZED = "not there; --grad-compression sends gradients in fewer bytes, at stages 0 and 1"
_REMOVED = "DeepSpeed has removed it"
_LEAVES = "which modules are gathered as one is this project's to say"
_ROUND_ROBIN = "DeepSpeed 0.19.8 then takes one parameter's part of a shard for another's"

ZERO = {
    "stage": Key((0, 1, 2, 3), "flag"),
    "offload_optimizer": Key(dict, "flag", section=OFFLOAD_OPTIMIZER),
    "offload_param": Key(dict, "flag", section=OFFLOAD_PARAM),
    "stage3_gather_16bit_weights_on_model_save": Key(bool, "flag"),
    "reduce_bucket_size": Key(int, "passed", least=1),
    **_passed(
        int,
        "allgather_bucket_size",
        "sub_group_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
    ),
    **_passed(
        bool,
        "reduce_scatter",
        "use_multi_rank_bucket_allreduce",
        "allgather_partitions",
        "stage3_use_all_reduce_for_fetch_params",
        "stage3_allgather_sequential",
        "ignore_unused_parameters",
        "memory_efficient_linear",
        "override_module_apply",
        "log_trace_cache_warnings",
        "enable_sanity_checks",
    ),
    "contiguous_gradients": Key(bool, "passed", _ENGINE_REDUCES, (False,), stages=(2, 3)),
    "overlap_comm": Key(bool, "passed", _ENGINE_REDUCES, (False,), stages=(2, 3)),
    "parameter_alignment": Key(
        bool, "fixed", "weights begin at multiples of 16 bytes, as grouped products on a GPU need", (True,)
    ),
    "compute_grad_norm": Key(bool, "fixed", "the norm is taken where it is needed", (True, False)),
    "load_from_fp32_weights": Key(bool, "fixed", _OUR_CHECKPOINTS, (True,)),
    **_same(Key(bool, "fixed", _OUR_CHECKPOINTS, (False,)), "elastic_checkpoint", "pipeline_loading_checkpoint"),
    "save_muon_momentum_buffer_in_memory": Key(bool, "fixed", "--optimizer has no Muon", (False,)),
    "cpu_offload_use_pin_memory": Key(bool, "fixed", "put pin_memory into offload_optimizer and offload_param"),
    "zenflow": Key(dict, "refused", "not there; offload_optimizer alone does the whole step on the host"),
    "round_robin_gradients": Key(bool, "fixed", _ROUND_ROBIN, (False,)),
    "leaf_module": Key(dict, "refused", _LEAVES),
    "stage3_module_granularity_threshold": Key(int, "refused", _LEAVES, (0,)),
    "legacy_stage1": Key(bool, "refused", _REMOVED),
    "zero_hpz_partition_size": Key(int, "refused", "not there: parameters are shared by all replicas alike", (1,)),
    **_same(
        Key(bool, "refused", _QUANTIZED),
        "zero_quantized_weights",
        "zero_quantized_nontrainable_weights",
        "zero_quantized_gradients",
        "zeropp_loco_param",
    ),
    **_same(Key(object, "refused", _REMOVED), "mics_shard_size", "mics_hierarchical_params_gather"),
}

GATHER = "stage3_gather_16bit_weights_on_model_save"
OLD_GATHER = ("zero3_save_16bit_model", "stage3_gather_fp16_weights_on_model_save")
"""At the top level or inside zero_optimization."""
OLD_OFFLOAD = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}
"""Inside zero_optimization: true -> that section with device cpu."""

AIO = {
    **_passed(int, "block_size", "queue_depth", "intra_op_parallelism"),
    **_passed(bool, "single_submit", "overlap_events", "use_gds"),
}
COMMS_LOGGER = {**_passed(bool, "enabled", "prof_all", "verbose", "debug"), **_passed(list, "prof_ops")}
_THROUGHPUT = _passed(bool, "enabled", "synchronized")

_METRICS = "metrics are this project's own: metrics.jsonl, and TensorBoard's files in --tensorboard-dir"
_MEANS = "gradients are sums over tokens divided by the global count; leave it out"
_ORDER = "the order of the data is --seed's and --data-path's"
_WHOLE = "the model is trained whole, in the numbers of --precision"

TOP_LEVEL = {
    **_same(
        Key(int, "flag", least=1),
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    ),
    "gradient_clipping": Key(float, "flag"),
    "optimizer": Key(dict, "flag", section=_OPTIMIZER),
    "fp16": Key(dict, "flag", section=_FP16),
    "bf16": Key(dict, "flag", section=_BF16),
    "zero_optimization": Key(dict, "flag", section=ZERO),
    "data_types": Key(dict, "flag", section=_DATA_TYPES),
    "communication_data_type": Key(
        str, "refused", "gradients are summed in fp32; at stages 0 and 1 --grad-compression bf16 sends 16 bits", _FP32
    ),
    "seq_parallel_communication_data_type": Key(
        str, "refused", "context parallelism is this project's own; leave it out", _FP32
    ),
    "aio": Key(dict, "passed", section=AIO),
    "comms_logger": Key(dict, "passed", section=COMMS_LOGGER),
    "timers": Key(dict, "passed", section={"throughput": Key(dict, "passed", section=_THROUGHPUT)}),
    **_passed(bool, "wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_python_gc"),
    "steps_per_print": Key(int, "passed", least=1),
    "log_level": Key(("debug", "info", "warning", "error", "critical"), "passed"),
    "zero_allow_untested_optimizer": Key(bool, "fixed", "the optimizer is this project's", (True,)),
    "zero_force_ds_cpu_optimizer": Key(bool, "fixed", "--offload-optimizer takes DeepSpeed's CPU-Adam", (True, False)),
    "managed_gradient_accumulation": Key(bool, "fixed", "the step's end is this project's to say", (False,)),
    **_same(Key(dict, "fixed", _OUR_CHECKPOINTS), "checkpoint", "datastates_ckpt"),
    **_same(Key(dict, "fixed", _METRICS), "tensorboard", "wandb", "csv_monitor", "comet"),
    "dataloader_drop_last": Key(bool, "fixed", _ORDER),
    "vocabulary_size": Key(int, "fixed", "it is --model's"),
    "scheduler": Key(dict, "refused", "the learning rate is --lr, --min-lr, --lr-decay-style and --lr-warmup-iters"),
    "activation_checkpointing": Key(dict, "refused", "use --recompute-granularity"),
    "pipeline": Key(dict, "refused", "use --pipeline-model-parallel-size and --pipeline-schedule"),
    "tensor_parallel": Key(dict, "refused", "use --tensor-model-parallel-size"),
    "expert_parallel": Key(dict, "refused", "use --expert-model-parallel-size"),
    "sequence_parallel_size": Key(int, "refused", "use --context-parallel-size", (1,)),
    "use_data_before_expert_parallelism": Key(bool, "refused", "the order of ranks is this project's; leave it out"),
    **_same(Key(dict, "refused", _ORDER), "data_efficiency", "curriculum_learning"),
    **_same(
        Key(dict, "refused", _WHOLE),
        "compression_training",
        "quantize_training",
        "weight_quantization",
        "eigenvalue",
        "sparse_attention",
        "progressive_layer_drop",
    ),
    **_same(Key(dict, "refused", "use --precision"), "amp", "torch_autocast"),
    "autotuning": Key(dict, "refused", "not there: --pipeline-schedule auto searches schedules, batch sizes are flags"),
    "flops_profiler": Key(dict, "refused", "FLOPs and MFU of each step are in metrics.jsonl; --profile-pipeline times"),
    "hybrid_engine": Key(dict, "refused", "this project pretrains and doesn't serve"),
    "elasticity": Key(dict, "refused", "a checkpoint goes on with any number of ranks: --resume or --load"),
    "compile": Key(dict, "refused", "not there: DeepSpeed compiles no graph here"),
    **_same(Key(object, "refused", _REMOVED), "nebula", "graph_harvesting", "sparse_gradients"),
    **_same(Key(bool, "refused", _MEANS), "prescale_gradients", "disable_allgather"),
    "gradient_predivide_factor": Key(float, "refused", _MEANS, (1,)),
    "gradient_allreduce_op": Key(str, "refused", _MEANS, ("mean",)),
}

OLD_TOP_LEVEL = {"bfloat16": "bf16"}
