"""Compressed gradients for people with a loop of their own: a communication hook of torch's DistributedDataParallel.

Lives here: the hook and its state. Imports `kernels` and `parallel` only. No `from __future__ import annotations`: DDP
compares a hook's annotations with its own classes. Protocol: `DistributedDataParallel.register_comm_hook`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from kernels.bucket_pack import bucket_pack
from parallel.comm import GradBucket, Work, all_reduce_
from parallel.compression.compression import Compression, CompressionStatistics
from parallel.compression.options import CompressionOptions
from parallel.compression.reduction import Reduction, Span
from parallel.mesh import Axis, Layout, Mesh

logger = logging.getLogger(__name__)
Future = torch.futures.Future[torch.Tensor]


class _HookBucket:
    """One of DDP's buckets: parameters that are compressed, in a padded fp32 buffer, and a plain message of the others.

    The last value of the plain message counts what wasn't finite in a rank's raw gradients: a code may swallow that.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], compression: Compression, axis: Axis, plain: Axis):
        self._axis, self._plain_axis = axis, plain
        self._sizes = [parameter.numel() for _, parameter in named]
        self._covered = [_covers(compression.options, parameter) for _, parameter in named]
        device, dtype = named[0][1].device, named[0][1].dtype
        spans, end = [], 0
        for (name, parameter), covered in zip(named, self._covered, strict=True):
            if covered:
                spans.append(Span(name, parameter.shape, -(-end // compression.granule) * compression.granule))
                end = spans[-1].stop
        self._buffer = torch.zeros(compression.padded(end, axis), device=device)
        ends = [*(span.start for span in spans), self._buffer.numel()][1:]
        self._gaps = [
            torch.zeros(end - span.stop, dtype=dtype, device=device) for span, end in zip(spans, ends, strict=True)
        ]
        self._spans = spans
        self.reduction: Reduction | None = compression.add(self._buffer, spans, axis) if spans else None
        others = sum(size for size, covered in zip(self._sizes, self._covered, strict=True) if not covered)
        self._message = torch.zeros(others + 1, device=device)
        self._work: Work | None = None

    def phases(self, flat: torch.Tensor) -> list[Callable[[], None]]:
        """The mean over ranks of `flat`, in place."""
        reduce = list(self.reduction.phases) if self.reduction else []
        first = reduce[0] if reduce else lambda: None

        def start() -> None:
            self._pack(flat)
            first()

        return [start, *reduce[1:], partial(self._unpack, flat)]

    @property
    def not_finite(self) -> torch.Tensor:
        """How many raw values weren't finite in the last step, on all ranks."""
        return self._message[-1]

    def fill(self, saved: Mapping[str, torch.Tensor]) -> list[str]:
        """Take over what is kept from step to step; returns the names that aren't there, whose values stay."""
        missing = []
        for name, part in (self.reduction.kept() if self.reduction else {}).items():
            found = saved.get(name)
            if found is not None and found.shape == part.shape and found.dtype == part.dtype:
                part.copy_(found)
            else:
                missing.append(name)
        return missing

    def _parts(self, flat: torch.Tensor, covered: bool) -> list[torch.Tensor]:
        parts = zip(flat.split(self._sizes), self._covered, strict=True)
        return [part for part, is_covered in parts if is_covered == covered]

    def _pack(self, flat: torch.Tensor) -> None:
        """Divided before anything is summed or cast: a mean never overflows where its sum would."""
        factor = 1.0 / self._axis.size
        compressed = [x for pair in zip(self._parts(flat, True), self._gaps, strict=True) for x in pair]
        not_finite = bucket_pack(self._parts(flat, False), self._message[:-1], factor)[1]
        not_finite = not_finite + bucket_pack(compressed, self._buffer, factor)[1]
        self._message[-1] = not_finite
        self._work = all_reduce_(self._message, self._plain_axis, async_op=True)

    def _unpack(self, flat: torch.Tensor) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
        others = self._parts(flat, False)
        if others:
            torch._foreach_copy_(others, list(self._message[:-1].split([x.numel() for x in others])))
        if self._spans:
            reduced = [self._buffer[span.start : span.stop] for span in self._spans]
            torch._foreach_copy_(self._parts(flat, True), reduced)
        if flat.is_cuda or self.not_finite > 0:  # asking would make the host wait for a GPU
            flat.masked_fill_(self.not_finite > 0, torch.nan)


def _covers(options: CompressionOptions, parameter: torch.Tensor) -> bool:
    """By the options' rules; a parameter of a layer that says nothing about itself has no role."""
    if hasattr(parameter, "sharding"):
        return options.covers(parameter)
    return parameter.ndim > 1 or "vector" not in options.exclude


class HookState:
    """What `hook` keeps between steps, for one DDP model. Building it is collective over the model's process group.

        ddp = DistributedDataParallel(model)
        state = HookState(ddp, CompressionOptions("int4"), warmup_steps=100)
        ddp.register_comm_hook(state, hook)
        ...                                    # a loop as ever; gradients are means over ranks
        torch.save(state.state_dict(), f"hook_{rank}.pt")  # residuals are each rank's own

    Gradients of a step in which any rank's raw gradient isn't finite are NaN on all ranks, so that GradScaler and
    clipping see it; that step's residual is forgotten by itself. Whoever skips the optimizer's step for a reason of
    their own calls `discard()` before the next backward. Residuals are in the unit of gradients: where a loss scale
    changes, call `rescale(new / old)`. Micro-batches under `ddp.no_sync()` accumulate: the hook sees their sum.

    options: codec and rules; roles are those of a parameter's `sharding`, where its layer sets one. warmup_steps: first
    ones, which aren't compressed. Kept by name, since DDP puts parameters into other buckets after the first step; the
    residuals of second encodings start again then. Not for `ddp.join()`.
    """

    def __init__(self, ddp: DistributedDataParallel, options: CompressionOptions, warmup_steps: int = 0):
        named = [(name, p) for name, p in ddp.module.named_parameters() if p.requires_grad]
        mesh = Mesh.create(Layout(), named[0][1].device, group=ddp.process_group)
        self.axis = mesh.dp_cp
        self._plain = mesh.communicators("dp_cp", "gradients that aren't compressed")[0]
        self._compression = Compression(options, mesh)
        self._names: dict[torch.Tensor, str] = {parameter: name for name, parameter in named}
        self._buckets: dict[tuple[str, ...], _HookBucket] = {}  # by parameter names
        self._saved: dict[str, torch.Tensor] = {}  # of buckets that are gone, or loaded: for those to come
        self._making = False  # whether this step has made a bucket
        self._loaded = False
        self._warmup_steps = warmup_steps
        self._steps = 0  # begun so far
        self._under_way: list[_HookBucket] = []  # of a step that is neither committed nor discarded
        self._error: BaseException | None = None

    def commit(self) -> None:
        """The last step counts. By itself at the next backward, if its gradients were finite."""
        self._raise_failure()
        if self._under_way:
            self._compression.commit()
        self._under_way = []

    def discard(self) -> None:
        """The last step was skipped: what it kept is forgotten."""
        self._compression.discard()
        self._under_way = []

    def rescale(self, factor: float) -> None:
        """Gradients come multiplied by `factor` from now on."""
        self._settle()
        self._compression.rescale(factor)

    def statistics(self) -> CompressionStatistics | None:
        """Of the last step that was compressed; None before there is one."""
        return self._compression.statistics()

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals by parameter name, and the number of steps; for a run of the same layout."""
        self._settle()
        kept = dict(self._saved)
        for bucket in self._buckets.values():
            kept |= bucket.reduction.kept() if bucket.reduction else {}
        return {"steps": self._steps, "kept": {name: x.clone() for name, x in kept.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave on this rank; a warning names what isn't there, and starts from zero."""
        self.discard()
        self._steps, self._saved, self._loaded = state["steps"], dict(state["kept"]), True
        for bucket in self._buckets.values():
            self._fill(bucket)

    def reduce(self, index: int, flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Future:
        """Start the mean over ranks of one bucket's gradients, in place; the hook's work."""
        self._raise_failure()
        if flat.layout != torch.strided:
            names = ", ".join(self._names[parameter] for parameter in parameters)
            raise TypeError(f"the gradient of {names} is sparse, compression takes dense ones: Embedding(sparse=False)")
        if index == 0:
            self._settle()
            self._steps += 1
            if self._buckets and not self._making:
                self._saved.clear()  # all buckets are there
            self._making = False
        device = flat.device
        future = torch.futures.Future[torch.Tensor](devices=[device] if device.type == "cuda" else [])
        if self.axis.size == 1:
            future.set_result(flat)
            return future
        if self._steps <= self._warmup_steps:
            phases = self._plain_phases(flat)
        else:
            bucket = self._bucket_of(parameters)
            self._under_way.append(bucket)
            phases = bucket.phases(flat)
        phases.append(lambda: future.set_result(flat))
        self._compression.lanes.submit(phases, partial(self._fail, flat, future))
        return future

    def _plain_phases(self, flat: torch.Tensor) -> list[Callable[[], None]]:
        """As DDP does it without a hook."""
        works: list[Work | None] = []

        def start() -> None:
            flat.div_(self.axis.size)
            works.append(all_reduce_(flat, self._plain, async_op=True))

        def wait() -> None:
            for work in works:
                if work is not None:
                    work.wait()

        return [start, wait]

    def _fail(self, flat: torch.Tensor, future: Future, error: BaseException) -> None:
        """DDP takes no exception from a future: it gets NaN, and the next call raises."""
        self._error = self._error or error
        flat.fill_(torch.nan)
        future.set_result(flat)

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"a bucket's compressed gradients failed to arrive: {self._error}") from self._error

    def _settle(self) -> None:
        """Decide about the step before, where the caller hasn't."""
        self._raise_failure()
        if not self._under_way:
            return
        not_finite = torch.stack([bucket.not_finite for bucket in self._under_way]).sum()
        if not_finite > 0:
            self.discard()
        else:
            self.commit()

    def _bucket_of(self, parameters: Sequence[torch.Tensor]) -> _HookBucket:
        names = tuple(self._names[parameter] for parameter in parameters)
        if names in self._buckets:
            return self._buckets[names]
        for key in [key for key in self._buckets if set(key) & set(names)]:
            gone = self._buckets.pop(key)
            if gone.reduction:
                self._saved |= gone.reduction.kept()
                self._compression.drop(gone.reduction)
        named = list(zip(names, parameters, strict=True))
        bucket = self._buckets[names] = _HookBucket(named, self._compression, self.axis, self._plain)
        self._making = True
        self._fill(bucket)
        return bucket

    def _fill(self, bucket: _HookBucket) -> None:
        missing = [name for name in bucket.fill(self._saved) if not name.startswith("region/")]
        if self._loaded and missing:
            logger.warning("residuals start from zero, not found in what was loaded: %s", ", ".join(missing))
        for name in bucket.reduction.kept() if bucket.reduction else {}:
            self._saved.pop(name, None)


def hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For `ddp_model.register_comm_hook(state, hook)`: the mean of the bucket's gradients, compressed on the wire."""
    return state.reduce(bucket.index(), bucket.buffer(), bucket.parameters())
