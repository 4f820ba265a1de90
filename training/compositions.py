"""What goes with what: ZeRO's stages beside parallelism, precision, offloading and compression, as a table of data.

Imports neither torch nor DeepSpeed. `--help-compositions` prints it, `validate_zero` refuses what isn't in it, and
docs/zero.md shows it. To allow a cell, take its stage out of the feature's `why_not` and add the test that proves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from training.arguments import Arguments

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Feature:
    """A row of the table. asked: the flag and its value where a run asks for it, else None.

    why_not: stage -> the reason, in words; a stage that isn't in it goes with the feature.
    """

    name: str
    asked: Callable[[Arguments], str | None]
    why_not: Mapping[int, str] = field(default_factory=dict)

    def stages(self) -> str:
        """Those it goes with: "0 or 1"."""
        fitting = [str(stage) for stage in STAGES if stage not in self.why_not]
        return " or ".join([", ".join(fitting[:-1]), fitting[-1]]) if len(fitting) > 1 else fitting[0]


def _above_one(name: str) -> Callable[[Arguments], str | None]:
    def asked(arguments: Arguments) -> str | None:
        size: int = getattr(arguments.parallel, name)
        return f"--{name.replace('_', '-')} {size}" if size > 1 else None

    return asked


def _is(name: str, *values: object) -> Callable[[Arguments], str | None]:
    def asked(arguments: Arguments) -> str | None:
        value = arguments.flat()[name]
        flag = "--" + name.replace("_", "-")
        return None if value not in values else flag if value is True else f"{flag} {value}"

    return asked


def _pipeline(arguments: Arguments) -> str | None:
    parallel = arguments.parallel
    if parallel.pipeline_model_parallel_size > 1:
        return f"--pipeline-model-parallel-size {parallel.pipeline_model_parallel_size}"
    # On one rank these still cut backward passes, or the model, in two.
    whole = parallel.pipeline_schedule in ("1f1b", "gpipe")
    return None if whole else f"--pipeline-schedule {parallel.pipeline_schedule}"


def _moments(arguments: Arguments) -> str | None:
    optimizer = arguments.optimizer
    given = {"--exp-avg-dtype": optimizer.exp_avg_dtype, "--exp-avg-sq-dtype": optimizer.exp_avg_sq_dtype}
    return " ".join(f"{flag} {dtype}" for flag, dtype in given.items() if dtype == "bf16") or None


def _compression(arguments: Arguments) -> str | None:
    codec = arguments.compression.grad_compression
    return None if codec == "none" else f"--grad-compression {codec}"


def _recomputation(arguments: Arguments) -> str | None:
    granularity = arguments.training.recompute_granularity
    return None if granularity == "none" else f"--recompute-granularity {granularity}"


_ENGINE_BACKWARD = (
    "DeepSpeed's engine owns the backward: weight gradients that a schedule defers would pass it by, and at stage 3 "
    "all ranks must be at the same layer"
)
_ONE_ENGINE = (
    "experts need an engine of their own, over the ranks that hold the same ones, and only one engine can own the "
    "backward"
)
_ENGINE_REDUCES = "DeepSpeed's engine reduces gradients itself, in fp32"
_NO_ENGINE = "without ZeRO there is no engine of DeepSpeed to offload anything"
_WHOLE_PARAMETERS = "parameters are whole on every replica and always in use"
_DISK = "DeepSpeed swaps to a disk at stage 3 only"
_NO_ACCUMULATION = "each micro-batch's gradients are summed into shards as they come, so nothing is left to sum later"

FEATURES = (
    Feature("tensor parallel", _above_one("tensor_model_parallel_size")),
    Feature("context parallel", _above_one("context_parallel_size")),
    Feature("pipeline, any schedule", _pipeline, dict.fromkeys((2, 3), _ENGINE_BACKWARD)),
    Feature("expert parallel", _above_one("expert_model_parallel_size"), dict.fromkeys((2, 3), _ONE_ENGINE)),
    Feature(
        "tokens travel while others compute",
        _is("overlap_moe_expert_parallel_comm", True),
        dict.fromkeys((2, 3), "it needs a pipeline and experts on several ranks"),
    ),
    Feature("gradient compression", _compression, dict.fromkeys((2, 3), _ENGINE_REDUCES)),
    Feature("fp32", _is("precision", "fp32")),
    Feature("bf16", _is("precision", "bf16")),
    Feature("fp16", _is("precision", "fp16")),
    Feature("Adam's moments in bf16", _moments),
    Feature("SGD", _is("optimizer", "sgd")),
    Feature("optimizer offloaded to the host", _is("offload_optimizer", "cpu"), {0: _NO_ENGINE}),
    Feature("optimizer offloaded to a disk", _is("offload_optimizer", "nvme"), {0: _NO_ENGINE, 1: _DISK, 2: _DISK}),
    Feature(
        "parameters offloaded to the host",
        _is("offload_param", "cpu"),
        {0: _NO_ENGINE, 1: _WHOLE_PARAMETERS, 2: _WHOLE_PARAMETERS},
    ),
    Feature(
        "parameters offloaded to a disk",
        _is("offload_param", "nvme"),
        {0: _NO_ENGINE, 1: _WHOLE_PARAMETERS, 2: _WHOLE_PARAMETERS},
    ),
    Feature("recomputation", _recomputation),
    Feature("16-bit weights saved", _is("save_16bit_weights", True)),
    Feature("no_sync", lambda arguments: None, dict.fromkeys((2, 3), _NO_ACCUMULATION)),  # a call, no flag asks for it
)

_ADAM_ON_HOST = "on the host the step is DeepSpeed's CPU-Adam"
_OFFLOADED = ("optimizer offloaded to the host", "optimizer offloaded to a disk")
EXCLUDED = {
    **{("Adam's moments in bf16", place): f"{_ADAM_ON_HOST}, which keeps its moments in fp32" for place in _OFFLOADED},
    ("SGD", "optimizer offloaded to a disk"): "DeepSpeed swaps Adam's moments",
}
"""Two features that don't go together at any stage -> why."""


def composition_errors(arguments: Arguments) -> Iterator[str]:
    """What of the (completed) flags isn't in the table, with the numbers and the fix."""
    stage = arguments.zero.zero_stage or 0
    asked = {feature.name: text for feature in FEATURES if (text := feature.asked(arguments))}
    for feature in FEATURES:
        if feature.name in asked and (reason := feature.why_not.get(stage)):
            yield (
                f"{asked[feature.name]} doesn't go with --zero-stage {stage}: {reason}; use --zero-stage "
                f"{feature.stages()}, or leave it out (--help-compositions shows what goes with what)"
            )
    for (one, other), reason in EXCLUDED.items():
        if one in asked and other in asked:
            yield f"{asked[one]} doesn't go with {asked[other]}: {reason}; leave one of them out"


def as_text() -> str:
    """The table for a terminal."""
    width = max(len(feature.name) for feature in FEATURES)
    rows = [f"{name:{width}}  " + "".join(f"{cell:7}" for cell in cells).rstrip() for name, cells in _rows()]
    head = f"{'--zero-stage':{width}}  " + "".join(f"{stage:<7}" for stage in STAGES).rstrip()
    notes = [f"{number}  {reason}" for number, reason in enumerate(_reasons(), 1)]
    apart = [f"{one} and {other}: {reason}" for (one, other), reason in EXCLUDED.items()]
    blocks = [["What goes with what", ""], [head, *rows], ["", *notes], ["", "Not together at any stage:", *apart]]
    return "\n".join(line for block in blocks for line in block)


def as_markdown() -> str:
    """The table for the documents."""
    lines = ["| | stage 0 | stage 1 | stage 2 | stage 3 |", "|---|---|---|---|---|"]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in _rows()]
    lines += ["", *(f"{number}. {reason}" for number, reason in enumerate(_reasons(), 1))]
    lines += ["", "Not together at any stage:", ""]
    lines += [f"- {one} and {other}: {reason}" for (one, other), reason in EXCLUDED.items()]
    return "\n".join(lines)


def _reasons() -> list[str]:
    """Each reason once, in the order of the table."""
    return list(dict.fromkeys(reason for feature in FEATURES for reason in feature.why_not.values()))


def _rows() -> Iterator[tuple[str, list[str]]]:
    reasons = _reasons()
    for feature in FEATURES:
        numbers = [feature.why_not.get(stage) for stage in STAGES]
        yield feature.name, ["yes" if why is None else f"no ({reasons.index(why) + 1})" for why in numbers]
