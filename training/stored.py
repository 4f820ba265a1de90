"""The tensors of a checkpoint in one process, without ranks: read in parts, or written as they come.

Lives here: torch.distributed.checkpoint's files without its collectives, for tools; `checkpoint` saves and loads on
ranks. May import torch. A stored tensor is a set of blocks, each of which can be read only whole.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from training.failures import ConfigurationError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import ReadItem

# torch.distributed.checkpoint is imported where it is used, as in `checkpoint`.

Shape = tuple[int, ...]
Box = tuple[slice, ...]
"""A part of a tensor: a slice with both ends a dimension."""

BLOCK_BYTES = 128 << 20
"""Of a block that is written, unless one index of the first dimension is larger: what who reads it holds beside it."""


class StoredTensors:
    """The tensors of the checkpoint at `path`, by key.

    Raises ConfigurationError where its table can't be read, and for all missing and all cut files at once.
    """

    def __init__(self, path: Path):
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self._reader = FileSystemReader(path)
        try:
            metadata = self._reader.read_metadata()
        except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise ConfigurationError(f"{path} is no complete checkpoint: {error}") from error
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._tensors = {
            key: stored
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        sizes: dict[str, int] = defaultdict(int)
        for place in metadata.storage_data.values():
            sizes[place.relative_path] = max(sizes[place.relative_path], place.offset + place.length)
        problems = []
        for name, size in sorted(sizes.items()):
            if not (file := path / name).exists():
                problems.append(f"{name} is missing")
            elif (found := file.stat().st_size) < size:
                problems.append(f"{name} has {found} of {size} bytes")
        if problems:
            raise ConfigurationError("\n  ".join([f"{path} is damaged:", *problems]))

    @property
    def shapes(self) -> dict[str, Shape]:
        return {key: tuple(stored.size) for key, stored in self._tensors.items()}

    def read(self, key: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """A part of a tensor, rounded to `dtype`, on the CPU. Each stored block that it touches is read, one by one."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
        from torch.distributed.checkpoint.planner import LoadPlan
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

        offsets, sizes = zip(*((at.start, at.stop - at.start) for at in box), strict=True)
        asked = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(key, self._tensors[key], [asked])
        values = torch.empty(sizes, dtype=dtype)
        self._reader.read_data(LoadPlan(items), _into(values)).wait()
        return values

    def rows(self, key: str) -> list[slice]:
        """The first dimension in ranges that cut no block: reading them one by one reads each block once."""
        stored = self._tensors[key]
        ends = {0, stored.size[0]}
        for block in stored.chunks:
            ends |= {block.offsets[0], block.offsets[0] + block.sizes[0]}
        for block in stored.chunks:
            first, last = block.offsets[0], block.offsets[0] + block.sizes[0]
            ends -= {end for end in ends if first < end < last}
        borders = sorted(ends)
        return [slice(*pair) for pair in zip(borders, borders[1:], strict=False)]


def write_tensors(
    path: Path,
    tensors: Mapping[str, tuple[Shape, torch.dtype]],
    read: Callable[[str, Box], torch.Tensor],
    block_bytes: int = BLOCK_BYTES,
) -> None:
    """Write a checkpoint's tensors into the existing directory `path`, in blocks of rows, a file for each block.

    tensors: shape and dtype by key. read: called for one block after the other, in the order of the keys; what it gave
    is written and let go before the next is asked for. All files are on disk on return. Raises OSError, as of a full
    disk, and whatever `read` raises.
    """
    from torch.distributed.checkpoint import FileSystemWriter

    # torch's `save` does the same on ranks; it wraps whatever `read` raises, Ctrl-C too.
    writer, planner = FileSystemWriter(path, single_file_per_rank=False), _blocks(tensors, read, block_bytes)
    planner.set_up_planner({}, is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    try:
        writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).value()])
    except RuntimeError as error:  # torch's, raised while it closes what it couldn't write
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _into(values: torch.Tensor) -> Any:
    """torch's planner for one reading: every part of a block goes to its place in `values`."""
    from torch.distributed.checkpoint import DefaultLoadPlanner

    class Into(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            places = zip(read_item.dest_offsets, read_item.lengths, strict=True)
            return values[tuple(slice(start, start + length) for start, length in places)]

    return Into()


def _blocks(
    tensors: Mapping[str, tuple[Shape, torch.dtype]], read: Callable[[str, Box], torch.Tensor], block_bytes: int
) -> Any:
    """torch's planner for writing what doesn't exist yet."""
    from torch.distributed.checkpoint import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    boxes: dict[tuple[str, Shape], Box] = {}
    items = []
    for key, (shape, dtype) in tensors.items():
        row = torch.Size(shape[1:]).numel() * dtype.itemsize
        height = max(1, block_bytes // max(1, row))
        for start in range(0, shape[0], height):
            box = (slice(start, min(start + height, shape[0])), *(slice(0, size) for size in shape[1:]))
            offsets = torch.Size([at.start for at in box])
            block = ChunkStorageMetadata(offsets, torch.Size([at.stop - at.start for at in box]))
            data = TensorWriteData(block, TensorProperties(dtype), torch.Size(shape))
            items.append(WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data))
            boxes[key, tuple(offsets)] = box

    class Blocks(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            return SavePlan(items)

        def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
            index = write_item.index
            assert index.offset is not None
            return read(index.fqn, boxes[index.fqn, tuple(index.offset)])

    return Blocks(flatten_state_dict=False, flatten_sharded_tensors=False)
