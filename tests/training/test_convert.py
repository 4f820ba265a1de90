"""Hugging Face's directories to checkpoints and back: every bit, through any layout, or refused."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.config import DeepSeekConfig
from model.hf import hf_repeats
from parallel.mesh import Layout, Mesh
from tests.hf_directories import random_tensors, read_directory, write_directory, write_tokenizer
from tests.layouts import Job, flags_of
from tests.model.hf_oracle import save as save_transformers
from tests.model.hf_oracle import tiny_config, transformers_model
from tests.training.test_checkpoint import EIGHT, SMALL
from tests.training.test_weights import logits_of
from training import checkpoint, convert
from training.convert import export_checkpoint, import_directory
from training.engine import Engine
from training.failures import ConfigurationError
from training.stored import StoredTensors

V3 = Job(config="tiny_v3", overrides=SMALL | {"vocab_size": 301})
V2_LITE = Job(config="tiny_v2", overrides=SMALL)
EXTRA = {"torch_dtype": "bfloat16", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}


def identical(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def resave(jobs: list[Job], sources: list[str], runs: list[str]) -> None:
    """On a rank: start from each of the weights, and save what was loaded as a run does."""
    for job, source, run in zip(jobs, sources, runs, strict=True):
        engine = Engine(job.model(), flags_of(job), Mesh.create(job.layout))
        checkpoint.load_weights(engine, checkpoint.find_weights(Path(source)))
        checkpoint.save(engine, Path(run) / "checkpoints", checkpoint.Position(0, 0), "")


def round_trips(
    run_ranks: Callable[..., Any], tmp_path: Path, ranks: int, layout: Layout, flags: dict[str, Any]
) -> None:
    """Made-up directories of a V3 and a V2-Lite are imported, loaded and saved on `layout`, and exported."""
    published, jobs = [], []
    for seed, job in enumerate((V3, V2_LITE)):
        tensors = random_tensors(job.model(), seed)
        write_directory(tmp_path / f"hf{seed}", job.model(), tensors, **EXTRA)
        tokenizer = None
        if job is V3:
            write_tokenizer(tmp_path / f"hf{seed}", vocab_size=301)
            tokenizer = str(tmp_path / f"imported{seed}" / "tokenizer")
        import_directory(tmp_path / f"hf{seed}", tmp_path / f"imported{seed}", block_bytes=20_000)
        jobs.append(Job(layout, job.config, job.overrides, flags={"tokenizer_model": tokenizer, **flags}))
        published.append(tensors)
    imported, runs = ([str(tmp_path / f"{kind}{i}") for i in range(2)] for kind in ("imported", "run"))
    run_ranks(ranks, resave, jobs, imported, runs)
    for seed, tensors in enumerate(published):
        for place in (f"imported{seed}", f"run{seed}"):
            target = tmp_path / f"exported from {place}"
            export_checkpoint(tmp_path / place, target, file_bytes=1 << 16)
            identical(read_directory(target), tensors)
            files = {path.name for path in target.iterdir()}
            assert {"tokenizer.json", "tokenizer_config.json"} <= files if seed == 0 else "tokenizer.json" not in files


def test_every_tensor_comes_back_through_a_layout(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    assert hf_repeats(V3.model()) and V2_LITE.model().q_lora_rank is None
    round_trips(run_ranks, tmp_path, 4, Layout(tp=2, pp=2, ep=2), {"precision": "bf16"})
    config = json.loads((tmp_path / "exported from run0" / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLM"] and config["torch_dtype"] == "bfloat16"
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1) and "auto_map" not in config
    names = {path.name for path in (tmp_path / "exported from run0").glob("*.safetensors")}
    assert len(names) > 3 and f"model-00002-of-{len(names):05d}.safetensors" in names
    index = json.loads((tmp_path / "exported from run0" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in random_tensors(V3.model(), 0).values())


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "layout", "flags"),
    [
        (8, EIGHT, {"zero_stage": 1, "precision": "bf16"}),
        (4, Layout(pp=4), {"precision": "fp32"}),
        (4, Layout(tp=4), {"precision": "bf16"}),
        (4, Layout(cp=2, ep=4), {"precision": "bf16", "zero_stage": 1}),
        (4, Layout(tp=2), {"precision": "bf16", "zero_stage": 2}),
        (2, Layout(), {"precision": "fp32", "zero_stage": 3}),
        (2, Layout(pp=2), {"precision": "bf16", "pipeline_schedule": "dualpipe-v", "global_batch_size": 8}),
    ],
    ids=str,
)
def test_every_tensor_comes_back_through_any_layout_and_stage(
    run_ranks: Callable[..., Any], tmp_path: Path, ranks: int, layout: Layout, flags: dict[str, Any]
) -> None:
    round_trips(run_ranks, tmp_path, ranks, layout, flags)


@pytest.mark.parametrize(
    ("model_type", "q_lora_rank"),
    [("deepseek_v3", 25), ("deepseek_v2", None), pytest.param("deepseek_v2", 25, marks=pytest.mark.full)],
    ids=["v3", "v2-lite", "v2"],
)
def test_transformers_and_we_compute_the_same_from_an_export(
    tmp_path: Path, model_type: str, q_lora_rank: int | None
) -> None:
    """From transformers' own directory to a checkpoint, an engine, another checkpoint, and back to transformers."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers_model(tiny_config(model_type, q_lora_rank=q_lora_rank), seed=5)
    save_transformers(theirs, tmp_path / "hf")
    import_directory(tmp_path / "hf", tmp_path / "imported")
    # As a run takes it, from the files: what was imported is all that is known of the model.
    config = DeepSeekConfig.from_file(tmp_path / "imported" / "tokenizer" / "config.json")
    engine = Engine(config, flags_of(Job()), Mesh.create(Layout()))
    checkpoint.load_weights(engine, tmp_path / "imported")
    saved = checkpoint.save(engine, tmp_path / "run", checkpoint.Position(0, 0), "")
    export_checkpoint(saved, tmp_path / "exported", "fp32", file_bytes=60_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", dtype=torch.float32, experts_implementation="eager", attn_implementation="eager"
    )
    tokens = torch.randint(0, config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(input_ids=tokens).logits
        assert torch.equal(again(input_ids=tokens).logits, expected)
    torch.testing.assert_close(logits_of(engine), expected.transpose(0, 1), rtol=1e-5, atol=1e-5)


def e4m3(byte: int) -> float:
    """The number that a byte stands for: a sign, 4 bits of exponent from 2^-6 on, 3 bits of mantissa."""
    sign, exponent, mantissa = -1.0 if byte >> 7 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def test_fp8_blocks_become_what_a_scalar_reference_says(tmp_path: Path) -> None:
    config = tiny_config("deepseek_v3", hidden_size=200, intermediate_size=150, q_lora_rank=130, num_hidden_layers=2)
    tensors, generator = random_tensors(config, seed=3), torch.Generator().manual_seed(4)
    expected = dict(tensors)
    for name in list(tensors):
        if tensors[name].ndim != 2 or name.endswith(("embed_tokens.weight", "lm_head.weight", "gate.weight")):
            continue
        rows, columns = tensors[name].shape
        bytes_ = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
        bytes_[bytes_ & 127 == 127] = 0  # not a number
        scales = torch.rand((-(-rows // 128), -(-columns // 128)), generator=generator) * 1e-3
        tensors[name], tensors[f"{name}_scale_inv"] = bytes_.view(torch.float8_e4m3fn), scales
        of_blocks = scales.numpy()
        values = [
            [np.float32(e4m3(byte)) * of_blocks[i // 128, j // 128] for j, byte in enumerate(row)]
            for i, row in enumerate(bytes_.tolist())
        ]
        expected[name] = torch.from_numpy(np.array(values, dtype=np.float32))
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    write_directory(tmp_path / "hf", config, tensors, quantization_config=quantization)
    import_directory(tmp_path / "hf", tmp_path / "imported", block_bytes=50_000)  # blocks that cut FP8's own
    export_checkpoint(tmp_path / "imported", tmp_path / "fp32", "fp32")
    identical(read_directory(tmp_path / "fp32"), {name: tensor.float() for name, tensor in expected.items()})
    assert "quantization_config" not in json.loads((tmp_path / "fp32" / "config.json").read_text())

    said = import_directory(tmp_path / "hf", tmp_path / "rounded", "bf16")
    assert "in bfloat16 and float32" in said
    export_checkpoint(tmp_path / "rounded", tmp_path / "bf16")
    identical(
        read_directory(tmp_path / "bf16"),
        {name: tensor if "correction_bias" in name else tensor.bfloat16() for name, tensor in expected.items()},
    )


def test_everything_wrong_with_a_directory_is_said_before_a_tensor_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, hf = V3.model(), tmp_path / "hf"
    tensors = random_tensors(config, seed=6)
    tensors["model.norm.weight"] = torch.zeros(5)
    tensors["model.layers.4.embed_tokens.weight"] = tensors["model.layers.4.embed_tokens.weight"][1:].clone()
    tensors["model.layers.9.input_layernorm.weight"] = torch.zeros(64)
    del tensors["model.layers.2.mlp.experts.7.up_proj.weight"]
    write_directory(hf, config, tensors, shards=40)
    gone, cut = hf / "model-00002-of-00040.safetensors", hf / "model-00003-of-00040.safetensors"
    gone.unlink()
    cut.write_bytes(cut.read_bytes()[:-7])
    monkeypatch.setattr(convert, "_refuse_too_little_room", lambda *_: pytest.fail("the check came too late"))
    with pytest.raises(ValueError) as caught:
        import_directory(hf, tmp_path / "imported")
    for said in (
        f"missing shard files (1):\n    {gone.name}",
        f"unreadable files (1):\n    {cut.name}",
        "wrong shapes (2):",
        "model.norm.weight is [5], the configuration makes it [64]",
        "model.layers.4.embed_tokens.weight is [300, 64], the configuration makes it [301, 64]",
        "unknown tensors (1):\n    model.layers.9.input_layernorm.weight",
        "missing tensors (1):\n    model.layers.2.mlp.experts.7.up_proj.weight",
    ):
        assert said in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_other_wrong_input_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, hf, target = V3.model(), tmp_path / "hf", tmp_path / "imported"
    tensors = random_tensors(config, seed=7)
    write_directory(hf, config, tensors)

    def refused(match: str, error: type[BaseException] = ConfigurationError) -> None:
        with pytest.raises(error, match=match):
            import_directory(hf, target)
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]

    def interrupt() -> None:
        raise KeyboardInterrupt("now")

    write_tokenizer(hf, vocab_size=302)
    refused("has 302 ids, the model's vocab_size is 301", ValueError)
    (hf / "tokenizer.json").write_text("{}")
    refused("is not a tokenizer.json", ValueError)
    (hf / "tokenizer.json").unlink()
    free = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: free._replace(free=1000))
        refused(r"imported needs .* MB, .* has 0.001 MB left")
    broken, embed = hf / "model-00001-of-00003.safetensors", "model.layers.4.shared_head.head.weight"
    broken = next(file for file in hf.glob("*.safetensors") if embed in load_file(file))
    held = load_file(broken)
    save_file(held | {embed: held[embed] + 1}, broken)
    refused(rf"{embed} differs from lm_head.weight\n  here they share")
    save_file(held, broken)
    with monkeypatch.context() as patched:
        reads = iter(range(5))
        patched.setattr(convert.HFDirectory, "fill", lambda *_: interrupt() if next(reads) == 4 else None)
        refused("now", KeyboardInterrupt)

    (hf / "config.json").unlink()
    refused("hf has no config.json: give a directory as Hugging Face has them")
    target.mkdir()
    with pytest.raises(ConfigurationError, match="imported exists: choose another place"):
        import_directory(hf, target)
    assert not list(target.iterdir())


def test_a_directory_without_mtp_layers_is_told_how_to_become_a_model(tmp_path: Path) -> None:
    config = V3.model()
    main = {name: t for name, t in random_tensors(config, seed=8).items() if not name.startswith("model.layers.4.")}
    write_directory(tmp_path / "hf", config, main)
    with pytest.raises(ValueError, match="has no layer for multi-token prediction: set num_nextn_predict_layers 0"):
        import_directory(tmp_path / "hf", tmp_path / "imported")
    changed = json.loads((tmp_path / "hf" / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(changed))
    import_directory(tmp_path / "hf", tmp_path / "imported")
    export_checkpoint(tmp_path / "imported", tmp_path / "exported")
    identical(read_directory(tmp_path / "exported"), main)


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    job = Job(overrides=SMALL)
    with pytest.raises(ConfigurationError, match="holds no complete checkpoint"):
        export_checkpoint(tmp_path, tmp_path / "exported")
    engine = Engine(job.model(), flags_of(job), Mesh.create(Layout()))
    step = checkpoint.save(engine, tmp_path, checkpoint.Position(3, 12), "")
    engine.optimizer.parameters["norm.weight"].data[3] = 7e4
    large = checkpoint.save(engine, tmp_path / "large", checkpoint.Position(3, 12), "")
    write_tokenizer(tmp_path / "foreign", vocab_size=300)

    def refused(match: str, source: Path, dtype: str = "bf16", error: type[Exception] = ConfigurationError) -> None:
        with pytest.raises(error, match=match):
            export_checkpoint(source, tmp_path / "exported", dtype, tokenizer=tokenizer)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign", "large", "step_00000003"]

    tokenizer: Path | None = tmp_path / "foreign"
    refused("has 300 ids, the model's vocab_size is 203", step, error=ValueError)
    tokenizer = tmp_path
    refused("holds neither tokenizer.json nor tokenizer.model", step, error=FileNotFoundError)
    tokenizer = None
    refused("norm.weight has numbers that fp16 can't hold", large, "fp16")
    meta = json.loads((step / "meta.json").read_text())
    (step / "meta.json").write_text(json.dumps(meta | {"model": meta["model"] | {"kv_lora_rank": 63}}))
    refused(r"layers.0.self_attn.kv_a_layernorm.weight is \[64\], its configuration makes it \[63\]", step)
    (step / "meta.json").write_text(json.dumps(meta))
    file = next(step.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])
    refused(rf"is damaged:\n  {file.name} has \d+ of \d+ bytes", step)
    file.unlink()
    refused(rf"is damaged:\n  {file.name} is missing", step)
    (step / ".metadata").write_bytes(b"\x80")
    refused("is no complete checkpoint", step)


def test_a_full_disk_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    write_directory(tmp_path / "hf", V3.model(), random_tensors(V3.model(), seed=11))
    import_directory(tmp_path / "hf", tmp_path / "imported")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # of any file: it ends in the same way
    try:
        with pytest.raises(OSError, match="File too large"):
            import_directory(tmp_path / "hf", tmp_path / "again")
        with pytest.raises(OSError, match="safetensors can't be written: .*File too large"):
            export_checkpoint(tmp_path / "imported", tmp_path / "exported")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "imported"]


def test_a_run_starts_from_an_import_but_does_not_go_on_with_it(tmp_path: Path) -> None:
    tensors = random_tensors(V3.model(), seed=9)
    write_directory(tmp_path / "hf", V3.model(), tensors)
    import_directory(tmp_path / "hf", tmp_path / "imported")
    engine = Engine(V3.model(), flags_of(V3), Mesh.create(Layout()))
    for name in engine.optimizer.parameters:
        for moment in engine.optimizer.moments:
            engine.optimizer.write(name, torch.ones_like(engine.optimizer.read(name)), moment)
    assert checkpoint.find(tmp_path / "imported") == tmp_path / "imported"
    with pytest.raises(ConfigurationError, match="holds weights alone.*--pretrained-checkpoint"):
        checkpoint.load(engine, tmp_path / "imported")
    checkpoint.load_weights(engine, tmp_path / "imported")
    assert torch.equal(engine.optimizer.read("lm_head.weight"), tensors["lm_head.weight"].float())
    assert all(not engine.optimizer.read("norm.weight", moment).any() for moment in engine.optimizer.moments)
    other = Engine(V2_LITE.model(), flags_of(V2_LITE), Mesh.create(Layout()))
    with pytest.raises(ConfigurationError, match="imported is of another model: model_type 'deepseek_v3' there"):
        checkpoint.load_weights(other, tmp_path / "imported")


def test_a_checkpoint_is_saved_though_its_tokenizer_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tokenizer(tmp_path / "there")
    for place in ("there", "gone"):
        job = Job(overrides=SMALL, flags={"tokenizer_model": str(tmp_path / place / "tokenizer.json")})
        engine = Engine(job.model(), flags_of(job), Mesh.create(Layout()))
        step = checkpoint.save(engine, tmp_path / "run", checkpoint.Position(1, 4), "")
        carried = [path.name for path in (step / "tokenizer").iterdir()]
        assert sorted(carried) == (["tokenizer.json", "tokenizer_config.json"] if place == "there" else [])
    assert "the checkpoint has no tokenizer" in caplog.text


def test_stored_blocks_are_read_once(tmp_path: Path) -> None:
    write_directory(tmp_path / "hf", V3.model(), random_tensors(V3.model(), seed=10))
    import_directory(tmp_path / "hf", tmp_path / "imported", block_bytes=3 * 64 * 64 * 2)
    stored = StoredTensors(tmp_path / "imported")
    experts = "model.layers.2.mlp.experts.gate_up_proj"
    assert stored.shapes[experts] == (8, 64, 64)
    assert stored.rows(experts) == [slice(0, 3), slice(3, 6), slice(6, 8)]
    whole = stored.read(experts, tuple(slice(0, size) for size in (8, 64, 64)), torch.float32)
    part = stored.read(experts, (slice(2, 7), slice(5, 64), slice(0, 9)), torch.float32)
    assert torch.equal(part, whole[2:7, 5:, :9])
