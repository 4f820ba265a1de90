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

from training.arguments import GROUP_OF, Arguments, layers_from_text
from training.failures import ConfigurationError

MEGATRON_ALIASES = {
    "moe_aux_loss_coeff": "aux_loss_alpha",
    "moe_router_bias_update_rate": "router_bias_update_rate",
}
"""Megatron's name -> ours, where ours follows Hugging Face's config.json instead."""


def parse(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Arguments:
    """Arguments from the command line (default: sys.argv), over the YAML of `--config`, over the defaults.

    Raises ConfigurationError for unknown flags (with the closest known one) and for values of another type.
    `--help` prints and raises SystemExit(0).
    """
    environ = os.environ if environ is None else environ
    words = _with_known_flags(sys.argv[1:] if argv is None else argv)
    config = _value_of("--config", words)
    arguments = _run_tyro(words, default=_read_config(config) if config else Arguments())
    backend = environ.get("TORCH_DISTRIBUTED_BACKEND")
    if backend and arguments.distributed.distributed_backend is None:
        if backend not in ("nccl", "gloo"):
            raise ConfigurationError(f"TORCH_DISTRIBUTED_BACKEND is {backend!r}: set nccl or gloo, or unset it")
        arguments = arguments.replace(distributed_backend=backend)
    return arguments


def to_yaml(arguments: Arguments) -> str:
    """All flags as flat YAML, a comment before each group; `from_yaml` gives back an equal object."""
    parts = []
    for group in dataclasses.fields(arguments):
        values = dataclasses.asdict(getattr(arguments, group.name))
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        parts.append(f"# {group.name}\n" + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
    return "\n".join(parts)


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
            errors.append(f"{source}: unknown key {key!r}{_closest(name, '')}")
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


def _closest(name: str, prefix: str = "--") -> str:
    dash = "-" if prefix else "_"
    near = difflib.get_close_matches(name, [*GROUP_OF, *MEGATRON_ALIASES], n=1)
    return f": did you mean {prefix}{near[0].replace('_', dash)}?" if near else ": see --help for those there are"


def _with_known_flags(argv: Sequence[str]) -> list[str]:
    """`argv` with every flag in its canonical spelling. Raises ConfigurationError that lists the unknown ones."""
    words, errors = [], []
    for word in argv:
        flag, equals, value = word.partition("=")
        if not re.match(r"--?[A-Za-z]", flag) or flag in ("-h", "--help"):  # a value, which may be negative
            words.append(word)
            continue
        name = _field_name(flag)
        negated = name.removeprefix("no_")
        if flag.startswith("--") and (name in GROUP_OF or _DECLARED.get(negated) is bool):
            words.append(_flag(name) + equals + value)
        else:
            errors.append(f"unknown flag {flag}{_closest(name)}")
    if errors:
        raise ConfigurationError(*errors)
    return words


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
                description="Pretrain a DeepSeek-V2/V3 model on one device or many. Flags are named as in Megatron-LM.",
                config=(),
            )
    except SystemExit as error:
        if not error.code:
            raise
        lines = [re.sub(r"[╭╮╰╯│─]+", " ", line).strip() for line in said.getvalue().splitlines()]
        text = " ".join(line for line in lines[1:] if line)
        raise ConfigurationError(re.split(" Argument helptext:| For full helptext", text)[0]) from None


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
        if options[0] is int and isinstance(value, str):
            return layers_from_text(value)
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
