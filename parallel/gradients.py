"""Gradients: accumulated in fp32 over micro-batches, summed over replicas in buckets, while backward still runs.

Lives here: the reducer, the true global norm, clipping. Imports `parallel` only. Sums only, never means: the loss is
already divided by the global batch's token count. What is compressed is compressed once a step, on these sums.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import nn

from parallel.buckets import Bucket, cut
from parallel.comm import all_reduce_
from parallel.compression.compression import Compression, CompressionStatistics
from parallel.compression.options import CompressionOptions
from parallel.mesh import Axis, Mesh
from parallel.sharding import sharding_of
from parallel.sync_watch import SyncWatch
from parallel.weight_gradient import adds_its_gradient

_NORM_ROW = 4096
"""Values summed in fp32 before fp64 takes over: a sum over 8 million in fp32 was off by 8e-5, rows of 4096 by 1e-8."""


def _sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """fp64 scalar, at the speed of an fp32 pass."""
    flat = x.reshape(-1)
    body = flat.numel() // _NORM_ROW * _NORM_ROW
    rows = torch.linalg.vector_norm(flat[:body].view(-1, _NORM_ROW), dim=1).double()
    return rows.square().sum() + torch.linalg.vector_norm(flat[body:]).double().square()


def _call(method: weakref.WeakMethod[Callable[[nn.Parameter], None]], parameter: nn.Parameter) -> None:
    """A hook that doesn't keep its reducer: autograd's hooks aren't seen by Python's collector of cycles.

    Where the reducer has gone nothing happens: nobody is left to reduce what is added.
    """
    bound = method()
    if bound is not None:
        bound(parameter)


class Gradients(Protocol):
    """Where backward leaves its gradients, whoever reduces them: this file's reducer, or an engine of DeepSpeed."""

    compression: Compression | None
    compressing: bool
    buckets: list[Bucket]

    def set_loss_scale(self, scale: float) -> None:
        """From now on backward passes begin with `scale`, which sums and norm must be free of."""

    def zero(self) -> None:
        """Start a step: sums are zero."""

    def expect(self, passes: Mapping[nn.Parameter, int]) -> None:
        """So many backward passes of this step give each parameter a gradient; after the last it may be reduced."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward passes only add up. Raises RuntimeError where each one is reduced."""

    def finish(self) -> None:
        """Wait until all sums of the step are there. Collective."""

    def compression_statistics(self) -> CompressionStatistics | None:
        """Of the last step; None where nothing was compressed."""

    @property
    def messages(self) -> int:
        """Reductions of the last step."""

    @property
    def message_bytes(self) -> int:
        """Of fp32 gradients in the largest of them."""

    @property
    def exposed_seconds(self) -> float:
        """How long the last step's computation waited for them."""


class _ExposedTime:
    """How long the waits of a step's reduction held up the computation: the host on a CPU, the stream on a GPU."""

    def __init__(self, device: torch.device):
        self._seconds = self._started = 0.0
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._pending = False

    def start(self) -> None:
        self._started = time.perf_counter()
        if self._events:
            self._events[0].record()

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._started
        if self._events:
            self._events[1].record()
            self._pending = True

    def seconds(self) -> float:
        """Of the last step. Waits for the GPU to have come this far."""
        if self._pending:
            self._events[1].synchronize()
            self._seconds, self._pending = self._events[0].elapsed_time(self._events[1]) / 1e3, False
        return self._seconds


class GradientReducer:
    """Owns `parameter.main_grad` (fp32) of every parameter of this rank and sums it over the replicas.

    named_parameters: in forward order; bucket_cap_mb: size of a bucket in MiB of fp32; overlap: reduce a bucket as soon
    as its last gradient of the step is there, else all in `finish`. An fp32 parameter's `.grad` is the main gradient
    itself; a lower-precision one's is added to it after every backward and dropped.

    One step: backward of all micro-batches but the last inside `no_sync()`, the last outside, then `finish()`; or all
    outside, in any order, after `expect()` has told how many they are. Ranks may take different numbers of
    micro-batches; all must call `finish()`. patience: seconds after which waiting ranks
    name those that stay in `no_sync()` instead (see `SyncWatch`).

    compression: how buckets are compressed that its rules cover. A step then ends with `commit()`, or with `discard()`
    where the optimizer skips it, as it must where the norm isn't finite.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        mesh: Mesh,
        bucket_cap_mb: float = 25.0,
        overlap: bool = True,
        patience: float = 60.0,
        compression: CompressionOptions | None = None,
    ):
        self.mesh = mesh
        self.overlap = overlap
        self.compressing = compression is not None
        """Whether buckets are compressed from the next step on: False during a warm-up."""
        self._compressed = False  # whether a bucket was, in this step
        self.compression = None if compression is None else Compression(compression, mesh)
        self.named = [(name, p) for name, p in named_parameters if p.requires_grad]
        self.buckets = self._fill_buckets(bucket_cap_mb)
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self._next = 0  # the first bucket that isn't launched
        self._copies = [
            (p, mesh.copies(sharding_of(p).pipeline_ranks)) for _, p in self.named if sharding_of(p).pipeline_ranks
        ]
        self._counted = [part for bucket in self.buckets for part in bucket.counted(mesh)]
        self.set_loss_scale(1.0)
        self._watch = SyncWatch(mesh, patience)
        self._exposed = _ExposedTime(mesh.device)
        self._sync = True
        for _, parameter in self.named:
            if adds_its_gradient(parameter):  # autograd's hook would fire too, without a gradient
                added = partial(_call, weakref.WeakMethod(self._on_added), parameter)
                parameter.main_grad_added = added  # type: ignore[attr-defined]
            else:
                parameter.register_post_accumulate_grad_hook(partial(_call, weakref.WeakMethod(self._on_gradient)))
        self.zero()

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for _, p in self.named]

    @property
    def message_bytes(self) -> int:
        """Of all messages of one step together, copies on other pipeline ranks aside."""
        return sum(4 * bucket.buffer.numel() for bucket in self.buckets if bucket.axis.size > 1)

    @property
    def messages(self) -> int:
        """How many all-reduces one step takes on this rank, copies on other pipeline ranks aside."""
        return sum(bucket.axis.size > 1 for bucket in self.buckets)

    def set_loss_scale(self, scale: float) -> None:
        """Losses are multiplied by this from now on, so gradients are divided by it as they are added up in fp32.

        So main gradients, norm and residuals never carry it. For parameters in fp16; a power of two changes no bit.
        """
        self._factor = 1.0 / scale
        for parameter in self.parameters:
            assert scale == 1.0 or parameter.dtype != torch.float32, "an fp32 gradient is accumulated as it comes"
            parameter.main_grad_factor = self._factor  # type: ignore[attr-defined]

    def zero(self) -> None:
        """Start a step: all main gradients 0."""
        self._compressed = False
        for bucket in self.buckets:
            bucket.buffer.zero_()
        for parameter in self.parameters:
            full = parameter.dtype == torch.float32
            parameter.grad = parameter.main_grad if full else None  # type: ignore[attr-defined]

    def expect(self, passes: Mapping[nn.Parameter, int]) -> None:
        """Before a step's first backward: how many backward passes add to each parameter's gradient in this step.

        A bucket is reduced when the last one of its parameters did, whatever the order; 1 for parameters not named.
        """
        for parameter, count in passes.items():
            self._bucket_of[parameter].missing[parameter] = count

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward only accumulates: no communication. As DDP's, for all micro-batches but the last.

        Whoever reduces by hand sums `parameter.main_grad` over `sharding_of(parameter).gradient_axis(mesh)` afterwards
        (and over `mesh.copies(...)` where the annotation names copies), instead of calling `finish()`.
        """
        self._watch.enter_no_sync()
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def finish(self) -> None:
        """Sum what isn't summed yet, wait for all of it, then sum copies over their pipeline ranks. Collective.

        Raises RuntimeError, naming them, where ranks stay in `no_sync()` beyond the patience.
        """
        for bucket in self.buckets[self._next :]:
            self._launch(bucket)
        self._exposed.start()
        self._watch.wait([(bucket.work, bucket.axis) for bucket in self.buckets])
        copies = [(all_reduce_(p.main_grad, axis, async_op=True), axis) for p, axis in self._copies]  # type: ignore[attr-defined]
        self._watch.wait(copies)
        self._exposed.stop()
        self._watch.end_step()
        for bucket in self.buckets:
            bucket.rearm()
        self._next = 0

    @property
    def exposed_seconds(self) -> float:
        """What the last step's reduction held the computation up for: time in `finish` that overlap didn't hide.

        Includes waiting for ranks that compute longer. On a GPU it waits until the device is that far.
        """
        return self._exposed.seconds()

    def norm(self) -> torch.Tensor:
        """L2 norm of the whole model's gradient, the same fp32 scalar on every rank. Call after `finish`. Collective.

        Every parameter counts once, whatever holds copies of it; padding rows don't count. NaN where a rank's own
        gradient wasn't finite before it was compressed: codes may swallow that, so such values are counted and summed.
        """
        totals = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        for part in self._counted:
            totals[0] += _sum_of_squares(part)
        if self.compression is not None and self._compressed:
            totals[1] = self.compression.not_finite()
        all_reduce_(totals, self.mesh.world)
        square, not_finite = totals
        return torch.where(not_finite > 0, torch.nan, square.sqrt()).float()

    def commit(self) -> None:
        """The optimizer took this step: what compression left over of it comes with the next one."""
        if self.compression is not None:
            self.compression.commit()

    def discard(self) -> None:
        """The optimizer skipped this step: nothing of it is left over."""
        if self.compression is not None:
            self.compression.discard()

    def compression_statistics(self) -> CompressionStatistics | None:
        """What compression did on this rank in the last step; None where it didn't compress."""
        return self.compression.statistics() if self.compression is not None and self._compressed else None

    def residuals(self) -> dict[str, torch.Tensor]:
        """What compression keeps from step to step on this rank, by name: for a checkpoint. Views."""
        return {} if self.compression is None else self.compression.kept()

    def load_residuals(self, saved: Mapping[str, torch.Tensor]) -> list[str]:
        """Fill `residuals()` from a checkpoint of the same layout; the names that didn't fit, which are zero now."""
        return [] if self.compression is None else self.compression.load(saved)

    def scale(self, factor: torch.Tensor | float) -> None:
        """Multiply every main gradient, in place."""
        for bucket in self.buckets:
            bucket.buffer.mul_(factor)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradient to at most `max_norm` (0: leave it) and return the norm before. Collective."""
        norm = self.norm()
        if max_norm > 0:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            # A pass over all gradients for nothing, unless asking would make the host wait for a GPU.
            if factor.is_cuda or factor != 1:
                self.scale(factor)
        return norm

    def _fill_buckets(self, cap_mb: float) -> list[Bucket]:
        """Parameters from last to first, per reduction axis, cut into buckets (see `cut`).

        Buckets come in the order in which backward completes them: since each waits for those before it (see
        `_on_gradient`), another order would hold complete ones back.
        """
        backward_order = list(reversed(self.named))
        groups: dict[tuple[tuple[int, ...], bool], tuple[Axis, list[tuple[str, nn.Parameter]]]] = {}
        for name, parameter in backward_order:
            axis = sharding_of(parameter).gradient_axis(self.mesh)
            # Axes of the same ranks share buckets, counted under one name, whatever parameter comes first.
            axis = next((same for same in (self.mesh.dp_cp, self.mesh.stage) if same.ranks == axis.ranks), axis)
            compressed = self.compression is not None and self.compression.covers(parameter, axis)
            groups.setdefault((axis.ranks, compressed), (axis, []))[1].append((name, parameter))
        place = {parameter: i for i, (_, parameter) in enumerate(backward_order)}
        buckets = [
            Bucket(axis, named[start:stop], self.compression if compressed else None)
            for (_, compressed), (axis, named) in groups.items()
            for start, stop in cut([p.numel() for _, p in named], cap_mb * 2**20 / 4)
        ]
        return sorted(buckets, key=lambda bucket: place[bucket.parameters[-1]])

    def _launch(self, bucket: Bucket) -> None:
        bucket.launch(self.compressing)
        self._compressed |= self.compressing and bucket.reduction is not None

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Autograd's hook, for parameters whose layer doesn't add their gradient itself."""
        if parameter.dtype != torch.float32:
            assert parameter.grad is not None
            parameter.main_grad.add_(parameter.grad, alpha=self._factor)  # type: ignore[attr-defined]
            parameter.grad = None
        self._on_added(parameter)

    def _on_added(self, parameter: nn.Parameter) -> None:
        """The parameter's main gradient has this micro-batch's."""
        bucket = self._bucket_of[parameter]
        if bucket.launched:
            raise RuntimeError(
                f"a gradient of {self._name(parameter)} arrived while its bucket is being reduced: backward of all "
                "micro-batches but the last belongs inside no_sync(), or expect() must tell how many there are"
            )
        if not self._sync or not self.overlap:
            return
        left = bucket.missing.pop(parameter) - 1
        if left > 0:
            bucket.missing[parameter] = left
        # Every replica must launch in the same order, so a bucket waits for those before it even when it is ready.
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._launch(self.buckets[self._next])
            self._next += 1

    def _name(self, parameter: nn.Parameter) -> str:
        return next(name for name, p in self.named if p is parameter)
