"""Every problem of one spec at once: unknown kinds and fields, missing fields and values out of range, at any depth."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trl_grpo_ext._strategy import Strategy, as_numbers, build, check_size, kinds, read_json
from trl_grpo_ext._suggest import did_you_mean
from trl_grpo_ext.cli._catalogue import default_of, fields_of, is_required
from trl_grpo_ext.errors import SpecError
from trl_grpo_ext.specs import LIST_FIELDS, SPEC_FIELDS, build_field

# What stands in for a nested spec that has problems of its own, so that its parent can still be checked.
_STAND_INS = {
    "advantage": "rank",
    "transform": {"kind": "clip", "limit": 1.0},
    "kl": "k3",
    "reward": "think_format_reward",
}


def field_problems(name: str, value: Any) -> list[str]:
    """Return one sentence for each problem of what a strategy field of a config holds: specs, or a word."""
    if name not in SPEC_FIELDS:
        message = _message(build_field, name, value)
        return [] if message is None else [message]
    try:
        value = read_json(value)
        check_size(value)
    except SpecError as error:
        return [f"`{name}`: {error}"]
    many = name in LIST_FIELDS and isinstance(value, (list, tuple))
    specs = {f"{name}[{index}]": spec for index, spec in enumerate(value)} if many else {name: value}
    return [problem for where, spec in specs.items() for problem in spec_problems(spec, SPEC_FIELDS[name], where)]


def spec_problems(spec: Any, family: str, where: str) -> list[str]:
    """Return one sentence for each problem of `spec`; `where` is its place in the config, such as ``rewards[0]``."""
    return list(dict.fromkeys(f"`{place}`: {message}" for place, message in _problems(spec, family, where)))


def _problems(spec: Any, family: str, where: str) -> Iterator[tuple[str, str]]:
    try:
        spec = read_json(spec)
    except SpecError as wrong:
        yield where, str(wrong)
        return
    kind = spec.get("kind") if isinstance(spec, Mapping) else spec
    cls = kinds(family).get(kind) if isinstance(kind, str) else None
    if cls is None:
        error = _error(spec, family)
        if error is not None:
            yield where, error
        return
    given = {key: value for key, value in spec.items() if key != "kind"} if isinstance(spec, Mapping) else {}
    fields = fields_of(cls)
    for name in [name for name in given if name not in fields]:
        valid = did_you_mean(str(name), fields) if fields else "; it has no fields."
        yield where, f"{family} kind {kind!r} has no field {name!r}{valid}"
        del given[name]
    given = {name: as_numbers(value, fields[name]) for name, value in given.items()}
    stood_in: set[str] = set()
    missing = [name for name, field in fields.items() if is_required(field) and name not in given]
    if missing:
        yield where, f"{family} kind {kind!r} needs {', '.join(f'`{name}`' for name in missing)}"
    for name in missing:
        given[name] = _stand_in(cls, name)
        stood_in.add(name)
    for name, field in fields.items():
        inner_family = field.metadata.get("family")
        if inner_family is None or name not in given or name in stood_in:
            continue
        found = list(_nested(given[name], inner_family, f"{where}.{name}"))
        if found:
            yield from found
            given[name] = _stand_in(cls, name)
            stood_in.add(name)
    yield from _out_of_range(cls, given, stood_in, where)


def _nested(value: Any, family: str, where: str) -> Iterator[tuple[str, str]]:
    """Walk what a nested field may hold: a spec, a list or mapping of them, with numbers among them."""
    if value is None or isinstance(value, (bool, int, float)):
        return
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _nested(item, family, f"{where}[{index}]")
    elif isinstance(value, Mapping) and "kind" not in value:
        for key, item in value.items():
            yield from _nested(item, family, f"{where}.{key}")
    else:
        yield from _problems(value, family, where)


def _out_of_range(
    cls: type[Strategy], given: dict[str, Any], stood_in: set[str], where: str
) -> Iterator[tuple[str, str]]:
    """Build it again and again, each time with the field at fault replaced, until it builds."""
    for _ in range(len(given) + 1):
        message = _error({"kind": cls.kind, **given}, cls.family)
        if message is None:
            return
        name = next((n for n in re.findall(r"`(\w+)", message) if n in given), None)
        if name in stood_in:
            return
        yield where, message
        if name is None:
            return
        given[name] = _stand_in(cls, name)
        stood_in.add(name)


def _stand_in(cls: type[Strategy], name: str) -> Any:
    """Return a value that is right for the field: its default, or by its type."""
    field = fields_of(cls)[name]
    if not is_required(field):
        return default_of(field)
    text, family = str(field.type), field.metadata.get("family")
    if family is not None:
        spec = _STAND_INS[family]
        if "tuple[float" in text:
            return [[1.0, spec]]
        return [spec] if text.startswith("Sequence") else spec
    if text.startswith("Callable"):
        return "builtins:len"
    return 1 if text.startswith(("float", "int")) else "name"


def _error(spec: Any, family: str) -> str | None:
    """Return what is wrong with `spec` as a whole, or None."""
    return _message(build, spec, family)


def _message(function: Callable[..., Any], *arguments: Any) -> str | None:
    """Return what the function raises, as one line; None if it raises nothing."""
    try:
        function(*arguments)
    except Exception as error:  # a class of the user's may raise anything when it is built
        return " ".join(str(error).split()) or type(error).__name__
    return None
