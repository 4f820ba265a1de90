"""What foreign flags are told: every flag of Megatron-LM is ours or gets one line, whose flags exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from training.arguments import GROUP_OF, Arguments
from training.command_line import MEGATRON_ALIASES, from_yaml, parse
from training.failures import ConfigurationError
from training.megatron import EXACT, FAMILIES, instead_of

OURS = {name.replace("_", "-") for name in [*GROUP_OF, *MEGATRON_ALIASES]}
SWITCHES = {f"no-{name.replace('_', '-')}" for name, value in Arguments().flat().items() if isinstance(value, bool)}


def megatrons_flags() -> list[str]:
    lines = (Path(__file__).parent / "megatron_flags.txt").read_text(encoding="utf-8").splitlines()
    return [name for line in lines if not line.startswith("#") for name in line.split()]


def told(*argv: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        parse(argv, {})
    return str(caught.value)


def test_every_flag_of_megatron_is_ours_or_gets_a_line() -> None:
    flags = megatrons_flags()
    assert len(flags) == len(set(flags)) > 500
    assert [flag for flag in flags if flag not in OURS and instead_of(flag) is None] == []


def test_every_flag_of_megatron_that_is_not_ours_gets_its_line_on_the_command_line() -> None:
    foreign = [flag for flag in megatrons_flags() if flag not in OURS]
    lines = told(*(f"--{flag}" for flag in foreign)).splitlines()
    assert lines == [f"- --{flag}: {instead_of(flag)}" for flag in foreign]


def test_none_of_our_flags_is_answered_as_a_foreign_one() -> None:
    assert [flag for flag in OURS | SWITCHES if instead_of(flag) is not None] == []


def test_lines_name_flags_that_exist_and_are_one_line() -> None:
    for line in {*EXACT.values(), *FAMILIES.values()}:
        assert "\n" not in line and len(line) < 160, line
        assert set(re.findall(r"--([a-z][\w-]*)", line)) <= OURS, line


def test_every_pattern_answers_a_flag_of_megatron_or_of_another_program() -> None:
    """A misspelt name in the map would answer nobody."""
    known = set(megatrons_flags())
    others = {
        name for name, line in EXACT.items() if line.startswith("use ") or "leave it out" in line or "torchrun" in line
    }
    assert sorted(set(EXACT) - known - others) == []
    unused = [start for start in FAMILIES if not any(flag.startswith(start) for flag in known)]
    assert unused == ["moe-hybridep-", "rdzv-"]  # newer than the list; torchrun's


@pytest.mark.parametrize(
    ("flag", "part"),
    [
        ("--bf16", "--bf16: use --precision bf16"),
        ("--num-layers", "num_hidden_layers in its config.json"),
        ("--moe_router_topk", "--moe_router_topk: the model's shape comes from --model: num_experts_per_tok"),
        ("--sequence-parallel", "leave it out: always on where --tensor-model-parallel-size is above 1"),
        ("--use-distributed-optimizer", "--use-distributed-optimizer: use --zero-stage 1"),
        ("--use-torch-fsdp2", "use --zero-stage 2 (gradients shared too) or 3"),
        ("--torch-fsdp2-no-reshard-after-forward", "gathering is DeepSpeed's; --deepspeed-config takes"),
        ("--optimizer-cpu-offload", "use --offload-optimizer cpu with --zero-stage 1, 2 or 3"),
        ("--fp16", "--fp16: use --precision fp16"),
        ("--finetune", "use --pretrained-checkpoint"),
        ("--deepspeed", "--zero-stage or --deepspeed-config turn DeepSpeed on"),
        ("--ds-config", "use --deepspeed-config"),
        ("--cpu-optimizer", "use --offload-optimizer cpu"),
        ("--remote-device", "use --offload-param cpu or nvme with --zero-stage 3"),
        ("--recompute-num-layers=1", "--recompute-granularity full recomputes each block"),
        ("--recompute-activations", "use --recompute-granularity selective"),
        ("--no-masked-softmax-fusion", "leave it out"),
        ("--lr-decay-samples", "use --lr-decay-iters: samples / --global-batch-size"),
        ("--ddp-bucket-size", "use --bucket-cap-mb"),
        ("--no-load-rng", "no generator's state"),
        ("--load-rng", "unknown flag --load-rng: did you mean --load?"),
        ("--retro-encoder-layers", "not here"),
        ("--inference-max-requests", "doesn't serve"),
        ("--wandb-project", "metrics.jsonl"),
        ("--tp", "--tp: use --tensor-model-parallel-size"),
        ("--training.local_batch_size", "use --micro-batch-size"),
        ("--learning_rate", "use --lr"),
        ("--nproc-per-node", "it is torchrun's: put it before pretrain_deepseek.py"),
        ("--num-layer", "--num-layer (--num-layers?): the model's shape"),
        ("--moe-aux-loss-coef", "did you mean --moe-aux-loss-coeff?"),  # a slip of ours, not one of the family --moe-*
    ],
)
def test_a_foreign_flag_is_told_what_it_is_here(flag: str, part: str) -> None:
    assert part in told(flag, "1")


def test_foreign_keys_of_yaml_get_the_same_line() -> None:
    with pytest.raises(ConfigurationError) as caught:
        from_yaml("bf16: true\nnum-layers: 4\nlrr: 1\n", source="x.yaml")
    assert caught.value.errors == (
        "x.yaml: bf16: use --precision bf16",
        "x.yaml: num-layers: the model's shape comes from --model: num_hidden_layers in its config.json",
        "x.yaml: unknown key 'lrr': did you mean lr?",
    )
