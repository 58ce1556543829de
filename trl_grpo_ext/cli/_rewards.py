"""Where ``train`` takes its reward functions from: TRL's `reward_funcs` and reward model id, or `rewards`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from trl_grpo_ext._strategy import imported
from trl_grpo_ext._suggest import did_you_mean
from trl_grpo_ext.errors import CompatibilityError, ConfigError, SpecError
from trl_grpo_ext.rewards import inner_functions
from trl_grpo_ext.specs import build_field

TRL_NAMES = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment")
"""The names that TRL's own script knows."""


def problems(values: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the reward settings of a config."""
    found = []
    names = values.get("reward_funcs") or []
    theirs = [key for key in ("reward_funcs", "reward_model_name_or_path") if values.get(key)]
    if theirs and values.get("rewards") is not None:
        listed = " and ".join(f"`{key}`" for key in theirs)
        found.append(f"reward functions are set both as {listed} and as `rewards`; set them in one place")
    for name in names:
        problem = _problem(name)
        if problem is not None:
            found.append(f"`reward_funcs`: {problem}")
    weights, count = values.get("reward_weights"), _count(values)
    if weights is not None and count and len(weights) != count:
        found.append(f"`reward_weights` must hold one number per reward function ({count}), got {len(weights)}")
    return found


def _count(values: Mapping[str, Any]) -> int:
    """Return how many reward functions a config names."""
    rewards = values.get("rewards")
    if rewards is not None:
        return len(rewards) if isinstance(rewards, (list, tuple)) else 1
    return len(values.get("reward_funcs") or []) + bool(values.get("reward_model_name_or_path"))


def missing(values: Mapping[str, Any]) -> list[str]:
    """Return what a run can't start without and `values` does not give."""
    found = []
    if not values.get("model_name_or_path"):
        found.append("`model_name_or_path` is not set")
    if not (values.get("dataset_name") or values.get("datasets")):
        found.append("neither `dataset_name` nor `datasets` is set")
    if not any(values.get(key) for key in ("reward_funcs", "reward_model_name_or_path", "rewards")):
        found.append("no reward function is set (`rewards` or `reward_funcs`)")
    return found


def source_problems(specs: Any) -> list[str]:
    """Return what can be seen beforehand to be wrong with the reward models among specs that can be built."""
    found = (_source_problem(part) for part in parts(specs) if hasattr(part, "check_source"))
    return [f"`rewards`: {problem}" for problem in found if problem is not None]


def parts(specs: Any) -> list[Any]:
    """Build the reward functions and return them, with those inside wrappers."""
    return [part for function in build_field("rewards", specs) or [] for part in inner_functions(function)]


def _source_problem(reward: Any) -> str | None:
    try:
        reward.check_source()
    except ConfigError as error:
        return str(error)
    except CompatibilityError:  # what is installed is a matter of the machine that will train
        return None
    return None


def allow_local_modules(*folders: str) -> None:
    """Let strategies be imported from the working directory, as TRL's script does, and from `folders`."""
    sys.path[:0] = [folder for folder in dict.fromkeys([os.getcwd(), *folders]) if folder not in sys.path]


def dotted(name: str) -> str:
    """Return a reward function's path as TRL's script writes it: ``module.function``."""
    return name.replace(":", ".")


def _problem(name: str) -> str | None:
    if name in TRL_NAMES:
        return None
    module_name, _, function = dotted(name).rpartition(".")
    if not module_name:
        return f"unknown reward function {name!r}{did_you_mean(name, TRL_NAMES)} Your own is written 'module.function'."
    allow_local_modules()
    try:
        target = imported(module_name, function, name)
    except SpecError as error:
        return str(error)
    return None if callable(target) else f"{name!r} is not a function, but {target!r}"
