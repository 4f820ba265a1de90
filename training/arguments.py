"""The flags: frozen dataclass groups, each field a flat flag named as Megatron-LM names it, its docstring the help.

May import the standard library and tyro. Parsing and the YAML form are in command_line.py, cross-checks in validate.py.
Names follow Megatron-LM's `megatron/training/arguments.py`; defaults follow the DeepSeek-V3 report (arXiv 2412.19437).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import tyro


def numbers_from_text(text: str, number: type[int] | type[float]) -> tuple[Any, ...]:
    """ "2,1,1" as (2, 1, 1); an empty text is (). Raises ValueError for anything else."""
    try:
        return tuple(number(word) for word in text.split(",")) if text.strip() else ()
    except ValueError:
        kind = "whole numbers" if number is int else "numbers"
        raise ValueError(f"must be {kind} such as 2,1,1, not {text!r}") from None


def _comma_list(number: type[int] | type[float], metavar: str) -> Any:
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: numbers_from_text(words[0], number),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda values: [",".join(map(str, values))],
    )


LayerList = Annotated[tuple[int, ...], _comma_list(int, "N,N,...")]
CostList = Annotated[tuple[float, ...], _comma_list(float, "F,I,W[,SEND]")]

RECOMPUTE_MODULES = ("core_attn", "mla_up_proj", "layernorm", "mlp", "mlp_act", "moe", "moe_act", "shared_experts")
"""What `--recompute-modules` knows, as Megatron-core names it; "mlp_act" of dense and shared SwiGLU is our addition."""
DEEPSEEK = "deepseek"
DEEPSEEK_RECOMPUTES = ("mla_up_proj", "layernorm", "mlp_act", "moe_act")
"""What DeepSeek-V3 recomputed (2412.19437, sections 3.2.3 and 3.3): RMSNorm, MLA's up-projections, SwiGLU."""

GradCompression = Literal["none", "bf16", "fp8", "int8", "int4", "1bit", "topk", "powersgd"]
Kernels = Literal["auto", "torch", "native", "triton", "cuda"]

INITIAL_LOSS_SCALE = 65536.0

T = TypeVar("T")
Unset = Annotated[T | None, tyro.conf.arg(help_behavior_hint="")]
"""A flag that has no value until one is given: its help says what happens then, not "default: None"."""


@dataclass(frozen=True)
class RunArguments:
    """Where the run lives and where its flags come from."""

    config: Unset[str] = None
    """YAML file of flags, with dashes or underscores. The command line wins over it, and it over the defaults."""
    run_dir: str = "runs/default"
    """Directory of this run: config.yaml, metrics.jsonl, checkpoints/, tensorboard/, logs/."""
    resume: bool = False
    """Go on from the newest checkpoint in --run-dir; where there is no earlier run, start anew."""
    overwrite: bool = False
    """Start anew in --run-dir; an earlier run there is moved aside to RUN.old-TIMESTAMP, never deleted."""
    seed: int = 1234
    """Seed of initial weights, data order and every random generator."""


@dataclass(frozen=True)
class ModelArguments:
    """What is trained."""

    model: Unset[str] = None
    """Required: a Hugging Face config.json of type deepseek_v2 or deepseek_v3, such as configs/models/tiny_v3.json."""
    init_method_std: Unset[float] = None
    """Standard deviation of initial weights; by default the model's initializer_range (DeepSeek-V3 used 0.006)."""
    mtp_loss_scaling_factor: float = 0.3
    """Weight λ of the multi-token-prediction loss: λ/D times the sum over D depths."""
    mtp_hidden: Literal["after-norm", "before-norm"] = "after-norm"
    """The hidden state that feeds MTP's first depth: after the final norm (Hugging Face, Megatron) or before it."""
    aux_loss_alpha: Unset[float] = None
    """Weight of the sequence-wise balance loss (V2: 0.003); by default the model's. (Megatron: --moe-aux-loss-coeff)"""
    moe_device_level_aux_loss_coeff: float = 0.0
    """Weight of V2's balance loss over the model's n_group groups of experts, a group a device (V2: 0.05)."""
    moe_comm_aux_loss_coeff: float = 0.0
    """Weight of V2's balance loss over how many tokens are sent to each of these groups (V2: 0.02)."""
    moe_z_loss_coeff: float = 0.0
    """Weight of the router z-loss, the mean over tokens of the squared log-sum-exp of the router's logits."""
    router_bias_update_rate: float = 0.001
    """Speed γ of the router bias that balances experts without a loss. (Megatron: --moe-router-bias-update-rate)"""
    moe_expert_capacity_factor: Unset[float] = None
    """Drop choices, in training, beyond this times an expert's fair share of a rank's micro-batch; by default none."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """What is dropped first: choices of the lowest weight, or the last ones."""
    moe_token_drop_level: Literal["expert", "device"] = "expert"
    """Whose capacity it is: an expert's, or a device's, which is one of n_group groups of experts (V2: factor 1)."""


@dataclass(frozen=True)
class ParallelArguments:
    """How ranks share the model. Data parallel size = world size / (tensor · pipeline · context)."""

    tensor_model_parallel_size: int = 1
    """Ranks that split each weight matrix, and the sequence between blocks."""
    pipeline_model_parallel_size: int = 1
    """Ranks that split the layers."""
    context_parallel_size: int = 1
    """Ranks that split each sequence, in 2 chunks each; --seq-length must divide, there is no padding."""
    expert_model_parallel_size: int = 1
    """Ranks that share the routed experts of a layer."""
    pipeline_schedule: Literal[
        "1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v", "auto"
    ] = "1f1b"
    """Order of the passes in the pipeline; docs/pipeline.md says which one when."""
    num_virtual_stages_per_pipeline_rank: Unset[int] = None
    """Stages that each rank holds under the schedule interleaved, by default 2, or auto, by default what is fastest."""
    pipeline_layers: LayerList = ()
    """Layers of each stage in the model's order, such as 2,1,1; by default balanced by cost, head and MTP counted."""
    pipeline_model_parallel_layout: Unset[str] = None
    """The same as Megatron writes it, such as "Et*3|(tt|)*28,mL": E embedding, t layer, m MTP, L head, | next stage."""
    overlap_moe_expert_parallel_comm: bool = False
    """For dualpipe-v: a forward runs together with a backward, and tokens of one travel while the other computes."""
    pipeline_costs: CostList = ()
    """For auto: times of a rank's forward, input gradient and weight gradient, and of a message; by default counted."""
    pipeline_memory_limit: Unset[float] = None
    """For auto: how many micro-batches' activations a rank may keep; by default as many as there are ranks, as 1f1b."""


@dataclass(frozen=True)
class TrainingArguments:
    """How long, in what batches, in which numbers."""

    train_iters: int = 100
    """Optimizer steps."""
    micro_batch_size: int = 1
    """Sequences of one forward pass on one data-parallel rank."""
    global_batch_size: int = 8
    """Sequences of one optimizer step over all ranks: a multiple of micro-batch size · data parallel size."""
    seq_length: int = 512
    """Tokens of a sequence: a multiple of tensor · context parallel size, and of 2 · context size above 1."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Numbers of weights and activations; bf16 and fp16 keep fp32 master weights and gradients."""
    loss_scale: Unset[float] = None
    """For fp16: a constant loss scale, a power of two; by default it is dynamic, as the next four flags say."""
    initial_loss_scale: Unset[float] = None
    """For fp16: the loss scale at the start, a power of two; by default 65536."""
    min_loss_scale: Unset[float] = None
    """For fp16: the loss scale is never lowered below this; by default 1."""
    loss_scale_window: Unset[int] = None
    """For fp16: steps without overflow after which the loss scale doubles; by default 1000."""
    hysteresis: Unset[int] = None
    """For fp16: from which overflow since the last doubling on each halves the loss scale; by default 1, the first."""
    recompute_granularity: Literal["none", "full", "selective"] = "none"
    """Activations computed again in the backward pass: none, all but each layer's input, or those of some modules."""
    recompute_modules: tuple[str, ...] = ()
    """For selective: of core_attn, mla_up_proj, layernorm, mlp, mlp_act, moe, moe_act, shared_experts; or deepseek:
    DeepSeek-V3's own, mla_up_proj layernorm mlp_act moe_act. By default core_attn."""
    eval_interval: int = 100
    """Steps between validations; there is always one after the last step."""
    eval_iters: int = 10
    """Global batches of one validation; 0 turns validation off."""

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The modules of selective recomputation by name, each once: the default and "deepseek" spelt out."""
        names = self.recompute_modules or ("core_attn",)
        spelt = (DEEPSEEK_RECOMPUTES if name == DEEPSEEK else (name,) for name in names)
        return tuple(dict.fromkeys(name for group in spelt for name in group))


@dataclass(frozen=True)
class OptimizerArguments:
    """The optimizer and its learning rate."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Update rule; weight decay is decoupled and spares norms in either."""
    lr: float = 2.2e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """Decay after warm-up. wsd (warm-up, stable, decay) holds the peak and decays in the last --lr-wsd-decay-iters."""
    lr_decay_iters: Unset[int] = None
    """Step at which the minimum is reached; by default --train-iters."""
    lr_wsd_decay_iters: Unset[int] = None
    """Length of wsd's decay in steps."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of wsd's decay."""
    lr_warmup_iters: int = 0
    """Steps of linear warm-up."""
    lr_warmup_init: float = 0.0
    """Learning rate at which the warm-up starts."""
    adam_beta1: float = 0.9
    """Decay of Adam's first moment."""
    adam_beta2: float = 0.95
    """Decay of Adam's second moment."""
    adam_eps: float = 1e-8
    """Added to the root of Adam's second moment."""
    sgd_momentum: float = 0.9
    """Momentum of SGD."""
    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    """Numbers in which Adam's first moment is kept (DeepSeek-V3: bf16); it is computed in fp32."""
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = "fp32"
    """Numbers in which Adam's second moment is kept (DeepSeek-V3: bf16); it is computed in fp32."""
    weight_decay: float = 0.1
    """Weight decay."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""


@dataclass(frozen=True)
class ZeroArguments:
    """What is sharded over replicas, and what lies in the host's memory, by DeepSpeed; docs/zero.md says what when."""

    zero_stage: Unset[Literal[0, 1, 2, 3]] = None
    """What replicas share: 1 optimizer states, 2 gradients too, 3 parameters too; by default the file's, else 0."""
    offload_optimizer: Unset[Literal["none", "cpu", "nvme"]] = None
    """Where optimizer states and their step are: the device (none), the host's memory, or a disk (stage 3)."""
    offload_param: Unset[Literal["none", "cpu", "nvme"]] = None
    """For stage 3: where parameters lie when they aren't in use."""
    nvme_path: Unset[str] = None
    """For nvme: a directory on each node's own fast disk."""
    deepspeed_config: Unset[str] = None
    """DeepSpeed's JSON file. What it leaves out comes from flags; what contradicts them is refused."""
    help_compositions: bool = False
    """Print what goes with what (ZeRO stages, parallelism, offload, compression, precision) and leave."""


@dataclass(frozen=True)
class DataArguments:
    """The text that is trained on."""

    data_path: tuple[str, ...] = ()
    """Required: prefix of .bin/.idx files by tools/preprocess_data.py or Megatron, or WEIGHT PREFIX WEIGHT PREFIX."""
    split: str = "969,30,1"
    """Shares of the documents for training, validation and test."""
    tokenizer_model: Unset[str] = None
    """What made the data, SentencePiece (*.model) or Hugging Face's tokenizer.json or its directory. The next three
    flags need it, for the token at a document's end; a copy lies in every checkpoint."""
    reset_position_ids: bool = False
    """Count positions from 0 again after each end of document."""
    reset_attention_mask: bool = False
    """Keep attention inside each document."""
    eod_mask_loss: bool = False
    """Take the loss of end-of-document tokens out."""
    bigram_baseline: bool = False
    """Also show the validation loss of a smoothed bigram model fitted on the training tokens."""


@dataclass(frozen=True)
class CheckpointArguments:
    """Saving and loading."""

    save: Unset[str] = None
    """Directory of checkpoints; by default RUN/checkpoints."""
    load: Unset[str] = None
    """Another run's directory, or that of its checkpoints: start from the newest one, at its step; or a checkpoint."""
    pretrained_checkpoint: Unset[str] = None
    """Start, at step 0, from weights alone: of a Hugging Face directory, of what tools/hf_checkpoint.py imported, of a
    run or a checkpoint (16-bit ones if it has them, see the next flag)."""
    save_16bit_weights: bool = False
    """With every checkpoint also save the model whole, in 16 bits, as safetensors that need no layout: .../weights.
    DeepSpeed's file may ask for it too."""
    save_interval: Unset[int] = None
    """Steps between checkpoints; by default there is only the one after the last step, which is always there."""


@dataclass(frozen=True)
class LoggingArguments:
    """What is shown."""

    log_interval: int = 10
    """Steps between lines of progress where the terminal can't show a bar."""
    tensorboard_dir: Unset[str] = None
    """Directory of TensorBoard's files; by default RUN/tensorboard."""
    peak_tflops: Unset[float] = None
    """Dense peak TFLOP/s of one device, for MFU; by default looked up for known GPUs."""
    profile_pipeline: bool = False
    """Measure when each action of the pipeline ran in this start's 5th step (or its last, if it has fewer), and draw
    it beside the simulation: RUN/pipeline/step_*.txt, .png (with matplotlib), .json and .trace.json (Perfetto)."""


@dataclass(frozen=True)
class DistributedArguments:
    """Process groups and gradient communication."""

    distributed_backend: Unset[Literal["nccl", "gloo"]] = None
    """By default $TORCH_DISTRIBUTED_BACKEND, else nccl where there is a GPU and gloo where there isn't."""
    distributed_timeout_minutes: float = 10.0
    """A collective that waits longer ends the run."""
    distributed_start_timeout_seconds: float = 300.0
    """Seconds in which all ranks must have come; then the missing ones are named."""
    bucket_cap_mb: float = 25.0
    """Size of a gradient bucket in MiB of fp32 gradients: larger ones mean fewer messages and less overlap."""
    overlap_grad_reduce: bool = True
    """Reduce gradient buckets while the backward pass still runs."""


@dataclass(frozen=True)
class CompressionArguments:
    """Gradients that travel in fewer bytes than fp32; docs/compression.md says which codec when."""

    grad_compression: GradCompression = "none"
    """Code in which gradients travel where they are summed over replicas; the sums are fp32."""
    grad_compression_warmup_steps: int = 0
    """First steps of the run whose gradients travel in fp32."""
    grad_compression_block_size: Unset[int] = None
    """Values that share a scale, a power of two from 32 (1bit: 256) to 4096; by default 256, 1bit 1024."""
    grad_compression_residual: Unset[Literal["none", "fp32", "bf16", "int8"]] = None
    """Error feedback: in what the part that the code didn't carry is kept for the next step; by default the codec's."""
    grad_compression_decay: Unset[float] = None
    """Factor on the residual before it is added to the next step's gradient; by default 1."""
    grad_compression_density: Unset[float] = None
    """For topk: share of the values that travel; by default 0.01."""
    grad_compression_topk_transport: Unset[Literal["region", "gather"]] = None
    """For topk: each rank sums a region of the gradient (default), or every rank gets everybody's entries."""
    grad_compression_rank: Unset[int] = None
    """For powersgd: rank r of the two factors that travel instead of a matrix; by default 8."""
    grad_compression_inner_size: Unset[int] = None
    """Consecutive replicas, such as those of a node, that sum among themselves first: only a part of their bytes then
    leaves the group. Not for topk and powersgd; by default 1, which is one hop over all."""
    grad_compression_exclude: tuple[str, ...] = ("vector", "router", "embedding")
    """What travels in fp32 all the same: of vector (one dimension), router, embedding, head."""
    kernels: Unset[Kernels] = None
    """Implementation of the codecs: PyTorch, C, Triton or CUDA C++; by default $KERNELS, else the fastest there is."""


@dataclass(frozen=True)
class Arguments:
    """All flags of a run, by group: `arguments.optimizer.lr` is `--lr`."""

    run: RunArguments = field(default_factory=RunArguments)
    model: ModelArguments = field(default_factory=ModelArguments)
    parallel: ParallelArguments = field(default_factory=ParallelArguments)
    training: TrainingArguments = field(default_factory=TrainingArguments)
    optimizer: OptimizerArguments = field(default_factory=OptimizerArguments)
    zero: ZeroArguments = field(default_factory=ZeroArguments)
    data: DataArguments = field(default_factory=DataArguments)
    checkpoint: CheckpointArguments = field(default_factory=CheckpointArguments)
    logging: LoggingArguments = field(default_factory=LoggingArguments)
    distributed: DistributedArguments = field(default_factory=DistributedArguments)
    compression: CompressionArguments = field(default_factory=CompressionArguments)

    def flat(self) -> dict[str, Any]:
        """Every flag's value under its name, in the order of `--help`."""
        return {name: getattr(getattr(self, group), name) for name, group in GROUP_OF.items()}

    def replace(self, **values: Any) -> Arguments:
        """A copy with some flags changed: `arguments.replace(lr=1e-3, seed=2)`. Raises KeyError for an unknown name."""
        by_group: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            by_group.setdefault(GROUP_OF[name], {})[name] = value
        groups = {group: dataclasses.replace(getattr(self, group), **changed) for group, changed in by_group.items()}
        return dataclasses.replace(self, **groups)


GROUP_OF: dict[str, str] = {
    flag.name: group.name
    for group in dataclasses.fields(Arguments)
    for flag in dataclasses.fields(group.default_factory)  # type: ignore[arg-type]
}
"""Flag name -> name of its group."""
