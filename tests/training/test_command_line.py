"""The command line: names, precedence, YAML and what a mistake gets. Imports training and names of schedules."""

from __future__ import annotations

import subprocess
import sys
import typing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.pipeline.catalogue import AUTO, SCHEDULES
from training.arguments import GROUP_OF, Arguments, ParallelArguments
from training.command_line import from_yaml, parse, to_yaml
from training.failures import ConfigurationError


def parsed(*argv: str, **environ: str) -> Arguments:
    return parse(argv, environ)


def refused(*argv: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        parsed(*argv)
    return str(caught.value)


def test_help_names_every_flag_and_never_imports_torch() -> None:
    program = (
        "import sys, time; start = time.perf_counter()\n"
        "from training.command_line import parse\n"
        "try: parse(['--help'], {})\n"
        "finally: sys.stderr.write(f'{\"torch\" in sys.modules} {time.perf_counter() - start:.2f} s')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("False "), done.stderr
    print("--help:", done.stderr)
    missing = [name for name in GROUP_OF if "--" + name.replace("_", "-") not in done.stdout]
    assert not missing
    assert "None" not in done.stdout  # what happens without a value is said in words


@pytest.mark.parametrize("columns", [80, 100])
def test_help_fits_the_terminal_and_is_grouped(columns: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setenv("COLUMNS", str(columns))
        parse(["--help"], {})
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= columns
    titles = [f" {group} options " for group in vars(Arguments())]
    assert sorted(text.index(title) for title in titles) == [text.index(title) for title in titles]


@pytest.mark.parametrize(
    ("flag", "choices"), [("zero-stage", "0, 1, 2, 3"), ("kernels", "auto, torch, native, triton, cuda")]
)
def test_a_value_that_is_no_choice_gets_all_in_their_order(flag: str, choices: str) -> None:
    assert refused(f"--{flag}", "4") == f"--{flag} must be one of {choices}, not '4'"


def test_validation_needs_no_torch() -> None:
    program = "import sys, training.validate, training.schedule, model.flops; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_flag_names_are_unique_over_groups() -> None:
    assert set(Arguments().flat()) == set(GROUP_OF)
    fields = sum(len(vars(getattr(Arguments(), group))) for group in vars(Arguments()))
    assert fields == len(GROUP_OF)


def test_dashes_underscores_and_equals_are_one_flag() -> None:
    for words in (["--lr-warmup-iters", "7"], ["--lr_warmup_iters", "7"], ["--lr_warmup-iters=7"]):
        assert parsed(*words).optimizer.lr_warmup_iters == 7


def test_switches_can_be_turned_both_ways() -> None:
    assert parsed("--no-overlap-grad-reduce").distributed.overlap_grad_reduce is False
    assert parsed("--no_overlap_grad_reduce", "--overlap_grad_reduce").distributed.overlap_grad_reduce is True
    assert parsed("--eod-mask-loss").data.eod_mask_loss is True


@pytest.mark.parametrize("words", [["--overlap-grad-reduce", "false"], ["--overlap_grad_reduce=False"], ["--resume=1"]])
def test_a_switch_with_a_value_is_told_its_two_forms(words: list[str]) -> None:
    switch = words[0].partition("=")[0].replace("_", "-")
    text = refused(*words)
    assert "takes no value" in text and f"{switch} turns it on, --no-{switch[2:]} off" in text


def test_lists() -> None:
    arguments = parsed("--pipeline-layers", "2,1,1", "--data-path", "0.3", "a", "0.7", "b")
    assert arguments.parallel.pipeline_layers == (2, 1, 1)
    assert arguments.data.data_path == ("0.3", "a", "0.7", "b")


def test_megatrons_names_for_balance_flags_work() -> None:
    model = parsed("--moe-aux-loss-coeff", "1e-4", "--moe-router-bias-update-rate", "0.01").model
    assert (model.aux_loss_alpha, model.router_bias_update_rate) == (1e-4, 0.01)


def test_unknown_flags_are_all_refused_with_the_closest_one() -> None:
    text = refused("--tensor-model-paralel-size", "2", "--lrr", "1", "-seed", "1")
    assert "unknown flag --tensor-model-paralel-size: did you mean --tensor-model-parallel-size?" in text
    assert "unknown flag --lrr: did you mean --lr?" in text
    assert "unknown flag -seed: did you mean --seed?" in text


def test_only_switches_have_a_no_form() -> None:
    assert "unknown flag --no-lr" in refused("--no-lr")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--lr", "abc"], ["--lr", "'abc'"]),
        (["--precision", "fp8"], ["--precision", "'fp8'", "bf16"]),
        (["--seed", "1.5"], ["--seed", "'1.5'"]),
        (["--pipeline-layers", "2,x"], ["--pipeline-layers", "whole numbers such as 2,1,1", "'2,x'"]),
        (["--lr"], ["--lr"]),
        (["stray"], ["stray"]),
    ],
)
def test_a_value_of_another_type_is_refused_in_one_plain_line(words: list[str], expected: list[str]) -> None:
    text = refused(*words)
    assert all(part in text for part in expected)
    assert "\n" not in text and "│" not in text and "helptext" not in text


def test_negative_values_reach_the_range_check() -> None:
    assert parsed("--lr", "-1").optimizer.lr == -1.0


def test_command_line_wins_over_yaml_wins_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lr: 1e-3\nmin-lr: 1e-5\ndata_path: [a, b]\neod-mask-loss: true\npipeline_layers: 3,1\n")
    arguments = parsed("--lr", "0.5", "--config", str(file), "--no-eod-mask-loss", "--data-path", "c")
    assert arguments.optimizer.lr == 0.5
    assert arguments.optimizer.min_lr == 1e-5
    assert arguments.data.data_path == ("c",)
    assert arguments.data.eod_mask_loss is False
    assert arguments.parallel.pipeline_layers == (3, 1)
    assert arguments.optimizer.weight_decay == Arguments().optimizer.weight_decay
    assert parsed(f"--config={file}").optimizer.lr == 1e-3


def test_yaml_errors_are_shown_together_with_file_key_and_closest_flag() -> None:
    with pytest.raises(ConfigurationError) as caught:
        from_yaml("lrr: 1\nseed: many\nprecision: fp8\noverwrite: 1\nseq-length: 8\nseq_length: 8\n", source="x.yaml")
    text = str(caught.value)
    assert "x.yaml: unknown key 'lrr': did you mean lr?" in text
    assert "x.yaml: seed must be a whole number, not 'many'" in text
    assert "x.yaml: precision must be one of fp32, bf16, fp16, not 'fp8'" in text
    assert "x.yaml: overwrite must be true or false, not 1" in text
    assert "x.yaml: seq_length is given twice" in text
    assert len(caught.value.errors) == 5


def test_a_file_of_flags_that_names_another_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="x.yaml: config 'base.yaml': a file of flags doesn't read another"):
        from_yaml("config: base.yaml\nlr: 1\n", source="x.yaml")
    (tmp_path / "run.yaml").write_text("lr: 0.5\n")
    arguments = parsed("--config", str(tmp_path / "run.yaml"))
    (tmp_path / "config.yaml").write_text(to_yaml(arguments))  # what a run writes can be given to the next one
    again = parsed("--config", str(tmp_path / "config.yaml"))
    assert again == arguments.replace(config=again.run.config)


@pytest.mark.parametrize("text", ["- lr", "lr: [", "lr: {a: 1}", "train_iters: null", "train_iters: true"])
def test_yaml_that_isnt_a_map_of_flags_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="YAML"):
        from_yaml(text)


def test_missing_config_is_refused_by_name(tmp_path: Path) -> None:
    assert str(tmp_path / "none.yaml") in refused("--config", str(tmp_path / "none.yaml"))


# Characters that str.isprintable takes, without a filter that hypothesis could starve at.
PRINTABLE = st.text(st.characters(exclude_categories=["C", "Zl", "Zp", "Zs"], include_characters=" "), min_size=1)


@settings(max_examples=30)
@given(
    lr=st.floats(allow_nan=False),
    seed=st.integers(0, 2**63),
    run_dir=PRINTABLE,
    layers=st.lists(st.integers(0, 99)).map(tuple),
    paths=st.lists(PRINTABLE).map(tuple),
    interval=st.none() | st.integers(1, 9),
    style=st.sampled_from(["cosine", "wsd", "linear", "constant"]),
    overlap=st.booleans(),
)
def test_yaml_round_trip_is_exact(
    lr: float,
    seed: int,
    run_dir: str,
    layers: tuple[int, ...],
    paths: tuple[str, ...],
    interval: int | None,
    style: str,
    overlap: bool,
) -> None:
    arguments = Arguments().replace(
        lr=lr,
        seed=seed,
        run_dir=run_dir,
        pipeline_layers=layers,
        data_path=paths,
        save_interval=interval,
        lr_decay_style=style,
        overlap_grad_reduce=overlap,
    )
    assert from_yaml(to_yaml(arguments)) == arguments


def test_backend_comes_from_the_environment_unless_given() -> None:
    assert parsed(TORCH_DISTRIBUTED_BACKEND="gloo").distributed.distributed_backend == "gloo"
    given_too = parse(["--distributed-backend", "nccl"], {"TORCH_DISTRIBUTED_BACKEND": "gloo"})
    assert given_too.distributed.distributed_backend == "nccl"
    assert parsed().distributed.distributed_backend is None
    with pytest.raises(ConfigurationError, match="TORCH_DISTRIBUTED_BACKEND is 'mpi'"):
        parsed(TORCH_DISTRIBUTED_BACKEND="mpi")


def test_every_schedule_has_its_name_in_the_flag() -> None:
    names = typing.get_args(typing.get_type_hints(ParallelArguments)["pipeline_schedule"])
    assert sorted(names) == sorted([*SCHEDULES, AUTO])
