"""One rank of the ZeRO benchmark: what lives in memory after a backward pass, and what a step sends.

Lives here: what `benchmarks/zero.py` calls on every rank. May import every room. A tensor's role is known by identity:
it shares the memory of a parameter, of a state of the optimizer, or of a gradient that somebody holds.
"""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.pipeline_rank import profiled
from model.config import DeepSeekConfig
from model.microbatch import MicroBatch
from parallel.gradients import GradientReducer
from parallel.mesh import Layout, Mesh
from parallel.sharding import sharding_of
from training.arguments import Arguments
from training.engine import Engine

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "models" / "tiny_v3.json"
LENGTH = 32


class Traffic:
    """While entered, torch's collectives count what this rank sends by the bandwidth-optimal algorithm, in bytes.

    To be entered before DeepSpeed is imported, which keeps some of these functions. N ranks: an all-reduce 2 (N - 1)/N
    of the tensor; a reduce, broadcast, reduce-scatter or all-to-all (N - 1)/N of the whole one, as does an all-gather.
    """

    _WHOLE = {
        "all_reduce": lambda arguments: 2 * _bytes(arguments[0]),
        "reduce": lambda arguments: _bytes(arguments[0]),
        "broadcast": lambda arguments: _bytes(arguments[0]),
        "all_gather": lambda arguments: _bytes(arguments[0]),
        "all_gather_into_tensor": lambda arguments: _bytes(arguments[0]),
        "all_gather_single": lambda arguments: _bytes(arguments[0]),
        "reduce_scatter": lambda arguments: _bytes(arguments[1]),
        "reduce_scatter_tensor": lambda arguments: _bytes(arguments[1]),
        "reduce_scatter_single": lambda arguments: _bytes(arguments[1]),
        "all_to_all_single": lambda arguments: _bytes(arguments[1]),
    }
    _NAMES = ("tensor", "output", "output_tensor", "tensor_list", "output_tensor_list", "input", "input_list")

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()

    def __enter__(self) -> Traffic:
        self._functions = {name: getattr(dist, name) for name in self._WHOLE if hasattr(dist, name)}
        for name, function in self._functions.items():
            setattr(dist, name, self._counting(name, function))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._functions.items():
            setattr(dist, name, function)

    def _counting(self, name: str, function: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            tensors = [*arguments, *(options[key] for key in self._NAMES if key in options)]
            ranks = dist.get_world_size(options.get("group"))
            self.sent[name] += round(self._WHOLE[name](tensors) * (ranks - 1) / ranks)
            return function(*arguments, **options)

        return counted


def _bytes(tensors: torch.Tensor | Iterable[torch.Tensor]) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_bytes, tensors))


def live_storages() -> dict[int, torch.UntypedStorage]:
    """By address, of every tensor that Python knows and that has memory."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        # Not isinstance, which asks lazy modules for their class.
        if issubclass(type(thing), torch.Tensor) and thing.layout == torch.strided and thing.device.type != "meta":
            storage = thing.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage
    return found


def _tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        yield from _tensors_in(list(thing.values()))
    elif isinstance(thing, list | tuple):
        for part in thing:
            yield from _tensors_in(part)


def tensors_by_role(engine: Engine) -> dict[str, list[torch.Tensor]]:
    """Parameters, masters, moments, gradients as backward leaves them, and what is kept of those for an offloaded step:
    as whoever owns them holds them."""
    parameters = [parameter for _, parameter in engine.named_parameters()]
    shards = [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]
    inner = engine.optimizer.inner
    inner = inner if isinstance(inner, list) else [inner]
    masters = [master for optimizer in inner for master in optimizer.state]
    moments = [list(_tensors_in(state)) for optimizer in inner for state in optimizer.state.values()]
    gradients: list[Any] = [parameter.grad for parameter in parameters]
    if isinstance(engine.reducer, GradientReducer):
        gradients += [bucket.buffer for bucket in engine.reducer.buckets]
    engines = getattr(engine.optimizer, "engines", [getattr(engine.optimizer, "engine", None)])
    for held in (each.optimizer for each in engines if each is not None):
        for name in ("averaged_gradients", "all_grad_tensors", "grad_partitions_flat_buffer"):
            gradients.append(getattr(held, name, None))
    return {
        "parameters": [*parameters, *shards],
        "gradients": list(_tensors_in(gradients)),
        "masters": masters,
        "moments": list(_tensors_in(moments)),
        "copies": list(_tensors_in([master.grad for master in masters])),
    }


def bytes_by_role(engine: Engine, before: dict[int, torch.UntypedStorage]) -> dict[str, int]:
    """Of all tensors but those that lived before; memory that several share counts once, for the first role."""
    found = {address: storage.nbytes() for address, storage in live_storages().items() if address not in before}
    by_role = {}
    for role, tensors in tensors_by_role(engine).items():
        addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        by_role[role] = sum(found.pop(address, 0) for address in addresses)
    return by_role | {"other": sum(found.values())}


def microbatches(config: DeepSeekConfig, count: int, mesh: Mesh, step: int) -> list[MicroBatch]:
    """Of random tokens, others on each data-parallel rank."""
    generator = torch.Generator().manual_seed(100 * step + mesh.dp.rank)
    mask, positions = torch.ones(1, LENGTH), torch.arange(LENGTH).unsqueeze(0)
    texts = [torch.randint(config.vocab_size, (1, LENGTH + 1), generator=generator) for _ in range(count)]
    return [MicroBatch(text[:, :-1], text[:, 1:], mask, positions) for text in texts]


def measure(flags: dict[str, Any], microbatch_count: int) -> dict[str, Any]:
    """On every rank. "live": bytes by role after a backward pass; "peak": the most at once during a step; "sent": bytes
    of a step by collective; "values", "tensors": of this rank's part of the model; "part": values of a replica's share
    of that, each parameter cut over the axis that has copies of it."""
    with Traffic() as traffic:
        arguments = Arguments().replace(**flags)
        parallel = arguments.parallel
        layout = Layout(tp=parallel.tensor_model_parallel_size, pp=parallel.pipeline_model_parallel_size)
        mesh = Mesh.create(layout)
        config = dataclasses.replace(DeepSeekConfig.from_file(CONFIG), num_nextn_predict_layers=0)
        before = live_storages()
        engine = Engine(config, arguments, mesh)
        sizes = [_size(parameter) for _, parameter in engine.named_parameters()]
        part = sum(_size(p) / _replicas(p, mesh) for _, p in engine.named_parameters())
        engine.train_step(microbatches(config, microbatch_count, mesh, 0), 1e-3)
        traffic.sent.clear()
        engine.train_step(microbatches(config, microbatch_count, mesh, 1), 1e-3)
        sent = dict(traffic.sent)
    resting = sum(bytes_by_role(engine, before).values())
    batches = microbatches(config, microbatch_count, mesh, 2)
    peak = resting + profiled(lambda: engine.train_step(batches, 1e-3))
    engine.forward_backward(microbatches(config, microbatch_count, mesh, 3))
    live = bytes_by_role(engine, before)
    return {"live": live, "peak": peak, "sent": sent, "values": sum(sizes), "part": part, "tensors": len(sizes)}


def _size(parameter: nn.Parameter) -> int:
    """Values; under stage 3 a parameter has none by itself."""
    return getattr(parameter, "ds_numel", parameter.numel())


def _replicas(parameter: nn.Parameter, mesh: Mesh) -> int:
    return mesh.edp.size if sharding_of(parameter).expert else mesh.dp_cp.size
