"""Reading DeepSpeed's JSON file: by tables of its keys, under their new names, with everything wrong said at once.

Imports neither torch nor DeepSpeed. The tables are in `deepspeed_keys`; what flags have to do with it is in
`deepspeed_config`. Follows DeepSpeed 0.19.8, https://www.deepspeed.ai/docs/config-json/.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.deepspeed_keys import GATHER, OLD_GATHER, OLD_OFFLOAD, OLD_TOP_LEVEL, TOP_LEVEL, ZERO, Key
from training.failures import ConfigurationError

_KINDS = {
    bool: "true or false",
    int: "a whole number, at least {}",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a section {{…}}",
}


@dataclass(frozen=True)
class DeepSpeedFile:
    """What a file says: content holds the known keys under their new names, without what asks for nothing."""

    path: str
    content: dict[str, Any]
    errors: tuple[str, ...]
    notices: tuple[str, ...]

    def get(self, dotted: str) -> Any:
        """The value of "fp16.loss_scale"; None where it is left out."""
        value: Any = self.content
        for name in dotted.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value


def read_file(path: str) -> DeepSpeedFile:
    """The file's content by the tables. Raises ConfigurationError where it can't be read as one JSON object."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--deepspeed-config {path} can't be read: {error}") from error
    repeated: list[str] = []

    def section(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        repeated.extend(sorted({name for name in names if names.count(name) > 1}))
        return dict(pairs)

    try:
        content = json.loads(text, object_pairs_hook=section)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"--deepspeed-config {path} isn't JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(
            f"--deepspeed-config {path} must be an object of DeepSpeed's keys, such as "
            f'{{"zero_optimization": {{"stage": 1}}}}, not {type(content).__name__}'
        )
    errors = [f"{path}: {name} is given twice in one section: keep one" for name in repeated]
    notices: list[str] = []
    errors += _rename(path, content, notices)
    cleaned = _cleaned(path, content, TOP_LEVEL, "", errors, notices)
    return DeepSpeedFile(path, cleaned, tuple(errors), tuple(notices))


def as_text(value: Any) -> str:
    """A value as the file writes it, whole numbers without a point."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value)


def _rename(path: str, content: dict[str, Any], notices: list[str]) -> Iterator[str]:
    """Old names become new ones, in place, with a notice each; yields where both are given."""
    zero = content.get("zero_optimization", {})
    if zero in (None, "auto"):  # left out, as in `_cleaned`
        zero = {}
        content.pop("zero_optimization")
    if isinstance(zero, bool):
        notices.append(f'{path}: zero_optimization {as_text(zero)} is the old form of {{"stage": {int(zero)}}}')
        zero = content["zero_optimization"] = {"stage": int(zero)}
    found: list[tuple[dict[str, Any], str, dict[str, Any], str, Any]] = [
        (content, old, content, new, content[old]) for old, new in OLD_TOP_LEVEL.items() if old in content
    ]
    if isinstance(zero, dict):
        for place in (content, zero):
            found += [(place, old, zero, GATHER, place[old]) for old in OLD_GATHER if old in place]
        for old, new in OLD_OFFLOAD.items():
            if old in zero:
                found.append((zero, old, zero, new, {"device": "cpu"} if zero[old] is True else zero[old] or None))
    for place, old, where, new, value in found:
        inside = "zero_optimization." if where is zero else ""
        if new in where and where[new] != value:
            yield f"{path}: {old} is the old name of {inside}{new}, which is there too: take {old} out"
        else:
            notices.append(f"{path}: {old} is the old name of {inside}{new}")
            where[new] = value
        del place[old]
    if zero and "zero_optimization" not in content:
        content["zero_optimization"] = zero


def _cleaned(
    path: str, values: Mapping[str, Any], table: Mapping[str, Key], inside: str, errors: list[str], notices: list[str]
) -> dict[str, Any]:
    """The section's keys that flags or DeepSpeed are to have; what is wrong and what is left out goes to the lists."""
    kept: dict[str, Any] = {}
    for given, value in values.items():
        name = given if given in table or f"stage3_{given}" not in table else f"stage3_{given}"
        if name not in table:
            errors.append(f"{path}: {_unknown(given, table, inside)}")
            continue
        if name != given and name in values:
            errors.append(f"{path}: {inside}{name} is given under two names, also as {given}: take {given} out")
            continue
        key, place = table[name], inside + given
        if value is None or value == "auto":
            continue
        if (wrong := _wrong_kind(value, key)) is not None:
            errors.append(f"{path}: {place} {as_text(value)} must be {wrong}")
        elif key.section:
            kept[name] = _cleaned(path, value, key.section, place + ".", errors, notices)
        elif key.use in ("flag", "passed"):
            kept[name] = _of_its_kind(value, key)
        elif not _asks_for_nothing(value, key):
            said = f"{path}: {place}" + ("" if isinstance(value, dict) else f" {as_text(value)}")
            if key.use == "refused":
                errors.append(f"{said} is refused: {key.line}")
            elif key.line:
                notices.append(f"{said} is left out: {key.line}")
    return kept


def _unknown(name: str, table: Mapping[str, Key], inside: str) -> str:
    if not inside and name in ZERO:
        return f"{name} belongs inside zero_optimization: move it"
    near = difflib.get_close_matches(name, table, n=1)
    elsewhere = difflib.get_close_matches(name, ZERO if not inside else TOP_LEVEL, n=1, cutoff=0.8)
    told = f"did you mean {inside}{near[0]}?" if near else "DeepSpeed has no such key"
    if not near and elsewhere:
        told = f"did you mean {'' if inside else 'zero_optimization.'}{elsewhere[0]}?"
    return f"unknown key {inside}{name}: {told}"


def _wrong_kind(value: Any, key: Key) -> str | None:
    """What `value` must be instead; None where it is of the key's kind."""
    kind: Any = key.kind
    if isinstance(kind, tuple):
        known = not isinstance(value, bool) and value in kind
        return None if known else f"one of {', '.join(map(str, kind))}"
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    fits = {
        int: number and value == int(value) and value >= key.least,
        float: number,
        object: True,
    }.get(kind, isinstance(kind, type) and isinstance(value, kind))
    return None if fits else _KINDS[kind].format(key.least)


def _of_its_kind(value: Any, key: Key) -> Any:
    """A whole number written as 3.0 is 3."""
    if isinstance(key.kind, tuple):
        return key.kind[key.kind.index(value)]
    return int(value) if key.kind is int else value


def _asks_for_nothing(value: Any, key: Key) -> bool:
    """Whether a key that this project decides says what is the case anyhow, or is switched off."""
    if key.nothing:
        return (value.lower() if isinstance(value, str) else value) in key.nothing
    return _off(value)


def _off(value: Any) -> bool:
    if isinstance(value, dict):
        return not value["enabled"] if "enabled" in value else all(map(_off, value.values()))
    return value == "auto" or not value
