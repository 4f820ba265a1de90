"""The command that converts, as a person gives it: what it prints, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.hf_directories import USER, random_tensors, read_directory, write_directory, write_tokenizer
from tests.layouts import Job
from tests.training.test_checkpoint import SMALL
from tools.hf_checkpoint import main


def test_the_command_imports_and_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Job(overrides=SMALL | {"vocab_size": 301}).model()
    hf, imported, exported = (str(tmp_path / name) for name in ("hf", "imported", "exported"))
    tensors = random_tensors(config, seed=1)
    write_directory(Path(hf), config, tensors)
    main(["import", hf, imported])
    assert "MB in bfloat16 and float32, no tokenizer" in capsys.readouterr().out
    mine = ["--tokenizer-model", str(tmp_path / "mine")]
    write_tokenizer(tmp_path / "mine", vocab_size=302)
    with pytest.raises(SystemExit, match="error: .*tokenizer.json has 302 ids, the model's vocab_size is 301"):
        main(["export", imported, exported, *mine])
    write_tokenizer(tmp_path / "mine", eos_token=USER)
    main(["export", imported, exported, *mine, "--dtype", "fp32", "--max-shard-gib", "0.0001"])
    assert f"{len(tensors)} tensors of {imported}, " in capsys.readouterr().out
    found = read_directory(Path(exported))
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in tensors.items())
    described = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert (described["bos_token_id"], described["eos_token_id"]) == (0, 299)  # the second is the tokenizer's
    assert len(list(Path(exported).glob("*.safetensors"))) > 3
    with pytest.raises(SystemExit, match="error: .*exported exists: choose another place"):
        main(["export", imported, exported])
    with pytest.raises(SystemExit, match="error: --tokenizer-model is for export"):
        main(["import", hf, exported, "--tokenizer-model", "x"])
    with pytest.raises(SystemExit, match="error: --max-shard-gib 0 must be above 0"):
        main(["export", imported, str(tmp_path / "x"), "--max-shard-gib", "0"])
    with pytest.raises(SystemExit, match="error: .*nowhere holds no complete checkpoint"):
        main(["export", str(tmp_path / "nowhere"), str(tmp_path / "x")])
