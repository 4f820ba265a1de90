"""What importing and exporting hold in memory: a block, a file, never the model."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from model.config import DeepSeekConfig
from model.hf import hf_shapes
from tests.model.hf_oracle import tiny_config
from training.stored import BLOCK_BYTES

ROOT = Path(__file__).parents[2]

MEASURED = """
import re, sys
from pathlib import Path
from training.convert import export_checkpoint, import_directory

little, large, place = map(Path, sys.argv[1:4])
block, file = map(int, sys.argv[4:6])

def peak():  # getrusage's would begin with that of the process which started this one
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

def both(source, name):
    import_directory(source, place / name, block_bytes=block)
    imported = peak()
    export_checkpoint(place / name, place / f"{name} exported", file_bytes=file)
    return imported

both(little, "little")  # what this imports is no tensor's memory
before = peak()
imported = both(large, "large")
print(imported - before, peak() - before)
"""


def made_up(directory: Path, config: DeepSeekConfig) -> int:
    """A directory with the same random numbers again and again, in files of 3/16 of the whole; its bytes."""
    shapes = hf_shapes(config)
    numbers = torch.randn(1 << 20).bfloat16()
    directory.mkdir()
    weight_map, total = {}, 0
    names = list(shapes)
    for i in range(0, len(names), -(-len(names) * 3 // 16)):
        file, held = f"model-{i:05d}.safetensors", {}
        for name in names[i : i + -(-len(names) * 3 // 16)]:
            count = math.prod(shapes[name])
            held[name] = numbers.repeat(-(-count // len(numbers)))[:count].reshape(shapes[name])
            total += held[name].nbytes
        save_file(held, directory / file)
        weight_map |= dict.fromkeys(held, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(config.to_dict()))
    return total


def grown(tmp_path: Path, config: DeepSeekConfig, block: int, file: int) -> tuple[int, int, int]:
    """Bytes of a made-up model, and by how much importing, and importing and exporting, raised a process' peak."""
    total = made_up(tmp_path / "large", config)
    made_up(tmp_path / "little", tiny_config("deepseek_v3"))
    places = [str(tmp_path / name) for name in ("little", "large", "converted")]
    ended = subprocess.run(
        [sys.executable, "-c", MEASURED, *places, str(block), str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    imported, exported = map(int, ended.stdout.split())
    print(f"a model of {total / 1e6:.0f} MB: {imported / 1e6:.0f} MB to import, {exported / 1e6:.0f} MB to export too")
    return total, imported, exported


pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory from /proc")


def test_converting_needs_a_block_and_a_file_rather_than_the_model(tmp_path: Path) -> None:
    config = tiny_config("deepseek_v3", hidden_size=512, moe_intermediate_size=256, n_routed_experts=64, vocab_size=999)
    total, imported, exported = grown(tmp_path, config, block=1 << 20, file=4 << 20)
    assert total > 100e6
    assert imported < 25e6 and exported < 50e6


@pytest.mark.full
def test_two_gigabytes_are_imported_with_a_quarter_of_them(tmp_path: Path) -> None:
    config = tiny_config(
        "deepseek_v3",
        hidden_size=2048,
        moe_intermediate_size=768,
        n_routed_experts=64,
        num_hidden_layers=4,
        vocab_size=20000,
    )
    total, imported, exported = grown(tmp_path, config, block=BLOCK_BYTES, file=256 << 20)
    assert 1.8e9 < total < 2.3e9
    assert imported < 0.5e9 and exported < 0.8e9
