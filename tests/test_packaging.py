"""What gets installed: setup.py's lists against the directories, pins against requirements, and a built wheel."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.test_rooms import MAY_IMPORT

ROOT = Path(__file__).resolve().parent.parent
SETUP = runpy.run_path(str(ROOT / "setup.py"))
NEVER_INSTALLED = ("tests", "benchmarks", "scripts", "docs")


def constraints() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_every_package_of_a_room_is_listed() -> None:
    rooms = [room for room in MAY_IMPORT if (ROOT / room).is_dir()]
    packages = {
        ".".join(file.parent.relative_to(ROOT).parts) for room in rooms for file in (ROOT / room).rglob("__init__.py")
    }
    data = {"configs", *(f"configs.{path.name}" for path in (ROOT / "configs").iterdir() if path.is_dir())}
    assert set(SETUP["PACKAGES"]) == packages | data


def test_every_source_file_of_a_room_lies_in_a_listed_package() -> None:
    directories = {Path(*name.split(".")) for name in SETUP["PACKAGES"]}
    rooms = [room for room in MAY_IMPORT if (ROOT / room).is_dir()]
    files = [file.relative_to(ROOT) for room in rooms for file in (ROOT / room).rglob("*.py")]
    assert [file for file in files if file.parent not in directories] == []


def test_every_requirement_is_pinned_once_for_this_python() -> None:
    required = [*SETUP["INSTALL_REQUIRES"], *SETUP["EXTRAS_REQUIRE"]["dev"]]
    pins = [pin for pin in constraints() if pin.marker is None or pin.marker.evaluate()]
    for text in required:
        requirement = Requirement(text)
        pin = [pin for pin in pins if pin.name == requirement.name]
        assert len(pin) == 1, f"{requirement.name} has {len(pin)} pins in constraints.txt"
        (specifier,) = pin[0].specifier
        assert specifier.operator == "==" and requirement.specifier.contains(specifier.version)


@pytest.mark.full
def test_a_wheel_holds_what_runs_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in (*MAY_IMPORT, "configs", "tests", "benchmarks", "scripts"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "pretrain_deepseek.py"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.split("/")[0] in NEVER_INSTALLED]
    expected = [file for room in (*MAY_IMPORT, "configs") for file in (ROOT / room).rglob("*") if file.is_file()]
    expected = [file.relative_to(ROOT) for file in expected if file.suffix in (".py", ".json", ".yaml")]
    assert {file.as_posix() for file in expected} | {"pretrain_deepseek.py"} <= set(names)
