"""What this interpreter lacks of the project's requirements, for scripts/lib/environment.sh.

    python requirements.py missing run|dev   the requirements that aren't met, one a line; nothing when all are
    python requirements.py constraints       constraints.txt, in which what came with torch keeps its version

Imports the standard library, and `packaging` where it is installed.
"""

from __future__ import annotations

import re
import runpy
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PROJECT = "pretrain-deepseek"


def installed(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


def is_met(requirement: str) -> bool:
    found = installed(name_of(requirement))
    try:
        from packaging.requirements import Requirement
    except ImportError:  # deepspeed needs it, so something is missing anyhow
        return found is not None
    parsed = Requirement(requirement)
    if parsed.marker is not None and not parsed.marker.evaluate():
        return True
    return found is not None and parsed.specifier.contains(found, prereleases=True)


def missing(purpose: str) -> list[str]:
    """Requirements of `purpose` ("run", or an extra of setup.py too) that aren't met; the project itself is one."""
    setup = runpy.run_path(str(ROOT / "setup.py"))
    wanted = [*setup["INSTALL_REQUIRES"], *(setup["EXTRAS_REQUIRE"][purpose] if purpose != "run" else [])]
    return [*([] if installed(PROJECT) else [PROJECT]), *(text for text in wanted if not is_met(text))]


def constraints() -> list[str]:
    """Lines for pip: the tested versions; where torch is there already, never another version of what it came with."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    if installed("torch") is None:  # ours to fill, pip's and setuptools' old versions of a new environment included
        return pins
    found = {name: installed(name) for name in map(name_of, pins)}
    kept = [f"{name}=={present}" for name, present in found.items() if present]
    return kept + [pin for pin in pins if not found[name_of(pin)]]


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "missing":
        print("\n".join(missing(rest[0])))
    elif command == "constraints":
        print("\n".join(constraints()))
    else:
        sys.exit(f"unknown command {command}: missing or constraints")
