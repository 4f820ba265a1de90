"""Hugging Face's DeepSeek directories to checkpoints of this project, and back.

A command line over `training.convert`; may import tyro and rich.
Source: see `model/hf.py` for names, docs/huggingface.md for what is carried.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

if not __package__:  # run as a file: then its own directory is on the path, and not the project's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import tyro  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: E402


@dataclass(frozen=True)
class Arguments:
    """Hugging Face's directories of DeepSeek models to checkpoints, and back, in one process and little memory.

    import DIR CKPT: a run in any layout starts from CKPT with --pretrained-checkpoint. export CKPT DIR: CKPT is a run,
    its checkpoints or one of them, saved in any layout. What is written appears when it is complete; nothing is
    overwritten.
    """

    action: tyro.conf.Positional[Literal["import", "export"]]
    """import from DIR or export to DIR."""

    source: tyro.conf.Positional[Path]
    """What is read: DIR with config.json and safetensors, or CKPT."""

    target: tyro.conf.Positional[Path]
    """What is written; must not exist."""

    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Numbers that are written. When not given: import keeps each tensor's own (FP8 becomes fp32), export writes
    bf16. Router biases are fp32 in any case."""

    max_shard_gib: float = 2.0
    """For export: size of a safetensors file, in GiB; so much memory is needed, too."""

    tokenizer_model: Path | None = None
    """For export: tokenizer to put beside the model; when not given, the one that the checkpoint carries."""


def main(arguments: list[str] | None = None) -> None:
    options = tyro.cli(Arguments, args=arguments)
    if options.action == "import" and options.tokenizer_model is not None:
        sys.exit(
            "error: --tokenizer-model is for export: an imported checkpoint carries the tokenizer of its directory"
        )
    if not options.max_shard_gib > 0:
        sys.exit(f"error: --max-shard-gib {options.max_shard_gib:g} must be above 0")
    columns = TextColumn(f"{options.action}ing"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    try:
        # After the flags: torch is imported, which takes seconds.
        from training.convert import export_checkpoint, import_directory

        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(options.action, total=None)

            def report(done: int, total: int) -> None:
                progress.update(task, completed=done, total=total)

            if options.action == "import":
                said = import_directory(options.source, options.target, options.dtype, report)
            else:
                said = export_checkpoint(
                    options.source,
                    options.target,
                    options.dtype or "bf16",
                    int(options.max_shard_gib * 2**30),
                    options.tokenizer_model,
                    report,
                )
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: nothing was written")
    print(f"{options.target}: {said}")


if __name__ == "__main__":
    main()
