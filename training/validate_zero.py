"""Cross-checks of ZeRO, offloading and DeepSpeed's file.

Free of torch, as `validate` is, which asks for these. What goes with what is the table of `compositions`; the file is
`deepspeed_config`'s.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from training.arguments import Arguments
from training.compositions import composition_errors
from training.deepspeed_config import completed
from training.failures import ConfigurationError
from training.validate_layout import flag_of


def zero_errors(arguments: Arguments, world_size: int) -> Iterator[str]:
    """Everything wrong with these flags, which --deepspeed-config may complete, on `world_size` ranks."""
    try:
        arguments, _ = completed(arguments, world_size)
    except ConfigurationError as error:
        yield from error.errors
        return
    yield from composition_errors(arguments)
    yield from _check_disk(arguments)


def zero_warnings(arguments: Arguments, world_size: int) -> Iterator[str]:
    """What works and is hardly meant: shards over a single replica."""
    parallel, stage = arguments.parallel, arguments.zero.zero_stage
    tp, ep = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    # At stage 1 experts shard over edp, which has tp ranks where experts are whole; later stages know dp·cp only.
    alone = stage != 1 or tp in (1, ep)
    if stage and world_size // parallel.pipeline_model_parallel_size == tp and alone:
        yield (
            f"--zero-stage {stage} shards nothing: {world_size} ranks as tensor {tp} · pipeline "
            f"{parallel.pipeline_model_parallel_size} are 1 replica"
        )


def _check_disk(arguments: Arguments) -> Iterator[str]:
    """A disk that is swapped to has a directory which this host can write, or make."""
    zero = arguments.zero
    swapped = [f"{flag_of(name)} nvme" for name in ("offload_optimizer", "offload_param") if _on_disk(arguments, name)]
    if not swapped:
        if zero.nvme_path is not None:
            yield f"--nvme-path {zero.nvme_path} is for --offload-optimizer nvme or --offload-param nvme: leave it out"
        return
    if not zero.nvme_path:
        yield f"{' and '.join(swapped)}: give --nvme-path too, a directory on each node's own fast disk"
        return
    place = Path(zero.nvme_path)
    there = next((folder for folder in (place, *place.absolute().parents) if folder.exists()), Path("/"))
    if not there.is_dir():
        yield f"--nvme-path {zero.nvme_path}: {there} is a file; name a directory"
    elif not os.access(there, os.W_OK | os.X_OK):
        doing = "written" if there == place else f"made in {there}"
        yield f"--nvme-path {zero.nvme_path} can't be {doing}: name a directory that this user can write"


def _on_disk(arguments: Arguments, name: str) -> bool:
    return getattr(arguments.zero, name) == "nvme"
