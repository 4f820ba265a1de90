"""Build a corpus from the Python standard library of this machine, for runs that must not download anything.

A command line over `data.corpus`; may import tyro.
Source: see `data/corpus.py`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import tyro

from data.corpus import build_corpus


@dataclass(frozen=True)
class Arguments:
    """Write the Python standard library as JSON lines of text and path."""

    output: str
    """File to write, such as corpus.jsonl. It appears when it is complete."""

    library: str | None = None
    """Directory of the library; the running interpreter's when not given."""


def main(arguments: list[str] | None = None) -> None:
    options = tyro.cli(Arguments, args=arguments)
    try:
        documents, characters = build_corpus(options.output, options.library)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(f"{options.output}: {documents} documents, {characters / 1e6:.1f} million characters")


if __name__ == "__main__":
    main()
