"""The benchmark of ops: its check finds a wrong kernel, and says so where there is none to check."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels import main
from kernels import backend, native

ONE_OP = ["--device", "cpu", "--ops", "sign_unpack", "--check-only"]


def test_a_check_of_nothing_is_not_a_pass(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert main([*ONE_OP, "--backends", "triton", "cuda"]) == 1
    told = capsys.readouterr().out
    assert "sign_unpack: none" in told and "nothing to compare: none of triton, cuda runs here" in told
    assert main([*ONE_OP, "--backends", "torch"]) == 1, "the reference equals itself"


@pytest.mark.skipif(not native.available(), reason="no C compiler")
def test_a_wrong_kernel_is_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(ONE_OP) == 0
    assert "0 differences from the references" in capsys.readouterr().out
    monkeypatch.setattr(native, "sign_unpack", lambda wire, wire_format, out: torch.nn.init.ones_(out))
    backend._pick.cache_clear()
    try:
        assert main(ONE_OP) == 1
    finally:
        backend._pick.cache_clear()
    told = capsys.readouterr().out
    assert "\n0 differences" not in told and "sign_unpack native" in told
