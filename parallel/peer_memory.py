"""All-reduce among the ranks of one node that read each other's GPU memory, in one kernel a message.

Lives here: the shared memory's life and the rules of its use; the kernel is kernels/csrc/peer_all_reduce.cu. May import
`kernels`, `parallel.comm` and `parallel.mesh`. One-shot for small messages, whose time is latency; two-shot for others.
"""

from __future__ import annotations

import ctypes
import itertools
import platform
from collections.abc import Callable
from pathlib import Path

import torch

from kernels import cuda
from parallel import comm
from parallel.mesh import Axis

_SOURCE = "peer_all_reduce.cu"
_MAX_RANKS = 8
_HANDLE_BYTES = 64


class _Peers(ctypes.Structure):
    """`Peers` of the source."""

    _fields_ = [("memory", ctypes.c_void_p * _MAX_RANKS), ("rank", ctypes.c_int), ("ranks", ctypes.c_int)]


def _this_node() -> str:
    """Containers of one machine have names of their own, and one kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


class PeerAllReduce:
    """`all_reduce_` of fp32 and bf16 tensors over an axis whose ranks are on one node: at most 8, a GPU each.

    Sums run in fp32 in rank order (bf16: rounded once, at the end), so every rank gets the same bits, whatever the
    message's size. Every method is collective over the axis, and calls come in the same order with the same shapes on
    all ranks. Kernels run on the current stream, the same for all calls, and wait on the device for the other ranks';
    each call has a number of its own, so a CUDA graph can't repeat one. If a rank dies, the others' kernels wait until
    their processes end.
    """

    def __init__(
        self, axis: Axis, device: torch.device, max_bytes: int = 8 << 20, two_shot_above: int = 256 << 10
    ) -> None:
        """max_bytes: of one of a rank's two buffers, a multiple of 16; larger messages go in pieces. two_shot_above:
        messages of more bytes take two shots, where there are more than two ranks.

        Raises ValueError for sizes it can't serve and, on every rank alike, RuntimeError naming the ranks where one is
        on another node, has no GPU, or can't open another's memory.
        """
        if axis.size > _MAX_RANKS:
            raise ValueError(f"peer memory over {axis.name}: {axis.size} ranks, it serves at most {_MAX_RANKS}")
        if max_bytes < 16 or max_bytes % 16:
            raise ValueError(f"peer memory over {axis.name}: buffers of {max_bytes} bytes must be a multiple of 16")
        self.axis = axis
        self.device = device
        self.max_bytes = max_bytes
        self.two_shot_above = two_shot_above
        self._calls = itertools.count()
        self._peers = _Peers(rank=axis.rank, ranks=axis.size)
        self._handle = ctypes.create_string_buffer(_HANDLE_BYTES)
        self._open = axis.size > 1
        if self._open:
            self._connect()

    def _connect(self) -> None:
        """Allocate, tell the others, open theirs. A rank that fails says so to all, and nobody is left waiting."""
        nodes = comm.gather_objects((_this_node(), platform.node()), self.axis)
        elsewhere = [f"rank {rank} on {host}" for rank, (node, host) in enumerate(nodes) if node != nodes[0][0]]
        if elsewhere:
            raise RuntimeError(
                f"peer memory over {self.axis.name}: rank 0 is on {nodes[0][1]}, {', '.join(elsewhere)}: it serves the "
                "ranks of one node"
            )
        self._together(self._allocate)
        handles = comm.gather_objects(self._handle.raw, self.axis)
        self._together(lambda: self._open_peers(handles))

    def _together(self, step: Callable[[], None]) -> None:
        """Run it on all ranks; where it fails on one, free what there is on all of them and raise."""
        problem = None
        try:
            step()
        except (RuntimeError, ValueError, OSError, AssertionError) as error:  # a torch without CUDA asserts
            problem = f"{type(error).__name__}: {error}"
        problems = comm.gather_objects(problem, self.axis)
        if any(problems):
            self._close_peers()
            comm.barrier(self.axis)
            self._free()
            told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text)
            raise RuntimeError(f"peer memory over {self.axis.name} on {self.device}: {told}")

    def _allocate(self) -> None:
        memory = ctypes.c_void_p()
        size = ctypes.c_int64(self.max_bytes)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())  # as tensors on it say
        self._call("peer_allocate", size, ctypes.byref(memory), self._handle)
        self._peers.memory[self.axis.rank] = memory.value

    def _open_peers(self, handles: list[bytes]) -> None:
        for rank, handle in enumerate(handles):
            if rank != self.axis.rank:
                memory = ctypes.c_void_p()
                self._call("peer_open", ctypes.create_string_buffer(handle, _HANDLE_BYTES), ctypes.byref(memory))
                self._peers.memory[rank] = memory.value

    def _close_peers(self) -> None:
        for rank in range(self.axis.size):
            if rank != self.axis.rank and self._peers.memory[rank]:
                self._call("peer_close", ctypes.c_void_p(self._peers.memory[rank]))
                self._peers.memory[rank] = None

    def _free(self) -> None:
        if self._peers.memory[self.axis.rank]:
            self._call("peer_free", ctypes.c_void_p(self._peers.memory[self.axis.rank]))
            self._peers.memory[self.axis.rank] = None

    def _call(self, function: str, *arguments: object) -> None:
        cuda.call(_SOURCE, function, self.device, *arguments, stream=False)

    def all_reduce_(self, x: torch.Tensor) -> None:
        """Sum x over the ranks, in place. Any contiguous shape, fp32 or bf16, on this object's device.

        Raises TypeError or ValueError, naming what is wrong, before anything is launched.
        """
        name = f"peer memory over {self.axis.name}"
        if x.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"{name}: the tensor is {x.dtype}, it takes torch.float32 or torch.bfloat16")
        if x.device != self.device:
            raise ValueError(f"{name}: the tensor is on {x.device}, its memory on {self.device}")
        if not x.is_contiguous():
            raise ValueError(f"{name}: a tensor {tuple(x.shape)} with strides {x.stride()} isn't contiguous")
        if self.axis.size == 1:
            return
        if not self._open:
            raise ValueError(f"{name} is closed")
        bytes_of_x, most = x.numel() * x.element_size(), self.max_bytes // x.element_size()
        for begin in range(0, x.numel(), most):
            self._reduce_piece(x, begin, min(most, x.numel() - begin))
        per_rank = 2 / self.axis.size if self._two_shot(bytes_of_x) else 1
        self.axis.ledger.add(self.axis.name, "all_reduce", per_rank * bytes_of_x * (self.axis.size - 1))

    def _two_shot(self, size: int) -> bool:
        """Two ranks read the same number of bytes in one shot, and meet once less."""
        return size > self.two_shot_above and self.axis.size > 2

    def _reduce_piece(self, x: torch.Tensor, begin: int, values: int) -> None:
        call = next(self._calls)
        cuda.call(
            _SOURCE,
            "peer_all_reduce",
            self.device,
            self._peers,
            cuda.KINDS[x.dtype],
            ctypes.c_void_p(x.data_ptr() + begin * x.element_size()),
            ctypes.c_int64(values),
            ctypes.c_int64(call % 2 * self.max_bytes),
            ctypes.c_uint32((1 + 2 * call) % 2**32),
            int(self._two_shot(values * x.element_size())),
        )

    def close(self) -> None:
        """Free the memory, when all ranks have finished with it. Further calls are refused."""
        if not self._open:
            return
        self._open = False
        self._call("peer_wait")
        comm.barrier(self.axis)  # nobody's kernel reads any more
        self._close_peers()
        comm.barrier(self.axis)  # nobody has another's memory open
        self._free()
