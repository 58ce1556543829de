"""`GRPOExtConfig`: TRL's `GRPOConfig` with the strategies as specs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from trl import GRPOConfig

from trl_grpo_ext import _trl
from trl_grpo_ext._strategy import Strategy, read_json
from trl_grpo_ext._validate import check_choice, check_number, plain
from trl_grpo_ext.advantages import AdvantageStrategy, PerReward
from trl_grpo_ext.errors import ConfigError, GRPOExtWarning, SpecError
from trl_grpo_ext.kl import resolve_weighting
from trl_grpo_ext.specs import NEEDS_BETA, SETTINGS, SPEC_FIELDS, STRATEGY_FIELDS, build_field, to_spec

REPLACED: dict[str, dict[str, Any]] = {
    "advantage": {"scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize"},
    "reference": {"sync_ref_model": False},
}
"""Our field -> the TRL options it replaces, with the values that mean "not set"."""


@dataclass
class GRPOExtConfig(GRPOConfig):
    r"""TRL's `GRPOConfig` plus one field per strategy. With none of them set it trains as TRL does.

    A strategy field holds a spec: a kind (``"rank"``), a mapping with a `kind` and fields, or the same as JSON text.
    It is checked here, so that a misspelt name or an impossible combination fails before anything is loaded. A
    strategy object is turned into its spec.

    `use_bias_correction_kl` is None here, meaning "whatever is right for the estimator"; without a `kl` it is TRL's
    default.

    Raises `ConfigError` (a ``ValueError``).

    Example::

        GRPOExtConfig(output_dir="out", advantage="rank", kl="k3", beta=0.01)
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*GRPOConfig._VALID_DICT_FIELDS, *SPEC_FIELDS]

    advantage: dict[str, Any] | str | list | None = field(
        default=None, metadata={"help": "Advantage strategy: a kind such as 'rank', or a mapping (JSON text)."}
    )
    kl: dict[str, Any] | str | list | None = field(
        default=None, metadata={"help": "KL estimator: a kind such as 'k3', or a mapping (JSON text). Needs beta > 0."}
    )
    kl_weighting: str = field(
        default="auto",
        metadata={"help": "How the KL term is weighted: 'auto' (exact gradient), 'none', 'ratio' or 'detached'."},
    )
    kl_placement: str = field(
        default="loss",
        metadata={"help": "'loss': a KL term per token; 'reward': each score loses beta times the sum of k1."},
    )
    kl_log: dict[str, Any] | str | list | None = field(
        default=None, metadata={"help": 'More KL estimators to log, such as \'["k1", "k2"]\'; no extra forward pass.'}
    )
    beta_control: dict[str, Any] | str | list | None = field(
        default=None, metadata={"help": "How beta changes during training: a kind or a mapping (JSON text)."}
    )
    reference: dict[str, Any] | str | list | None = field(
        default=None, metadata={"help": "What the KL is measured against: a kind such as 'adapter_off', or a mapping."}
    )
    shaping: dict[str, Any] | str | list | None = field(
        default=None, metadata={"help": "Group-aware reward shaping: a spec or a list of specs, applied in order."}
    )
    rewards: dict[str, Any] | str | list | None = field(
        default=None, metadata={"help": "Reward functions: a spec or a list of specs, names or 'module:function'."}
    )
    use_bias_correction_kl: bool | None = field(
        default=None,
        metadata={
            "help": "TRL's name for kl_weighting 'ratio' (True) or 'none' (False). Unset: what is right for `kl`, and "
            "without `kl` TRL's default."
        },
    )

    def __post_init__(self) -> None:
        for name in SPEC_FIELDS:
            setattr(self, name, _as_spec(name, getattr(self, name)))
        super().__post_init__()
        strategies = {name: build_field(name, getattr(self, name)) for name in SPEC_FIELDS}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GRPOExtWarning)  # the trainer says it once
            check_settings(self, strategies, complete=False)

    def strategy_specs(self) -> dict[str, Any]:
        """Return our fields that are set: name -> spec, or the word."""
        return {
            name: copy.deepcopy(getattr(self, name))
            for name in STRATEGY_FIELDS
            if getattr(self, name) not in (None, SETTINGS.get(name, (None,))[0])
        }


def check_settings(args: Any, strategies: dict[str, Any], *, complete: bool = True) -> str | None:
    """Raise `ConfigError` if the strategies do not go together with each other or with TRL's options in `args`.

    `strategies` maps each of `SPEC_FIELDS` to its object or None. Returns the resolved KL weighting, None without a KL.
    Not `complete`: keywords of the trainer may bring more of them.
    """
    for name, options in REPLACED.items():
        for option, unset in options.items():
            if strategies.get(name) is not None and getattr(args, option, unset) != unset:
                raise ConfigError(
                    f"`{name}={strategies[name]!r}` replaces TRL's `{option}`, which is set to "
                    f"{getattr(args, option)!r}; set one of them"
                )
    if any(strategy is not None for strategy in strategies.values()):
        _check_numbers(args)
    if strategies.get("kl") is not None:
        check_choice("loss_type", args.loss_type, _trl.LOSS_TYPES)
    for name in NEEDS_BETA:
        if strategies.get(name) is not None and args.beta == 0:
            raise ConfigError(
                f"`{name}={strategies[name]!r}` has no effect with `beta=0` (TRL's default); set beta, e.g. `beta=0.01`"
            )
    for shaping in (strategies.get("shaping") or [])[1:]:
        if shaping.replaces:
            raise ConfigError(
                f"`shaping`: {shaping!r} replaces all scores, so what stands before it is lost; put it first"
            )
    whole = [estimator for estimator in strategies.get("kl_log") or [] if estimator.needs_vocabulary]
    if whole:
        raise ConfigError(f"`kl_log` watches without an extra forward pass, which {whole[0]!r} needs; take it as `kl`")
    if strategies.get("beta_control") is not None:
        strategies["beta_control"].first(args.beta)  # raises if it can't start from there
    if check_placement(args, strategies) == "reward":
        return None
    weighting = getattr(args, "kl_weighting", "auto")
    check_choice("kl_weighting", weighting, SETTINGS["kl_weighting"])
    if strategies.get("kl") is None and not complete:
        return None
    return resolve_weighting(strategies.get("kl"), weighting, _bias_correction(args))


def check_placement(args: Any, strategies: dict[str, Any]) -> str:
    """Return `kl_placement`, or raise `ConfigError` if "reward" does not go with the rest."""
    placement = getattr(args, "kl_placement", "loss")
    check_choice("kl_placement", placement, SETTINGS["kl_placement"])
    if placement == "loss":
        return placement
    label = "`kl_placement='reward'`"
    if args.beta == 0:
        raise ConfigError(f"{label} has no effect with `beta=0` (TRL's default); set beta, e.g. `beta=0.01`")
    estimator = strategies.get("kl")
    if estimator is not None and estimator.name != "k1":
        raise ConfigError(
            f"{label} takes `beta * sum of k1` off the score, got `kl={estimator!r}`; use 'k1' or unset it"
        )
    if _per_reward(strategies.get("advantage")) or args.multi_objective_aggregation == "normalize_then_sum":
        chosen = strategies.get("advantage") or "multi_objective_aggregation='normalize_then_sum'"
        raise ConfigError(
            f"{label} takes the KL off the summed score, but {chosen} normalises each reward on its own and would blow "
            "the KL up to their size; use another advantage, or the KL in the loss"
        )
    if args.mask_truncated_completions:
        raise ConfigError(
            f"{label} needs the KL of every completion, but `mask_truncated_completions=True` hides those that were "
            "cut off, which would pay nothing and stay in their group's baseline; unset one of them"
        )
    if strategies.get("kl_log"):
        raise ConfigError(f"{label} has no KL term per token to compare with; unset `kl_log`")
    weighting = getattr(args, "kl_weighting", "auto")
    if weighting != "auto" or (isinstance(args, GRPOExtConfig) and args.use_bias_correction_kl is not None):
        raise ConfigError(
            f"{label} has no term in the loss to weight; unset `kl_weighting` and `use_bias_correction_kl`"
        )
    return placement


def check_reward_names(advantage: AdvantageStrategy | None, names: Sequence[str]) -> None:
    """Raise `ConfigError` if a `PerReward` has a strategy for a reward function that is not among `names`."""
    for strategy in _per_reward(advantage):
        strategy.check_names(names)


def _per_reward(advantage: AdvantageStrategy | None) -> list[PerReward]:
    """Return the outermost `PerReward` strategies, wherever they stand in the advantage."""
    if advantage is None or isinstance(advantage, PerReward):
        return [advantage] if advantage else []
    return [found for child in advantage.children().values() for found in _per_reward(child)]


def _check_numbers(args: Any) -> None:
    """Raise for numbers of TRL's that would make every weight NaN, or the KL drive the policy away."""
    check_number("beta", args.beta, at_least=0)
    for index, weight in enumerate(args.reward_weights or []):
        check_number(f"reward_weights[{index}]", weight)


def _bias_correction(args: Any) -> bool | None:
    """Return TRL's flag if the user set it. A plain `GRPOConfig` can't tell its default from a choice."""
    flag = args.use_bias_correction_kl
    if isinstance(args, GRPOExtConfig):
        return flag
    return None if flag == _trl.stock_default("use_bias_correction_kl") else flag


def _as_spec(name: str, value: Any) -> Any:
    """Return an independent, JSON-able copy of what a field was given: JSON text is read, objects become specs."""
    try:
        value = read_json(value)
        items = value if isinstance(value, (list, tuple)) else ()
        return [_writable(read_json(item)) for item in items] if items else _writable(value)
    except SpecError as error:
        raise SpecError(f"`{name}`: {error}") from error


def _writable(value: Any) -> Any:
    if isinstance(value, Strategy) or callable(value):
        return to_spec(value)
    if isinstance(value, (list, tuple)):
        return [_writable(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _writable(item) for key, item in value.items()}
    return plain(value)
