"""What each advantage strategy makes of one batch: the rewards before, the advantages after."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from trl_grpo_ext.advantages import AdvantageStrategy
from trl_grpo_ext.batch import RewardBatch
from trl_grpo_ext.specs import from_spec, kinds


class Distribution(NamedTuple):
    """Named values, one for each scored completion, and whether they are what the run was trained with."""

    name: str
    values: list[float]
    trained: bool = False

    def statistics(self) -> dict[str, float]:
        """Return mean, standard deviation, extremes and the share that is exactly zero."""
        values = torch.tensor(self.values, dtype=torch.float64)
        return {
            "mean": values.mean().item(),
            "std": values.std(correction=0).item(),
            "min": values.min().item(),
            "max": values.max().item(),
            "zero": (values == 0).double().mean().item(),
        }


def default_strategies() -> dict[str, AdvantageStrategy]:
    """Return every kind of advantage strategy that can be built without arguments: kind -> strategy."""
    classes = {cls.kind: cls for cls in kinds("advantage").values()}
    return {kind: cast(AdvantageStrategy, cls()) for kind, cls in sorted(classes.items()) if _has_defaults(cls)}


def before_and_after(batch: RewardBatch, trained: Any = None) -> tuple[Distribution, list[Distribution]]:
    """Return the scores of the batch, and the advantages that each strategy gives its scored completions.

    `trained` is the spec the run was trained with; it comes first. Nothing is shown for an empty batch: raises
    ``ValueError``.
    """
    scored = ~batch.scores.isnan()
    if not scored.any():
        raise ValueError("the batch holds no scored completion")
    strategies = {kind: (strategy, False) for kind, strategy in default_strategies().items()}
    if trained is not None:
        strategy = from_spec(trained, family="advantage")
        kind = getattr(type(strategy), "kind", type(strategy).__name__)
        same = strategies.pop(kind, None)
        others = {f"{kind} (defaults)": same} if same is not None and same[0] != strategy else {}
        strategies = {kind: (strategy, True), **others, **strategies}
    after = [
        Distribution(name, _listed(strategy.evaluate(batch.evaluation).advantages, scored), is_trained)
        for name, (strategy, is_trained) in strategies.items()
    ]
    return Distribution("reward", _listed(batch.scores, scored)), after


def _listed(values: Tensor, scored: Tensor) -> list[float]:
    return values[scored].double().tolist()


def _has_defaults(cls: type) -> bool:
    return all(
        not f.init or f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
        for f in dataclasses.fields(cls)
    )
