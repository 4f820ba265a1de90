"""Flags of the commands that run a trained model: which model, which tokenizer, which ranks, which numbers.

May import the standard library and `training.arguments` only, so that `--help` answers without torch. Names are the
trainer's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from training.arguments import Arguments, Unset


@dataclass(frozen=True)
class InferenceArguments:
    """A trained model, on any layout; start under torchrun for more than one rank."""

    load: str
    """Run directory, its checkpoints, one of them, or a Hugging Face directory (16-bit weights, FP8)."""
    model: Unset[str] = None
    """Refuse what --load holds if it isn't of this config.json. By default its own is taken."""
    tokenizer_model: Unset[str] = None
    """The model's tokenizer; by default the one beside it, else the one that its run was given."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Numbers of weights, activations and cache."""
    tensor_model_parallel_size: int = 1
    """Ranks that split each weight matrix, and the tokens between blocks."""
    pipeline_model_parallel_size: int = 1
    """Ranks that split the layers."""
    context_parallel_size: int = 1
    """Ranks that split each sequence; to generate text it is 1."""
    expert_model_parallel_size: int = 1
    """Ranks that share the routed experts of a layer."""
    distributed_backend: Unset[Literal["nccl", "gloo"]] = None
    """By default nccl where there is a GPU and gloo where there isn't."""

    def as_run(self) -> Arguments:
        """The same as a run's flags, for the checks of layouts and of ranks that must agree."""
        return Arguments().replace(
            load=self.load,
            model=self.model,
            tokenizer_model=self.tokenizer_model,
            precision=self.precision,
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            context_parallel_size=self.context_parallel_size,
            expert_model_parallel_size=self.expert_model_parallel_size,
            distributed_backend=self.distributed_backend,
        )
