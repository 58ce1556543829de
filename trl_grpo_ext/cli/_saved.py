"""Strategies that an earlier run saved, put where a config sets none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl_grpo_ext import hub
from trl_grpo_ext.errors import ConfigError
from trl_grpo_ext.specs import NEEDS_BETA


def with_saved_strategies(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with the strategies that its `strategies_from` names; what is set here goes first."""
    source = values.get("strategies_from")
    if source is None and values.get("strategies_revision") is not None:
        raise ConfigError("`strategies_revision` has no effect without `strategies_from`; set both, or neither")
    if not isinstance(source, str):
        return dict(values)
    rewards = ("rewards", "reward_funcs", "reward_model_name_or_path")
    saved = with_beta(
        hub.load_saved(
            source,
            revision=values.get("strategies_revision"),
            trust_remote_code=values.get("trust_remote_code") is True,
            without=("rewards",) if any(values.get(name) for name in rewards) else (),
        )
    )
    return {**saved, **{name: value for name, value in values.items() if value is not None or name not in saved}}


def with_beta(saved: hub.Saved) -> dict[str, Any]:
    """Return the strategies, and with a KL among them the beta that it was trained with."""
    return {**saved.specs, "beta": saved.beta} if saved.beta and saved.specs.keys() & NEEDS_BETA else saved.specs
