"""What a flag of Megatron-LM, torchrun, torchtitan or Hugging Face is here, when it isn't a flag of this project.

May import the standard library only. Names are those of Megatron-LM's `megatron/training/arguments.py`; each gets one
line: what to give instead, why nothing is needed, or that it isn't there yet.
"""

from __future__ import annotations

import difflib

_MODEL_KEYS = {
    "num-layers": "num_hidden_layers",
    "decoder-num-layers": "num_hidden_layers",
    "hidden-size": "hidden_size",
    "ffn-hidden-size": "intermediate_size",
    "num-attention-heads": "num_attention_heads",
    "max-position-embeddings": "max_position_embeddings",
    "vocab-size": "vocab_size",
    "padded-vocab-size": "vocab_size",
    "norm-epsilon": "rms_norm_eps",
    "rotary-base": "rope_theta",
    "rope-type": "rope_scaling",
    "rope-scaling-factor": "rope_scaling, factor",
    "use-rope-scaling": "rope_scaling",
    "rotary-scaling-factor": "rope_scaling, factor",
    "mscale": "rope_scaling, mscale",
    "mscale-all-dim": "rope_scaling, mscale_all_dim",
    "q-lora-rank": "q_lora_rank",
    "kv-lora-rank": "kv_lora_rank",
    "qk-head-dim": "qk_nope_head_dim",
    "qk-pos-emb-head-dim": "qk_rope_head_dim",
    "v-head-dim": "v_head_dim",
    "mtp-num-layers": "num_nextn_predict_layers",
    "num-experts": "n_routed_experts",
    "moe-layer-freq": "first_k_dense_replace and moe_layer_freq",
    "moe-ffn-hidden-size": "moe_intermediate_size",
    "moe-shared-expert-intermediate-size": "n_shared_experts · moe_intermediate_size",
    "moe-router-topk": "num_experts_per_tok",
    "moe-router-num-groups": "n_group",
    "moe-router-group-topk": "topk_group",
    "moe-router-topk-scaling-factor": "routed_scaling_factor",
    "moe-router-score-function": "scoring_func",
    "moe-router-enable-expert-bias": "topk_method noaux_tc",
}
"""Megatron's flag -> the key of config.json that says the same."""

_LINES = {
    # Give this instead.
    "bf16": "use --precision bf16",
    "model-parallel-size": "use --tensor-model-parallel-size",
    "batch-size": "use --micro-batch-size",
    "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers": (
        "use --pipeline-layers, the layers of each stage, such as 8,10,9"
    ),
    "account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split": (
        "leave it out: stages are balanced by cost, with head and MTP counted"
    ),
    "ddp-bucket-size ddp-num-buckets": "use --bucket-cap-mb: MiB of fp32 gradients, not numbers of elements or buckets",
    "train-samples": "use --train-iters: samples / --global-batch-size",
    "lr-decay-samples": "use --lr-decay-iters: samples / --global-batch-size",
    "lr-wsd-decay-samples": "use --lr-wsd-decay-iters: samples / --global-batch-size",
    "lr-warmup-samples": "use --lr-warmup-iters: samples / --global-batch-size",
    "lr-warmup-fraction": "use --lr-warmup-iters: the fraction of --lr-decay-iters in steps",
    "warmup": "use --lr-warmup-iters",
    "checkpoint-activations": "use --recompute-granularity full",
    "recompute-activations": "use --recompute-granularity selective",
    "moe-layer-recompute": "use --recompute-granularity selective --recompute-modules moe",
    "persistent-save-interval": "use --save-interval",
    "yaml-cfg": "use --config",
    "use-checkpoint-args use-mp-args-from-checkpoint-args use-checkpoint-opt-param-scheduler": (
        "use --config RUN/config.yaml, which holds every flag of that run; checkpoints load on any layout"
    ),
    "data-args-path per-split-data-args-path": "use --config: a YAML file takes data_path as a list",
    "distributed-timeout-seconds-after-init": "use --distributed-timeout-minutes, which holds all the time",
    "exit-interval": "use --train-iters for a shorter run, and --lr-decay-iters for the steps of the whole schedule",
    "config-logger-dir save-config-filepath": "leave it out: RUN/config.yaml holds every flag; --run-dir chooses RUN",
    "full-validation": "use --eval-iters: the number of global batches of a validation",
    # Always so here, or nothing to choose.
    "sequence-parallel": "leave it out: always on where --tensor-model-parallel-size is above 1",
    "accumulate-allreduce-grads-in-fp32 main-grads-dtype main-params-dtype": (
        "leave it out: gradients are accumulated and reduced in fp32, master weights are fp32, always"
    ),
    "attention-softmax-in-fp32 apply-query-key-layer-scaling disable-bf16-reduced-precision-matmul "
    "fp16-lm-cross-entropy": ("leave it out: the cross entropy and the router work in fp32, attention is torch's own"),
    "calculate-per-token-loss": "leave it out: the loss is always the mean over the tokens of the whole global batch",
    "use-cpu-initialization init-model-with-meta-device lazy-mpu-init no-initialization": (
        "leave it out: initial weights depend on --seed and a parameter's name, not on the layout"
    ),
    "make-vocab-size-divisible-by": "leave it out: any vocab_size splits; padding takes no part in anything",
    "multi-latent-attention swiglu normalization position-embedding-type use-rotary-position-embeddings rotary-percent "
    "rotary-interleaved untie-embeddings-and-output-weights disable-bias-linear qk-layernorm kv-channels "
    "moe-router-pre-softmax": (
        "leave it out: DeepSeek's models are so (MLA, RMSNorm, SwiGLU, RoPE, no tied weights, no bias)"
    ),
    "attention-dropout hidden-dropout": "leave it out: DeepSeek's models have no dropout",
    "transformer-impl use-mcore-models use-legacy-models": "leave it out: there is one implementation, in model/",
    "use-flash-attn attention-backend": "leave it out: torch's scaled_dot_product_attention chooses the kernel",
    "no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion "
    "no-persist-layer-norm no-gradient-accumulation-fusion no-gradient-reduce-div-fusion cross-entropy-loss-fusion "
    "cross-entropy-fusion-impl use-te-activation-func use-fused-weighted-squared-relu moe-permute-fusion "
    "moe-router-fusion": "leave it out: there are no such fused kernels to turn on or off",
    "moe-grouped-gemm moe-use-legacy-grouped-gemm": "leave it out: experts are always one grouped matrix product",
    "moe-router-dtype": "leave it out: the router always scores in fp32",
    "moe-router-load-balancing-type": (
        "leave it out: --aux-loss-alpha weighs the sequence-wise loss, --router-bias-update-rate moves the bias"
    ),
    "moe-pad-expert-input-to-capacity": "leave it out: experts take any number of rows",
    "expert-tensor-parallel-size moe-extended-tp": "leave it out: tensor parallelism doesn't cut experts",
    "vocab-file merge-file tokenizer-type tokenizer-metadata vocab-extra-ids tiktoken-* legacy-tokenizer "
    "trust-remote-code allow-ambiguous-pad-tokens": (
        "leave it out: --data-path holds tokens of any tokenizer; --tokenizer-model only tells the "
        "end-of-document token"
    ),
    "data-cache-path num-dataset-builder-threads object-storage-cache-path mid-level-dataset-surplus": (
        "leave it out: the order of samples is computed from --seed, there are no index files to build or keep"
    ),
    "dataloader-type num-workers no-create-attention-mask-in-dataloader no-mmap-bin-files train-sync-interval": (
        "leave it out: one thread reads ahead from memory-mapped files; documents are shuffled anew every epoch"
    ),
    "no-save-rng no-load-rng data-parallel-random-init": (
        "leave it out: training draws nothing after initialisation, so there is no generator's state to keep"
    ),
    "ckpt-format auto-detect-ckpt-format use-dist-ckpt dist-ckpt-* ckpt-fully-parallel-* no-ckpt-fully-parallel-save "
    "ckpt-assume-constant-structure ckpt-convert-* distrib-optim-fully-reshardable-mem-efficient": (
        "leave it out: there is one format (torch.distributed.checkpoint), which loads on any layout"
    ),
    "exit-on-missing-checkpoint": "leave it out: a --load without a complete checkpoint is always an error",
    "override-opt-param-scheduler": "leave it out: flags always win, a checkpoint keeps none of them",
    "no-check-for-nan-in-loss-and-grad": "leave it out: a loss or gradient norm that isn't finite always ends the run",
    "log-throughput log-throughput-to-tensorboard log-progress log-memory-to-tensorboard log-memory-interval "
    "log-device-memory-used tensorboard-log-interval tensorboard-queue-size log-l2-norm-grad-to-tensorboard "
    "throughput-window-size": (
        "leave it out: speed, memory and gradient norm of every step are in metrics.jsonl and TensorBoard"
    ),
    "log-validation-ppl-to-tensorboard": "leave it out: the perplexity is exp of the validation loss, in nats a token",
    "no-log-loss-scale-to-tensorboard log-world-size-to-tensorboard": (
        "leave it out: the loss scale is in metrics.jsonl and TensorBoard, the world size is said at the start"
    ),
    "use-tp-pp-dp-mapping": "leave it out: ranks are numbered tensor fastest, then context, data, pipeline",
    "disable-gloo-process-groups disable-msc no-one-logger no-async-tensor-model-parallel-allreduce "
    "no-strict-fsdp-dtensor-load no-use-tokenizer-model-from-checkpoint-args no-align-grad-reduce "
    "no-align-param-gather no-scatter-gather-tensors-in-pipeline "
    "no-clone-scatter-output-in-embedding no-overlap-p2p-communication": (
        "leave it out: there is no such thing to turn off"
    ),
    "local-rank": "leave it out: LOCAL_RANK of the environment says it, as torchrun sets it",
    # Sharding over replicas, and the host's memory.
    "use-distributed-optimizer zero zero-optimization": "use --zero-stage 1: replicas share the optimizer's states",
    "use-megatron-fsdp use-torch-fsdp2 fsdp data-parallel-sharding-strategy": (
        "use --zero-stage 2 (gradients shared too) or 3 (parameters too); --help-compositions says beside what"
    ),
    "overlap-param-gather overlap-param-gather-with-optimizer-step torch-fsdp2-* fsdp-double-buffer "
    "suggested-communication-unit-size keep-fp8-transpose-cache": (
        "leave it out: gathering is DeepSpeed's; --deepspeed-config takes its bucket sizes and overlap_comm"
    ),
    "enable-full-sharding-in-hsdp num-distributed-optimizer-instances": (
        "not there yet: --zero-stage shards over all replicas alike"
    ),
    "optimizer-cpu-offload": "use --offload-optimizer cpu with --zero-stage 1, 2 or 3",
    "optimizer-offload-fraction overlap-cpu-optimizer-d2h-h2d use-torch-optimizer-for-cpu-offload": (
        "leave it out: --offload-optimizer cpu moves all optimizer states, and the step is DeepSpeed's CPU-Adam"
    ),
    "no-pin-cpu-grads no-pin-cpu-params": (
        "leave it out: pin_memory in the offload sections of --deepspeed-config says it"
    ),
    "fp16": "use --precision fp16",
    # Megatron-DeepSpeed's.
    "deepspeed": "leave it out: --zero-stage or --deepspeed-config turn DeepSpeed on",
    "ds-config": "use --deepspeed-config",
    "deepspeed-activation-checkpointing": "use --recompute-granularity full",
    "no-pipeline-parallel": "leave it out: --pipeline-model-parallel-size is 1 by default, and ZeRO 2 and 3 need that",
    "cpu-optimizer cpu-torch-adam": "use --offload-optimizer cpu with --zero-stage 1, 2 or 3",
    "remote-device": "use --offload-param cpu or nvme with --zero-stage 3",
    "zero-reduce-scatter zero-contigious-gradients zero-reduce-bucket-size zero-allgather-bucket-size": (
        "use --deepspeed-config with reduce_scatter, contiguous_gradients, reduce_bucket_size or allgather_bucket_size"
    ),
    # Not there yet, with what one can do today.
    "cpu-offloading-num-layers": "not there yet: activations stay on the device; --recompute-granularity saves them",
    "fp8-* no-fp8-wgrad fp4-* first-last-layers-bf16 num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 "
    "reuse-grad-buf-for-mxfp8-param-ag moe-router-padding-for-fp8 kitchen-*": (
        "not there yet: --precision has fp32, bf16 and fp16"
    ),
    "grad-reduce-in-bf16 ddp-reduce-scatter-with-fp32-accumulation": (
        "use --grad-compression bf16: gradients travel in bf16 and are summed in fp32"
    ),
    "use-precision-aware-optimizer": "leave it out: --exp-avg-dtype and --exp-avg-sq-dtype work without it",
    "num-layers-per-virtual-pipeline-stage": (
        "use --pipeline-schedule interleaved with --num-virtual-stages-per-pipeline-rank"
    ),
    "microbatch-group-size-per-virtual-pipeline-stage": (
        "leave it out: interleaved takes as many micro-batches in turn as there are pipeline ranks"
    ),
    "overlap-p2p-communication overlap-p2p-communication-warmup-flush": (
        "leave it out: messages of the pipeline always overlap with computation"
    ),
    "virtual-pipeline-model-parallel-size": (
        "use --num-virtual-stages-per-pipeline-rank with --pipeline-schedule interleaved"
    ),
    "deallocate-pipeline-outputs": "leave it out: what a stage hands on is freed once it was received",
    "pipeline-dtype": "leave it out: what stages hand on has the type that --precision says",
    "standalone-embedding-stage": "use --pipeline-layers with 0 for the first stage",
    "delay-wgrad-compute": (
        "use --pipeline-schedule zb-v or another zero-bubble one; beside --overlap-moe-expert-parallel-comm dualpipe-v"
    ),
    "defer-embedding-wgrad-compute wgrad-deferral-limit": (
        "leave it out: a zero-bubble --pipeline-schedule defers layers' weight gradients, the head's would keep logits"
    ),
    "rampup-batch-size decrease-batch-size-if-needed step-batch-size-schedule": (
        "not there yet: --global-batch-size is the same at every step"
    ),
    "recompute-method recompute-num-layers": (
        "leave it out: --recompute-granularity full recomputes each block by itself, and all of them"
    ),
    "distribute-saved-activations": "leave it out: what a block keeps is split over tensor-parallel ranks already",
    "moe-token-dispatcher-type moe-enable-deepep moe-deepep-num-sms moe-hybridep-*": (
        "leave alltoall out: tokens always travel by torch's all-to-all; other ways are not there yet"
    ),
    "moe-shared-expert-overlap": "leave it out: shared experts are always computed while tokens travel",
    "cp-comm-type hierarchical-context-parallel-sizes": (
        "leave it out: --context-parallel-size gathers the keys' latents, always in one message"
    ),
    "tp-comm-* disable-tp-comm-*": "not there yet: tensor-parallel messages don't overlap with matrix products",
    "train-data-path valid-data-path test-data-path multiple-validation-sets validation-set-names": (
        "not there yet: use --data-path, and --split for the shares of training, validation and test"
    ),
    "start-eval-at-iter eval-global-batch-size eval-micro-batch-size skip-train test-mode": (
        "not there yet: --eval-interval and --eval-iters are all that a validation knows"
    ),
    "mock-data sample-rate": (
        "not there yet: bash scripts/pretrain_multinode.sh makes a corpus where --data-path isn't given"
    ),
    "no-load-optim finetune": "use --pretrained-checkpoint: it takes weights alone and begins at step 0",
    "load-main-params-from-ckpt no-save-optim": "not there: --load takes weights, optimizer state and step together",
    "ckpt-step": "use --load: beside a run it takes one of its checkpoints, RUN/checkpoints/step_00000100",
    "save-retain-interval": "not there yet: every checkpoint of --save-interval is kept",
    "async-save use-persistent-ckpt-worker non-persistent-* replication replication-*": (
        "not there yet: a checkpoint is written while training waits, to --save"
    ),
    "exit-duration-in-mins exit-signal exit-signal-handler exit-signal-handler-for-*": (
        "not there yet: SIGTERM ends the run cleanly but doesn't save; set --save-interval, and go on with --resume"
    ),
    "inprocess-* enable-ft-package calc-ft-timeouts adlr-autoresume adlr-autoresume-interval": (
        "not there yet: a failing rank ends the run; start it again with --resume"
    ),
    "moe-per-layer-logging": "leave it out: TensorBoard's 4_detail/expert_load shows every layer's loads",
    "timing-log-level timing-log-option no-barrier-with-level-1-timing log-timers-to-tensorboard "
    "log-runtime-to-tensorboard runtime-time-unit log-energy log-params-norm log-num-zeros-in-grad "
    "log-max-attention-logit moe-routing-trace-path": (
        "not there yet: what is measured of every step is in metrics.jsonl and TensorBoard"
    ),
    "wandb-*": (
        "not there yet: upload RUN/metrics.jsonl, one JSON object a step; --tensorboard-dir chooses another place"
    ),
    "one-logger-* app-tag-run-name app-tag-run-version": (
        "not there: it is NVIDIA's own; RUN/metrics.jsonl has every step"
    ),
    "log-straggler disable-straggler-on-startup straggler-* gpu-sniff-test-interval run-workload-inspector-server": (
        "not there yet: RUN/logs has a file for each rank"
    ),
    "profile profile-step-start profile-step-end profile-ranks use-pytorch-profiler record-memory-history "
    "memory-snapshot-path": (
        "not there yet: --profile-pipeline measures one step; for more start python under a profiler of your own"
    ),
    "logging-level": "not there yet: RUN/logs has every line of every rank",
    "manual-gc manual-gc-interval no-manual-gc-eval empty-unused-memory-level": (
        "not there yet: Python and torch collect memory by themselves"
    ),
    "decoupled-lr decoupled-min-lr head-lr-mult": "not there yet: one --lr holds for all parameters",
    "start-weight-decay end-weight-decay weight-decay-incr-style no-weight-decay-cond-type": (
        "not there yet: --weight-decay is constant and spares norms"
    ),
    "embedding-init-method-std init-method-xavier-uniform": (
        "not there yet: all matrices are drawn from a normal distribution of --init-method-std"
    ),
    "muon-*": "not there yet: --optimizer has adamw and sgd",
    "iterations-to-skip result-rejected-tracker-filename check-for-spiky-loss check-for-large-grads rerun-mode "
    "error-injection-*": "not there yet: a step is never skipped or repeated; --clip-grad bounds its gradient",
    "check-weight-hash-across-dp-replicas-interval": (
        "not there yet: the ranks' flags, files and code are compared at the start"
    ),
    "deterministic-mode": (
        "not there yet: initial weights and data order depend on --seed only, kernels are torch's choice"
    ),
    "use-nccl-ub use-sharp sharp-enabled-group disable-symmetric-registration ddp-pad-buckets-for-high-nccl-busbw "
    "ddp-average-in-collective nccl-communicator-config-path high-priority-stream-groups "
    "pipeline-model-parallel-comm-backend use-ring-exchange-p2p": "not there yet: set NCCL's own environment variables",
    "dump-param-to-param-group-map": "not there: matrices are decayed, norms aren't",
    # Other models and other tasks.
    "encoder-num-layers encoder-seq-length decoder-seq-length group-query-attention num-query-groups softmax-type "
    "window-size window-attn-skip-freq relative-attention-* rotary-seq-len-interpolation-factor no-rope-freq "
    "no-position-embedding mrope-section apply-layernorm-1p apply-residual-connection-post-layernorm openai-gelu "
    "squared-relu quick-geglu activation-func-clamp-value glu-linear-offset add-qkv-bias qk-l2-norm onnx-safe "
    "fp32-residual-connection moe-input-jitter-eps moe-apply-probs-on-input "
    "moe-router-force-load-balancing moe-use-upcycling moe-upcycling-granularity mamba-* hybrid-* is-hybrid-model "
    "disable-mamba-mem-eff-path heterogeneous-* spec enable-experimental": (
        "not here: DeepSeek-V2 and V3 have no such part; --model takes their config.json"
    ),
    "retro-* retriever-* bert-* output-bert-embeddings biencoder-* ict-* titles-data-path query-in-block-prob "
    "use-one-sent-docs evidence-data-path block-data-path embedding-path indexer-* mask-prob short-seq-prob": (
        "not here: this project pretrains DeepSeek-V2 and V3 on text, not encoders or retrievers"
    ),
    "vision-* dino-* swin-backbone-type num-classes img-h img-w num-channels patch-dim classes-fraction "
    "data-per-class-fraction no-data-sharding mask-type mask-factor iter-per-epoch": (
        "not here: this project pretrains DeepSeek-V2 and V3 on text, not on pictures"
    ),
    "perform-rl-step rl-* grpo-* langrl-* sft sft-*": "not here: this project pretrains; tune with another one",
    "inference-* max-tokens-to-oom flash-decode enable-cuda-graph external-cuda-graph cuda-graph-* te-rng-tracker "
    "use-legacy-static-engine decode-only-cuda-graphs symmetric-ar-type nccl-all-reduce-for-prefill "
    "mlp-chunks-for-prefill disable-chunked-prefill cache-mla-latents moe-pad-experts-for-cuda-graph-inference": (
        "not here: this project pretrains and doesn't serve; CUDA graphs aren't used"
    ),
    # Other launchers' and projects' words.
    "nproc-per-node nnodes node-rank master-addr master-port rdzv-* standalone max-restarts": (
        "it is torchrun's: put it before pretrain_deepseek.py, or set NNODES, NODE_RANK, NPROC_PER_NODE … for "
        "scripts/pretrain_multinode.sh"
    ),
    "tp tp-size tensor-parallel-size tensor-parallel parallelism.tensor-parallel-degree": (
        "use --tensor-model-parallel-size"
    ),
    "pp pp-size pipeline-parallel-size parallelism.pipeline-parallel-degree": "use --pipeline-model-parallel-size",
    "ep ep-size expert-parallel-size parallelism.expert-parallel-degree": "use --expert-model-parallel-size",
    "cp cp-size parallelism.context-parallel-degree": "use --context-parallel-size",
    "dp dp-size data-parallel-size parallelism.data-parallel-replicate-degree parallelism.data-parallel-shard-degree": (
        "leave it out: data parallel size = ranks / (--tensor-model-parallel-size · --pipeline-model-parallel-size · "
        "--context-parallel-size)"
    ),
    "parallelism.pipeline-parallel-schedule": "use --pipeline-schedule",
    "training.steps max-steps steps": "use --train-iters",
    "training.local-batch-size mbs per-device-train-batch-size": "use --micro-batch-size",
    "training.global-batch-size gbs": "use --global-batch-size",
    "gradient-accumulation-steps": (
        "use --global-batch-size: micro-batches of a step = it / (--micro-batch-size · data parallel size)"
    ),
    "training.seq-len seq-len sequence-length max-seq-length": "use --seq-length",
    "training.max-norm max-grad-norm": "use --clip-grad",
    "training.dataset training.dataset-path dataset dataset-path": "use --data-path, the prefix of .bin/.idx files",
    "optimizer.lr learning-rate": "use --lr",
    "optimizer.name": "use --optimizer",
    "lr-scheduler.warmup-steps warmup-steps": "use --lr-warmup-iters",
    "lr-scheduler-type": "use --lr-decay-style",
    "checkpoint.interval save-steps": "use --save-interval",
    "checkpoint.folder checkpoint-dir": "use --save",
    "activation-checkpoint.mode gradient-checkpointing": "use --recompute-granularity full",
    "job.config-file": "use --config",
    "output-dir log-dir": "use --run-dir",
}
"""Flags, separated by blanks, where * stands for the rest of a name -> the line that all of them get."""

EXACT = {name: line for names, line in _LINES.items() for name in names.split() if not name.endswith("*")} | {
    name: f"the model's shape comes from --model: {key} in its config.json" for name, key in _MODEL_KEYS.items()
}
"""Flag without its dashes -> line."""
FAMILIES = {
    name.removesuffix("*"): line for names, line in _LINES.items() for name in names.split() if name.endswith("*")
}
"""Beginning of a flag's name -> line."""


def instead_of(flag: str) -> str | None:
    """The line for `flag` (dashes or underscores, with or without the leading ones); None for a name nobody knows."""
    name = flag.lstrip("-").replace("_", "-")
    if name in EXACT:
        return EXACT[name]
    for form in (name, name.removeprefix("no-")):  # switches have both forms in newer versions
        if form in EXACT:
            return EXACT[form]
        for beginning, line in FAMILIES.items():
            if form.startswith(beginning):
                return line
    return None


def nearly(flag: str) -> str | None:
    """A known foreign flag that `flag` misspells, without dashes; None where there is none."""
    near = difflib.get_close_matches(flag.lstrip("-").replace("_", "-"), EXACT, n=1, cutoff=0.9)
    return near[0] if near else None
