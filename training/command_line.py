"""From the command line and YAML to `Arguments`, and back to YAML.

May import the standard library, tyro and PyYAML, so that `--help` answers without torch.
The order is Megatron's: the command line wins over `--config`, `--config` over the defaults.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import os
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro
import yaml

from training import compositions
from training.arguments import GROUP_OF, Arguments, Kernels, numbers_from_text
from training.failures import ConfigurationError
from training.megatron import EXACT, instead_of, nearly

MEGATRON_ALIASES = {
    "moe_aux_loss_coeff": "aux_loss_alpha",
    "moe_router_bias_update_rate": "router_bias_update_rate",
}
"""Megatron's name -> ours, where ours follows Hugging Face's config.json instead."""


def parse(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Arguments:
    """Arguments from the command line (default: sys.argv), over the YAML of `--config`, over the defaults.

    Raises ConfigurationError for unknown flags, with what Megatron's are here or the closest one, and for values of
    another type.
    `--help` prints and raises SystemExit(0), and so does `--help-compositions`, whatever else is given.
    """
    environ = os.environ if environ is None else environ
    argv = sys.argv[1:] if argv is None else argv
    if any(word.startswith("--") and _field_name(word) == "help_compositions" for word in argv):
        print(compositions.as_text())
        raise SystemExit(0)
    words = _with_known_flags(argv)
    config = _value_of("--config", words)
    arguments = _run_tyro(words, default=_read_config(config) if config else Arguments())
    backend = environ.get("TORCH_DISTRIBUTED_BACKEND")
    if backend and arguments.distributed.distributed_backend is None:
        if backend not in ("nccl", "gloo"):
            raise ConfigurationError(f"TORCH_DISTRIBUTED_BACKEND is {backend!r}: set nccl or gloo, or unset it")
        arguments = arguments.replace(distributed_backend=backend)
    kernels = environ.get("KERNELS")
    if kernels and arguments.compression.kernels is None:
        if kernels not in typing.get_args(Kernels):
            raise ConfigurationError(f"KERNELS is {kernels!r}: set {', '.join(typing.get_args(Kernels))}, or unset it")
        arguments = arguments.replace(kernels=kernels)
    return arguments


def to_yaml(arguments: Arguments) -> str:
    """All flags of a run as flat YAML, a comment before each group; `from_yaml` gives back an equal object.

    `--config` isn't among them: what its file said is. Nor are `--resume` and `--overwrite`, which are words about one
    start: whoever reads the file again must not move a run aside by it. `--help-compositions` starts no run.
    """
    parts = []
    for group in dataclasses.fields(arguments):
        values = dataclasses.asdict(getattr(arguments, group.name))
        values = {name: value for name, value in values.items() if name not in _OF_ONE_START}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        parts.append(f"# {group.name}\n" + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
    return "\n".join(parts)


_OF_ONE_START = ("config", "resume", "overwrite", "help_compositions")


def from_yaml(text: str, source: str = "YAML") -> Arguments:
    """Arguments from flat YAML of flags; absent ones keep their defaults. `source` is named in errors.

    Raises ConfigurationError that lists every unknown key, with the closest flag, and every value of another type.
    """
    try:
        content = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{source} isn't valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(
            f"{source} must map flags to values, such as 'lr: 1e-4', not hold a {type(content).__name__}"
        )
    values: dict[str, Any] = {}
    errors = []
    for key, value in content.items():
        name = _field_name(str(key))
        if name not in GROUP_OF:
            errors.append(f"{source}: {_unknown(str(key), '')}")
        elif name == "config" and value is not None:
            errors.append(f"{source}: config {value!r}: a file of flags doesn't read another one; copy its flags here")
        elif name in values:
            errors.append(f"{source}: {name} is given twice, last as {key!r}: keep one")
        else:
            try:
                values[name] = _convert(value, _DECLARED[name])
            except ValueError as error:
                errors.append(f"{source}: {key} {error}")
    if errors:
        raise ConfigurationError(*errors)
    return Arguments().replace(**values)


def _field_name(flag: str) -> str:
    name = flag.lstrip("-").replace("-", "_")
    return MEGATRON_ALIASES.get(name, name)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _unknown(flag: str, dashes: str = "--") -> str:
    """What to say of a flag that doesn't exist: the closest one, or what it is here where another program has it.

    `dashes` is "--" on the command line and "" in YAML.
    """
    name = flag.lstrip("-").replace("_", "-")
    ours = [known.replace("_", "-") for known in (*GROUP_OF, *MEGATRON_ALIASES)]
    line = EXACT.get(name)
    # A slip of one of ours comes before a family of foreign names: --moe-aux-loss-coef isn't just any --moe-*.
    near = [] if line else difflib.get_close_matches(name, ours, n=1, cutoff=0.9)
    if line := line or (None if near else instead_of(name)):
        return f"{flag}: {line}"
    if not near and (foreign := nearly(name)):
        return f"{flag} ({dashes}{foreign}?): {instead_of(foreign)}"
    near = near or difflib.get_close_matches(name, ours, n=1)
    told = f"did you mean {dashes}{near[0]}?" if near else "see --help for all"
    return f"unknown flag {flag}: {told}" if dashes else f"unknown key {flag!r}: {told.replace('-', '_')}"


def _with_known_flags(argv: Sequence[str]) -> list[str]:
    """`argv` with every flag in its canonical spelling. Raises ConfigurationError that lists what isn't right."""
    words, errors = [], []
    for place, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if not re.match(r"--?[A-Za-z]", flag) or flag in ("-h", "--help"):  # a value, which may be negative
            words.append(word)
            continue
        name = _field_name(flag)
        switch = name.removeprefix("no_")
        if not flag.startswith("--") or not (name in GROUP_OF or _DECLARED.get(switch) is bool):
            errors.append(_unknown(flag))
        elif _DECLARED.get(switch) is bool and (equals or _is_truth(argv[place + 1 : place + 2])):
            errors.append(f"{flag} takes no value: {_flag(switch)} turns it on, {_flag('no_' + switch)} off")
        else:
            words.append(_flag(name) + equals + value)
    if errors:
        raise ConfigurationError(*errors)
    return words


def _is_truth(following: Sequence[str]) -> bool:
    return bool(following) and following[0].lower() in ("true", "false", "yes", "no", "on", "off", "0", "1")


def _value_of(flag: str, words: Sequence[str]) -> str | None:
    """The last value given to `flag`, as `--flag value` or `--flag=value`."""
    value = None
    for place, word in enumerate(words):
        if word == flag:
            value = words[place + 1] if place + 1 < len(words) else None
        elif word.startswith(flag + "="):
            value = word.removeprefix(flag + "=")
    return value


def _read_config(path: str) -> Arguments:
    try:
        return from_yaml(Path(path).read_text(encoding="utf-8"), source=path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--config {path} can't be read: {error}") from error


def _run_tyro(words: Sequence[str], default: Arguments) -> Arguments:
    said = io.StringIO()
    try:
        # tyro prints a box and exits; as an exception it is shown once, not by each of 64 ranks.
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                tyro.conf.OmitArgPrefixes[tyro.conf.DisallowNone[Arguments]],
                args=list(words),
                default=default,
                prog="pretrain_deepseek.py",
                description="Pretrain DeepSeek-V2/V3. Flags are Megatron-LM's: see docs/from-megatron.md.",
                config=(),
            )
    except SystemExit as error:
        if not error.code:
            raise
        raise ConfigurationError(_with_choices(one_line(said.getvalue()))) from None


def _with_choices(text: str) -> str:
    """tyro's line on a value that isn't among a flag's, as YAML's: it names them in an order of chance, and None."""
    found = re.match(r"invalid choice '(.*)' for argument '--([\w-]+)'", text)
    if found is None or (name := _field_name(found[2])) not in _DECLARED:
        return text
    try:
        _convert(found[1], _DECLARED[name])
    except ValueError as error:
        return f"{_flag(name)} {error}"
    return text


def one_line(box: str) -> str:
    """What tyro says in a box about wrong flags, as one line."""
    lines = [re.sub(r"[╭╮╰╯│─]+", " ", line).strip() for line in box.splitlines()]
    text = " ".join(line for line in lines[1:] if line)
    return re.split(" Argument helptext:| For full helptext", text)[0]


_DECLARED: dict[str, Any] = {
    name: typing.get_type_hints(group.default_factory)[name]
    for group in dataclasses.fields(Arguments)
    for name in GROUP_OF
    if GROUP_OF[name] == group.name
}
"""Flag name -> its declared type, for reading YAML."""


def _convert(value: Any, declared: Any) -> Any:
    """`value` as `declared`: bool, int, float, str, Literal, tuple of ints or of strings, or one of these | None.

    Lists become tuples; "2,1,1" is a tuple of ints; 1e-4, which YAML 1.1 reads as a string, is a float.
    """
    origin, options = typing.get_origin(declared), typing.get_args(declared)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _convert(value, next(option for option in options if option is not type(None)))
    if origin is typing.Literal:
        if value not in options:
            raise ValueError(f"must be one of {', '.join(map(str, options))}, not {value!r}")
        return value
    if origin is tuple:
        if options[0] in (int, float) and isinstance(value, str):
            return numbers_from_text(value, options[0])
        return tuple(_convert(item, options[0]) for item in (value if isinstance(value, list | tuple) else [value]))
    if declared is bool and isinstance(value, bool):
        return value
    if declared is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if declared is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    if declared is str and isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[declared]
    raise ValueError(f"must be {wanted}, not {value!r}")
