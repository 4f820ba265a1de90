"""What compressed gradients still owe, in a checkpoint: each rank's residuals in a file of its own, beside the rest.

Lives here: `residuals/rank_00003.safetensors` of a step's directory. May import `parallel` and safetensors. A residual
is a rank's own sum of errors (EF-SGD, 1901.09847): unlike a parameter it belongs to a layout, and to a codec.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import torch

from parallel.gradients import GradientReducer, Gradients
from parallel.mesh import Mesh
from training.durable import fsync, write_safetensors
from training.failures import ConfigurationError

logger = logging.getLogger(__name__)

DIRECTORY = "residuals"
_FREE = ("decay", "density")
"""Options that may change from one start to the next: the residual means the same."""


def belonging_to(reducer: GradientReducer) -> dict[str, Any]:
    """What must be equal for residuals to fit: layout, and codec with its parameters."""
    assert reducer.compression is not None
    mesh: Mesh = reducer.mesh
    chosen = reducer.compression.options
    options = {name: x for name, x in dataclasses.asdict(chosen).items() if name not in _FREE}
    layout = dataclasses.asdict(mesh.layout) | {"dp": mesh.dp.size}
    # Defaults spelt out: they may change between versions, and asking for one changes nothing.
    options |= {"block_size": chosen.block, "residual": chosen.residual_dtype}
    facts = {"codec": options.pop("name"), **options, "layout": layout}
    return json.loads(json.dumps(facts))  # tuples as lists, as they are read back


def save(reducer: Gradients, directory: Path) -> None:
    """This rank's file in `directory`/residuals, on disk on return. Not collective: wait for the others afterwards."""
    assert isinstance(reducer, GradientReducer), "engines of DeepSpeed don't compress"
    folder = directory / DIRECTORY
    folder.mkdir(exist_ok=True)
    metadata = {"belongs_to": json.dumps(belonging_to(reducer))}
    write_safetensors(folder / _file(reducer.mesh.rank), reducer.residuals(), metadata)
    fsync(folder)


def load(reducer: Gradients, directory: Path) -> None:
    """Fill the reducer's residuals from a checkpoint's directory, bit for bit where they fit; else they are zero.

    What isn't taken is told in one line that names both. After another --bucket-cap-mb only those of second shots start
    at zero, whose regions are cut from buckets. Raises ConfigurationError where this rank's file is damaged.
    """
    saved = _belonged_to(directory)
    if reducer.compression is None:
        if saved is not None:
            logger.info("%s holds residuals of %s; this run doesn't compress and leaves them", directory, _words(saved))
        return
    assert isinstance(reducer, GradientReducer), "engines of DeepSpeed don't compress"
    ours = belonging_to(reducer)
    if saved != ours:
        differences = "none were saved"
        if saved is not None:
            pairs = ((name, saved.get(name), now) for name, now in ours.items())
            changed = (f"{name} {_text(old)} there, {_text(now)} here" for name, old, now in pairs if old != now)
            differences = "; ".join(changed)
        reducer.load_residuals({})
        logger.info("residuals of compressed gradients start at zero: %s: %s", directory, differences)
        return
    _, tensors = _read(directory, reducer.mesh.rank, reducer.mesh.device)
    zeroed = reducer.load_residuals(tensors)
    if names := [name for name in zeroed if not name.startswith("region/")]:
        logger.info("residuals that don't fit start at zero: %s", ", ".join(names))
    if regions := len(zeroed) - len(names):
        logger.info("residuals of %d second shots start at zero: buckets are cut otherwise than when saved", regions)


def _file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def _belonged_to(directory: Path) -> dict[str, Any] | None:
    """None where no residuals were saved. Rank 0 always has a file."""
    return _read(directory, 0, None)[0] if (directory / DIRECTORY).is_dir() else None


def _read(directory: Path, rank: int, device: torch.device | None) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What a rank's file says it belongs to, and its tensors; only the first without a device."""
    from safetensors import SafetensorError, safe_open

    path = directory / DIRECTORY / _file(rank)
    try:
        with safe_open(path, "pt", device=str(device or "cpu")) as file:
            names = file.keys() if device is not None else []
            return json.loads(file.metadata()["belongs_to"]), {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{path} can't be read: {error}; remove {path.parent} to start at zero") from error


def _words(belongs_to: dict[str, Any]) -> str:
    return f"{belongs_to['codec']} on {_text(belongs_to['layout'])}"


def _text(value: Any) -> str:
    """A layout as "tp 2 dp 2", a list as its words."""
    if isinstance(value, dict):
        return " ".join(f"{name} {size}" for name, size in value.items() if size > 1) or "one rank"
    return " ".join(value) if isinstance(value, list) else str(value)
