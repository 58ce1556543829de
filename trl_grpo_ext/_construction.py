"""What the trainer is given, before TRL sees it: strategies resolved, rewards gathered, misfits refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from accelerate.logging import get_logger

from trl_grpo_ext import _trl
from trl_grpo_ext.config import GRPOExtConfig, check_reward_names
from trl_grpo_ext.errors import ConfigError, SpecError
from trl_grpo_ext.kl import K3
from trl_grpo_ext.rewards import TRL_FUNCTIONS, RewardWrapper, inner_functions, is_async
from trl_grpo_ext.specs import LIST_FIELDS, SPEC_FIELDS, build_field, from_spec, is_of_the_script, to_spec

logger = get_logger(__name__)


def resolve(args: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    """Return every strategy, from a keyword or from the config field of the same name."""
    resolved = {}
    for name in SPEC_FIELDS:
        keyword, field = keywords.get(name), getattr(args, name, None)
        if keyword is not None and field is not None:
            raise ConfigError(
                f"`{name}` is set both as a keyword of the trainer ({keyword!r}) and in the config ({field!r}); "
                "set it in one place"
            )
        resolved[name] = build_field(name, field if keyword is None else keyword)
    watched = resolved["kl_log"] or resolved["beta_control"]
    if watched and resolved["kl"] is None and getattr(args, "kl_placement", "loss") == "loss":
        resolved["kl"] = K3()  # TRL's own, in the form that can be watched and controlled
    return resolved


def reward_functions(reward_funcs: Any, rewards: list[Any] | None) -> Any:
    """Return the reward functions for TRL in a list of its own; mappings are specs, a string is TRL's model id."""
    if rewards is not None:
        if reward_funcs is not None:
            raise ConfigError(
                f"reward functions are set both as `reward_funcs` ({reward_funcs!r}) and in the config's `rewards` "
                f"({rewards!r}); set them in one place"
            )
        reward_funcs = rewards
    if reward_funcs is None:
        return None
    functions = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    functions = [from_spec(f, family="reward") if isinstance(f, dict) or _is_function(f) else f for f in functions]
    return [_trl.awaited_reward(f) if isinstance(f, RewardWrapper) and is_async(f) else f for f in functions]


def _is_function(name: Any) -> bool:
    """Whether a string names a function, and not, as it does for TRL, a reward model on the Hub."""
    return isinstance(name, str) and (name in TRL_FUNCTIONS or ":" in name)


def check_before_loading(
    strategies: dict[str, Any], reward_funcs: Any, model: Any, trl_args: Sequence[Any], trl_kwargs: dict[str, Any]
) -> None:
    """Raise `ConfigError` for what the trainer's arguments say, before a model is loaded, can't be trained with."""
    has_adapter = hasattr(model, "peft_config") or _trl.argument("peft_config", trl_args, trl_kwargs) is not None
    if strategies["reference"] is not None:
        strategies["reference"].check_adapter(has_adapter)
    for part in (part for function in reward_funcs or [] for part in inner_functions(function)):
        if hasattr(part, "check_adapter"):
            part.check_adapter(has_adapter)
        if hasattr(part, "check_source"):
            part.check_source()
    if _trl.argument("environment_factory", trl_args, trl_kwargs) is None:  # which may bring rewards of its own
        check_reward_names(strategies["advantage"], numbered([_trl.reward_name(f) for f in reward_funcs or []]))


def saved_specs(args: Any, strategies: dict[str, Any], reward_funcs: list[Any] | None) -> dict[str, Any]:
    """Return what a later run needs to use the same strategies: config field -> spec."""
    specs = args.strategy_specs() if isinstance(args, GRPOExtConfig) else {}
    if "rewards" not in specs and reward_funcs:
        specs.update(_portable_rewards(reward_funcs))
    for name, strategy in strategies.items():
        if strategy is not None:
            specs[name] = [_saved_spec(s) for s in strategy] if name in LIST_FIELDS else _saved_spec(strategy)
    return specs


def _portable_rewards(reward_funcs: list[Any]) -> dict[str, Any]:
    """Return the reward functions as specs, if all can be used where this script is not; else nothing."""
    try:
        specs = [to_spec(function) for function in reward_funcs]
        for spec in specs:
            from_spec(spec, family="reward", remote=True)
    except ConfigError as error:
        logger.info("The reward functions are not saved with the strategies: %s", error)
        return {}
    return {"rewards": specs}


def _saved_spec(strategy: Any) -> Any:
    """Return the strategy's spec, or its text if it holds something that can't be written down, such as a lambda."""
    try:
        spec = to_spec(strategy)
        if is_of_the_script(spec):
            logger.warning("%r is saved as part of this script, which no other can read; move it to a module", strategy)
        return spec
    except SpecError as error:
        logger.warning("%r is saved as text that can't be read back: %s", strategy, error)
        return repr(strategy)


def numbered(names: list[str]) -> list[str]:
    """Number the second and later of equal names: TRL would merge their metrics."""
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return unique
