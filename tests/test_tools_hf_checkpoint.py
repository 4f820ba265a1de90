"""The command that converts, as a person gives it: what it prints, what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.hf_directories import random_tensors, read_directory, write_directory, write_tokenizer
from tests.layouts import Job
from tests.training.test_checkpoint import SMALL
from tools.hf_checkpoint import main


def test_the_command_imports_and_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, imported, exported = (str(tmp_path / name) for name in ("hf", "imported", "exported"))
    tensors = random_tensors(Job(overrides=SMALL).model(), seed=1)
    write_directory(Path(hf), Job(overrides=SMALL).model(), tensors)
    main(["import", hf, imported])
    assert "GB in bfloat16 and float32, no tokenizer" in capsys.readouterr().out
    write_tokenizer(tmp_path / "mine", vocab_size=290)
    with pytest.raises(SystemExit, match="error: .*tokenizer.json has 290 ids, the model's vocab_size is 203"):
        main(["export", imported, exported, "--tokenizer-model", str(tmp_path / "mine")])
    main(["export", imported, exported, "--dtype", "fp32", "--max-shard-gib", "0.0001"])
    assert f"{imported}: {len(tensors)} tensors" in capsys.readouterr().out
    found = read_directory(Path(exported))
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in tensors.items())
    assert len(list(Path(exported).glob("*.safetensors"))) > 3
    with pytest.raises(SystemExit, match="error: .*exported exists: choose another place"):
        main(["export", imported, exported])
    with pytest.raises(SystemExit, match="error: --tokenizer-model is for export"):
        main(["import", hf, exported, "--tokenizer-model", "x"])
    with pytest.raises(SystemExit, match="error: --max-shard-gib 0 must be above 0"):
        main(["export", imported, str(tmp_path / "x"), "--max-shard-gib", "0"])
    with pytest.raises(SystemExit, match="error: .*nowhere holds no complete checkpoint"):
        main(["export", str(tmp_path / "nowhere"), str(tmp_path / "x")])
