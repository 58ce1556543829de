"""Strategies as data: ``{"kind": ...}`` to object and back, for YAML, the command line, checkpoints and the Hub.

A spec is a kind (``"rank"``), a mapping with a kind and fields (``{"kind": "zscore", "eps": 1e-6}``), or for
strategies outside this package an import path (``{"kind": "my_pkg.my_module:MyStrategy"}``). Specs nest.
"""

from __future__ import annotations

import json
from typing import Any

from trl_grpo_ext._strategy import FAMILIES, Strategy, build, dump, kinds, read_json, refuse_code
from trl_grpo_ext._suggest import did_you_mean
from trl_grpo_ext._validate import check_choice
from trl_grpo_ext.errors import ConfigError, SpecError
from trl_grpo_ext.kl.base import WEIGHTINGS

__all__ = [
    "FAMILIES",
    "LIST_FIELDS",
    "NEEDS_BETA",
    "SETTINGS",
    "SPEC_FIELDS",
    "STRATEGY_FIELDS",
    "build_field",
    "from_spec",
    "is_of_the_script",
    "kinds",
    "to_spec",
]

SPEC_FIELDS = {
    "advantage": "advantage",
    "kl": "kl",
    "kl_log": "kl",
    "beta_control": "beta",
    "reference": "reference",
    "shaping": "shaping",
    "rewards": "reward",
}
"""Field of a config or of a saved file -> the family of its specs. Those in `LIST_FIELDS` hold one spec or a list."""

LIST_FIELDS = ("kl_log", "shaping", "rewards")

SETTINGS = {"kl_weighting": ("auto", *WEIGHTINGS), "kl_placement": ("loss", "reward")}
"""Our fields that are plain words, with the words they may be; the first is the default."""

NEEDS_BETA = ("kl", "kl_log", "beta_control", "reference")
"""Fields that mean nothing without a KL term."""

STRATEGY_FIELDS = (*SPEC_FIELDS, *SETTINGS)
"""Every field that makes up a set of strategies."""


def from_spec(spec: Any, *, family: str, remote: bool = False, trust_remote_code: bool = False) -> Any:
    """Build the strategy that `spec` describes, also as JSON text. An object of the family is returned as it is.

    `family` is one of `FAMILIES`. `remote` says that the spec was not written by the user (it comes from the Hub):
    then import paths in it, and models with code of their own, are refused at any depth unless `trust_remote_code`.

    Raises `SpecError` (a ``ValueError``) with the nearest valid names for an unknown family, kind or field, and
    `ConfigError` for a value out of range.

    >>> from_spec("rank", family="advantage")
    Rank()
    >>> from_spec({"kind": "zscore", "ddof": 0}, family="advantage")
    ZScore(eps=0.0001, ddof=0, scale='group')
    """
    if remote and not trust_remote_code:
        with refuse_code():
            return build(spec, family)
    return build(spec, family)


def to_spec(strategy: Strategy | Any) -> Any:
    """Return the JSON-able spec of a strategy, with every field written out, so that it reads back the same later.

    Raises `SpecError` if it holds something without an import path, such as a lambda.

    >>> from trl_grpo_ext.advantages import ZScore
    >>> to_spec(ZScore(ddof=0))
    {'kind': 'zscore', 'eps': 0.0001, 'ddof': 0, 'scale': 'group'}
    """
    return dump(strategy)


def is_of_the_script(spec: Any) -> bool:
    """Whether a spec names something of the script that runs, which no other process can import."""
    return '"__main__:' in json.dumps(spec)


def build_field(name: str, value: Any, *, remote: bool = False, trust_remote_code: bool = False) -> Any:
    """Return what a field of a config or of a saved file holds: a strategy, for `LIST_FIELDS` a list, or a word.

    `remote` and `trust_remote_code` are as in `from_spec`. Raises `ConfigError` that names the field.

    >>> build_field("kl_log", "k1"), build_field("advantage", None)
    ([K1()], None)
    """
    if name in SETTINGS:
        check_choice(name, value, SETTINGS[name])
        return value
    if name not in SPEC_FIELDS:
        raise SpecError(f"unknown field {name!r}{did_you_mean(str(name), STRATEGY_FIELDS)}")
    if value is None:
        return None
    trust = {"remote": remote, "trust_remote_code": trust_remote_code}
    try:
        value = read_json(value)
        if name not in LIST_FIELDS:
            return from_spec(value, family=SPEC_FIELDS[name], **trust)
        specs = value if isinstance(value, (list, tuple)) else [value]
        return [from_spec(spec, family=SPEC_FIELDS[name], **trust) for spec in specs]
    except ConfigError as error:
        raise type(error)(f"`{name}`: {error}") from error
