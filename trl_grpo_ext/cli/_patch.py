"""TRL's `GRPOTrainer` and `GRPOConfig` replaced by ours, and our own told of the strategies, under every name."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import trl
from trl.trainer import grpo_config, grpo_trainer

import trl_grpo_ext
from trl_grpo_ext import _trl, trainer
from trl_grpo_ext.config import GRPOExtConfig
from trl_grpo_ext.specs import SETTINGS
from trl_grpo_ext.trainer import GRPOExtTrainer

_trainers = importlib.import_module("trl.trainer")
_PLACES = {
    "GRPOTrainer": (trl, _trainers, grpo_trainer),
    "GRPOExtTrainer": (trl_grpo_ext, trainer),
    "GRPOConfig": (trl, _trainers, grpo_config, grpo_trainer),
}

Use = dict[str, set[str]]
"""What became of the strategies: those "put in", and those that the script "sets" itself."""


@contextmanager
def patched(strategies: Mapping[str, Any] | None = None) -> Iterator[Use]:
    """While the block runs, whoever asks TRL for its GRPO trainer or config gets ours; or us, for our trainer.

    `strategies` maps config fields (and `beta`) to specs; each is used where the script does not set it. The dict that
    is yielded fills when a trainer is built. With no strategies our classes are stock TRL, bit for bit.
    """
    use: Use = {}
    told = _trainer_class(dict(strategies or {}), use)
    ours = {"GRPOTrainer": told, "GRPOExtTrainer": told, "GRPOConfig": GRPOExtConfig}
    before = [(place, name, vars(place).get(name)) for name, places in _PLACES.items() for place in places]
    for place, name, _ in before:
        setattr(place, name, ours[name])
    try:
        yield use
    finally:
        for place, name, value in before:
            if value is None:  # not loaded yet when the block began; the package loads it again
                delattr(place, name)
            else:
                setattr(place, name, value)


def _trainer_class(strategies: dict[str, Any], use: Use) -> type:
    """Return a subclass of our trainer that is told of the strategies."""

    class GRPOTrainer(GRPOExtTrainer):
        def __init__(
            self, model: Any, reward_funcs: Any = None, args: Any = None, *trl_args: Any, **keywords: Any
        ) -> None:
            reward_funcs, args = _filled(strategies, use, model, reward_funcs, args, keywords)
            super().__init__(model, reward_funcs, args, *trl_args, **keywords)

    GRPOTrainer.__init__.__signature__ = inspect.signature(GRPOExtTrainer.__init__)  # type: ignore[attr-defined]
    GRPOTrainer.__doc__ = GRPOExtTrainer.__doc__
    GRPOTrainer.__module__, GRPOTrainer.__qualname__ = grpo_trainer.__name__, "GRPOTrainer"
    return GRPOTrainer


def _filled(
    strategies: dict[str, Any], use: Use, model: Any, reward_funcs: Any, args: Any, keywords: dict[str, Any]
) -> tuple[Any, Any]:
    """Return reward functions and config with the strategies in them that the script did not set; `args` is kept."""
    if args is None and strategies:
        args = GRPOExtConfig(_trl.default_args(model))
    given = {name for name, value in keywords.items() if value is not None}
    if reward_funcs:
        given.add("rewards")
    put_in, left = use.setdefault("put in", set()), use.setdefault("sets", set())
    if strategies:
        args = copy.copy(args)
    for name, value in strategies.items():
        if name in given or getattr(args, name, None) not in (None, _unset(name)):
            left.add(name)
        else:
            setattr(args, name, copy.deepcopy(value))
            put_in.add(name)
    if not reward_funcs and getattr(args, "rewards", None) is not None:
        reward_funcs = None  # TRL's own script passes an empty list where its options name no function
    return reward_funcs, args


def _unset(name: str) -> Any:
    return _trl.stock_default("beta") if name == "beta" else SETTINGS.get(name, (None,))[0]
