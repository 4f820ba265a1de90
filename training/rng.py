"""Random numbers: one seed for every generator, their state for checkpoints, and the check that ranks agree.

May import parallel and data. Initial weights and data order don't come from these generators (decision 3): they depend
on the seed alone. What is left to them is whatever a library draws by itself.
"""

from __future__ import annotations

import hashlib
import json
import platform
import random
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.tokenizer import tokenizer_files
from parallel.comm import barrier, gather_objects
from parallel.mesh import Axis
from training.arguments import Arguments
from training.failures import ConfigurationError

_CODE = ("kernels", "parallel", "model", "data", "training")


def set_seed(seed: int, world: Axis | None = None) -> None:
    """Seed torch (every GPU included), numpy and random, then wait until every rank of `world` has done so.

    Call right after start. Raises ValueError for a negative seed, which the generators read differently.
    """
    if seed < 0:
        raise ValueError(f"seed {seed} is negative: give 0 or more")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # CUDA's generators too, once CUDA is initialised
    if world is not None:
        barrier(world)


def rng_state() -> dict[str, Any]:
    """State of this rank's generators, for a checkpoint. "cuda" is that of the current GPU, where one is in use."""
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Inverse of `rng_state`. A state from a CPU run leaves the GPU's generator as it is, and the reverse."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


def check_agreement(arguments: Arguments, world: Axis) -> None:
    """Raises ConfigurationError, on every rank, where ranks differ in flags, files, code or library versions.

    Collective over `world`, before anything else that depends on the flags (also before the mesh of the real layout is
    made: ranks that disagree on it wouldn't find each other). Sends 64 bytes a rank; only where ranks differ, the first
    of each kind sends what it has.
    """
    mine = _facts(arguments)
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    everyone: list[tuple[str, str]] = gather_objects((digest, socket.gethostname()), world)
    digests = [digest for digest, _ in everyone]
    kinds = sorted(set(digests), key=digests.index)
    if len(kinds) == 1:
        return
    speaks = digests.index(digest) == world.rank
    said = gather_objects(mine if speaks else None, world)
    facts = {kind: said[digests.index(kind)] for kind in kinds}
    errors = []
    for name in sorted({name for fact in facts.values() for name in fact}):
        ranks_by_value: dict[str, list[int]] = {}
        for place, kind in enumerate(digests):
            ranks_by_value.setdefault(facts[kind].get(name, "absent"), []).append(place)
        if len(ranks_by_value) > 1:
            places = (f"{value} on {_where(places, everyone, world)}" for value, places in ranks_by_value.items())
            errors.append(f"ranks disagree on {name}: {'; '.join(places)}")
    raise ConfigurationError(*errors)


def _facts(arguments: Arguments) -> dict[str, str]:
    """What must be equal on every rank, as texts a person can compare."""
    facts = {"--" + name.replace("_", "-"): str(value) for name, value in arguments.flat().items()}
    facts["Python"] = ".".join(platform.python_version_tuple()[:2])
    facts["torch"], facts["numpy"] = torch.__version__, np.__version__
    root = Path(__file__).parents[1]
    facts["this project's code (hash)"] = _hash(file for room in _CODE for file in sorted((root / room).rglob("*.py")))
    files = {
        "--model": arguments.model.model,
        "--deepspeed-config": arguments.zero.deepspeed_config,
    }
    for flag, path in files.items():
        if path is not None:
            facts[f"content of {flag} (hash)"] = _hash([Path(path)])
    if arguments.data.tokenizer_model is not None:  # a directory of files, perhaps
        facts["content of --tokenizer-model (hash)"] = _hash(tokenizer_files(arguments.data.tokenizer_model).values())
    for prefix in arguments.data.data_path:
        for file in (Path(prefix + ".idx"), Path(prefix + ".bin")):
            if file.is_file():
                facts[f"size of {file} in bytes"] = str(file.stat().st_size)
    return facts


def _hash(files: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        content = file.read_bytes() if file.is_file() else b""
        total.update(f"{file.name} {len(content)} ".encode() + content)
    return total.hexdigest()[:12]


def _where(places: Sequence[int], everyone: Sequence[tuple[str, str]], world: Axis, most: int = 4) -> str:
    """ "ranks 0-3, 8 (node1, node2)": ranges of global ranks, and at most `most` hosts by name."""
    ranks = [world.ranks[place] for place in places]
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    hosts = sorted({everyone[place][1] for place in places})
    names = ", ".join(hosts[:most]) + (f" and {len(hosts) - most} more hosts" if len(hosts) > most else "")
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    shown = ", ".join(texts[: 2 * most]) + (", ..." if len(texts) > 2 * most else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown} ({names})"
