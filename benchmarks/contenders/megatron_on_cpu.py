"""Lets megatron-core run on CPU and gloo: what asks for CUDA gets the CPU. Import before megatron.

Written for megatron-core 0.16.1 with its local layer spec, without Transformer Engine. Changes torch for the whole
process, so only a process of its own may import it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
_FACTORIES = (
    "zeros ones empty tensor arange full rand randn randint eye as_tensor zeros_like ones_like empty_like full_like "
    "rand_like randn_like linspace empty_strided randperm"
).split()


def _on_cpu(device: Any) -> Any:
    """A device argument with CUDA, or a CUDA device's number, replaced."""
    is_cuda = isinstance(device, int) or str(device).startswith("cuda")
    return CPU if device is not None and is_cuda else device


def _with_cpu_device(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if "device" in named:
            named["device"] = _on_cpu(named["device"])
        return function(*arguments, **named)

    return call


class _Stream:
    """Stands for streams and events: everything is in order already."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _Stream:
        return self

    def __getattr__(self, name: str) -> Callable:
        return lambda *arguments, **named: True


def redirect_torch() -> None:
    """Everything of torch that names CUDA, as far as megatron-core calls it."""
    for name in _FACTORIES:
        setattr(torch, name, _with_cpu_device(getattr(torch, name)))
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    for name in ("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *arguments, **named: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *arguments, **named: 0)
    cuda.is_current_stream_capturing = lambda: False
    cuda.Stream = cuda.Event = _Stream
    stream = _Stream()
    cuda.current_stream = cuda.default_stream = lambda *arguments: stream
    cuda.stream = lambda chosen: contextlib.nullcontext()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *arguments, **named: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *arguments, **named: torch.set_rng_state(state)
    cuda.manual_seed, cuda.initial_seed = torch.manual_seed, torch.initial_seed
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *arguments: None

    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *arguments, **named: self
    torch.nn.Module.cuda = lambda self, *arguments, **named: self  # type: ignore[assignment, method-assign]
    tensor.record_stream = lambda self, *arguments: None
    move, type_name = tensor.to, tensor.type

    def to(self: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        moved = [_on_cpu(x) if isinstance(x, str | torch.device) else x for x in arguments]
        return _with_cpu_device(move)(self, *moved, **named)

    def type_(self: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        """The optimizer sorts parameters by "torch.cuda.FloatTensor"."""
        result = type_name(self, *arguments, **named)
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result

    tensor.to, tensor.type = to, type_
    barrier = dist.barrier
    dist.barrier = lambda *arguments, device_ids=None, **named: barrier(*arguments, **named)  # gloo takes no devices


def patch_megatron() -> None:
    """What still fails after that: paths that assume CUDA copies or Transformer Engine."""
    from megatron.core.transformer import dot_product_attention, multi_latent_attention, torch_norm
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.detach().numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = moe_utils.maybe_move_tensor_to_cpu = to_host
    moe_utils.te_general_gemm = None

    attention = dot_product_attention.DotProductAttention
    make = attention.__init__

    def make_attention(
        self: Any, *arguments: Any, k_channels: Any = None, v_channels: Any = None, **named: Any
    ) -> None:
        make(self, *arguments, **named)
        if v_channels is not None:  # the local attention takes values for as wide as keys
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    attention.__init__ = make_attention

    norm = torch_norm.WrappedTorchNorm
    make_norm = norm.__new__

    def new_norm(cls: Any, config: Any, *arguments: Any, **named: Any) -> Any:
        # It refuses sequence parallelism, though torch's norm only lacks the mark on its parameters.
        parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            module = make_norm(cls, config, *arguments, **named)
        finally:
            config.sequence_parallel = parallel
        for parameter in module.parameters():
            parameter.sequence_parallel = parallel
        return module

    norm.__new__ = new_norm

    # It asks isinstance of Transformer Engine's classes, which are None where that isn't installed.
    for name in ("TELinear", "TEColumnParallelLinear", "TERowParallelLinear", "TELayerNormColumnParallelLinear"):
        if getattr(multi_latent_attention, name, "") is None:
            setattr(multi_latent_attention, name, type("Absent", (), {}))
    multi_latent_attention.HAVE_TE = False
