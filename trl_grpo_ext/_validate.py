"""Checks used by the strategies' constructors. Each says what, expected and got, and names the field."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Real
from typing import Any

from trl_grpo_ext._suggest import did_you_mean
from trl_grpo_ext.errors import ConfigError


def check_number(
    name: str,
    value: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    integer: bool = False,
    optional: bool = False,
) -> None:
    """Raise `ConfigError` unless `value` is a finite number within the bounds (or None, where `optional`)."""
    if value is None and optional:
        return
    expected = "an integer" if integer else "a finite number"
    if at_least is not None:
        expected = f"{'an integer ' if integer else ''}>= {at_least:g}"
    elif above is not None:
        expected = f"{'an integer ' if integer else ''}> {above:g}"
    if at_most is not None:
        expected += f" and <= {at_most:g}"
    if optional:
        expected += " or None"
    ok = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    ok = ok and not (integer and int(value) != value)
    ok = ok and (at_least is None or value >= at_least)
    ok = ok and (above is None or value > above)
    ok = ok and (at_most is None or value <= at_most)
    if not ok:
        raise ConfigError(f"`{name}` must be {expected}, got {value!r}")


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    """Raise `ConfigError` unless `value` is one of `choices`."""
    if isinstance(value, bool) or value not in choices:
        hint = did_you_mean(value, choices) if isinstance(value, str) else ""
        listed = ", ".join(map(repr, choices))
        raise ConfigError(f"`{name}` must be one of {listed}, got {value!r}{hint and hint.split(' Valid:')[0]}")


def check_bool(name: str, value: Any) -> None:
    """Raise `ConfigError` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"`{name}` must be True or False, got {value!r}")
