"""Checks used by the strategies' constructors. Each says what, expected and got, and names the field."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

from trl_grpo_ext._suggest import nearest, shortened
from trl_grpo_ext.errors import ConfigError

_EXACT = 2**53
"""Integers up to here are exact as floats."""


def plain(value: Any, *, whole: bool = False) -> Any:
    """Return a number, text or flag as Python's own int, float, str or bool; anything else as it is.

    Numpy's scalars, fractions and enums pass for numbers and text, but YAML and JSON can't write them. `whole`: a float
    without a fraction becomes an int, for values that count or index something.

    >>> from fractions import Fraction
    >>> plain(Fraction(1, 4)), plain(3.0), plain(3.0, whole=True)
    (0.25, 3.0, 3)
    """
    if getattr(value, "shape", None) == ():  # a numpy scalar, or a tensor of one number
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if not isinstance(value, Real):
        return value
    if isinstance(value, Integral) and (whole or abs(int(value)) <= _EXACT):
        return int(value)
    try:
        number = float(value)
    except OverflowError:  # `check_number` says what is wrong with it
        return value
    return int(number) if whole and number.is_integer() else number


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
    ok = isinstance(value, Real) and not isinstance(value, bool) and _is_finite(value)
    ok = ok and not (integer and int(value) != value)
    ok = ok and (at_least is None or value >= at_least)
    ok = ok and (above is None or value > above)
    ok = ok and (at_most is None or value <= at_most)
    if not ok:
        raise ConfigError(f"`{name}` must be {expected}, got {shortened(value)}")


def _is_finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # beyond every float
        return False


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    """Raise `ConfigError` unless `value` is one of `choices`."""
    simple = value is None or (isinstance(value, (int, float, str)) and not isinstance(value, bool))
    if simple and value in choices:
        return
    listed, hint = ", ".join(map(repr, choices)), ""
    if isinstance(value, str):
        hint = nearest(value, [choice for choice in choices if isinstance(choice, str)])
        if not hint and not all(isinstance(choice, str) for choice in choices):
            meant = None in choices and value.lower() == "none"
            hint = "; None is written null in YAML" if meant else " as text"
    raise ConfigError(f"`{name}` must be one of {listed}, got {shortened(value)}{hint}")


def check_bool(name: str, value: Any) -> None:
    """Raise `ConfigError` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"`{name}` must be True or False, got {shortened(value)}")
