"""Every source in CUDA C++ compiles for the GPUs that there are, spills no register and moves 16 bytes at once.

Needs nvcc and no GPU: what is asserted is in the PTX and in what ptxas says of it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kernels import build, cuda
from kernels.wire import WireFormat

NVCC = build.find_compiler("nvcc")
SOURCES = sorted(file.name for file in build.SOURCES.glob("*.cu"))
DEVICE_FLAGS = [flag for flag in cuda.FLAGS if flag.startswith(("-O", "-std", "--fmad"))]
# A row's code of signs is 2 bytes a thread: what these write is 16 bytes at once.
READ_SIGNS = re.compile(r"sign_unpack_kernel|decode_sum_kernelI4Sign")

pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc")


def test_every_source_is_known_to_the_loader() -> None:
    assert set(cuda.SOURCES) == set(SOURCES)


@pytest.mark.parametrize(
    "architectures", [("80", "90"), pytest.param(("100",), marks=pytest.mark.full)], ids=["80-90", "100"]
)
@pytest.mark.parametrize("source", SOURCES)
def test_it_compiles_without_spills_and_with_wide_accesses(
    source: str, architectures: tuple[str, ...], tmp_path: Path
) -> None:
    assert NVCC is not None
    known = subprocess.run([NVCC, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout.split()
    if missing := [number for number in architectures if f"compute_{number}" not in known]:
        pytest.skip(f"this nvcc doesn't know sm_{missing[0]}")
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in architectures]
    keep = ["-fatbin", "-Xptxas=-v", "--keep", f"--keep-dir={tmp_path}", "-o", str(tmp_path / "all.fatbin")]
    command = [NVCC, *DEVICE_FLAGS, *targets, *keep, str(build.SOURCES / source)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    kernels = 0
    for number in architectures:
        # nvcc leaves the architecture out of the name where there is only one.
        (ptx,) = tmp_path.glob(f"*_{number}.ptx" if len(architectures) > 1 else "*.ptx")
        for text in ptx.read_text().split(".entry ")[1:]:
            kernels += 1
            name = text.split("(")[0]
            assert re.search(r"st\.global\.v4", text), f"sm_{number} {name} writes less than 16 bytes at once"
            if not READ_SIGNS.search(name):
                assert re.search(r"ld\.global(\.nc)?\.v4", text), f"sm_{number} {name} reads less than 16 bytes at once"
            # A product and a sum in one rounding would differ from the references.
            assert not re.search(r"\bfma\.", text), f"sm_{number} {name} contracts"
            if source == "peer_all_reduce.cu":
                assert "st.release.sys" in text and "ld.acquire.sys" in text
                assert "ld.global.nc" not in text, f"{name} reads peers' memory through the cache for constants"
    assert kernels >= 2 and len(spills) == kernels
    assert set(spills) == {("0", "0")}, done.stderr


def test_a_library_is_built_and_called_and_its_error_has_the_op_and_the_words_of_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def no_stream(device: torch.device) -> Iterator[tuple[str, int]]:
        yield "sm_90", 0

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cuda, "on_stream", no_stream)
    layout = cuda.Layout.of(WireFormat("sign"), 256)
    with pytest.raises(RuntimeError, match=r"sign_unpack on cpu: CUDA says \w.+ \(error \d+\)"):
        cuda.call("sign_pack.cu", "sign_unpack", torch.device("cpu"), None, 0, layout, None)  # no rows, if not no GPU
    (built,) = (tmp_path / "pretrain-deepseek").glob("*.so")
    assert build.shared_object(["sign_pack.cu"], None, (*cuda.FLAGS, "-arch=sm_90")) == built, "nvcc isn't needed again"
