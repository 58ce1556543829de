"""Reward functions by name: TRL's own, and those with an import path."""

from __future__ import annotations

import importlib
from typing import Any

from trl_grpo_ext._strategy import import_object, import_path, kinds
from trl_grpo_ext._suggest import did_you_mean
from trl_grpo_ext.errors import SpecError

TRL_FUNCTIONS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
"""Functions of `trl.rewards` that score completions as they are (its ``get_*`` factories have wrappers here)."""


def resolve_function(name: str) -> Any:
    """Return the reward function called `name`: one of `TRL_FUNCTIONS`, or ``"module:function"``.

    Raises `SpecError` with the nearest names if there is none, or if the import is refused or fails.
    """
    if ":" in name:
        target = import_object(name)
        if not callable(target):
            raise SpecError(f"{name!r} must be callable to be a reward function, got {target!r}")
        return target
    if name in TRL_FUNCTIONS:
        return getattr(importlib.import_module("trl.rewards"), name)
    valid = (*TRL_FUNCTIONS, *kinds("reward"))
    raise SpecError(
        f"unknown reward {name!r}{did_you_mean(name, valid)} A function of your own is written 'module:function'."
    )


def function_spec(function: Any) -> str:
    """Return the name by which `resolve_function` finds `function` again; raise `SpecError` if it can't."""
    name = getattr(function, "__name__", None)
    if name in TRL_FUNCTIONS and getattr(function, "__module__", "").startswith("trl.rewards"):
        return name
    return import_path(function)
