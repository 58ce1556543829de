"""Swappable strategies for TRL's ``GRPOTrainer``: advantages, KL estimators, rewards and references.

Change one import and pass objects, or write the same in YAML; with nothing configured the trainer is stock TRL. Names
are loaded when they are first used, so importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "advantages": (
        "Adaptive",
        "AdvantageOutput",
        "AdvantageStrategy",
        "BatchWhiten",
        "Chain",
        "Clip",
        "LeaveOneOut",
        "LengthBucketed",
        "MeanCentered",
        "Mix",
        "OptimalBaseline",
        "PerReward",
        "Rank",
        "RobustZScore",
        "Scale",
        "Transform",
        "ZScore",
    ),
    "batch": ("RewardBatch",),
    "config": ("GRPOExtConfig",),
    "errors": (
        "ArgumentError",
        "CompatibilityError",
        "ConfigError",
        "GRPOExtError",
        "GRPOExtWarning",
        "RewardError",
        "ShapeError",
        "SpecError",
        "StateError",
    ),
    "hub": ("load_strategies", "push_strategies"),
    "kl": (
        "AbsK",
        "AdaptiveBeta",
        "BetaControl",
        "ConstantBeta",
        "ExactKL",
        "K1",
        "K2",
        "K3",
        "K3Plus",
        "KLEstimator",
        "LinearBeta",
        "SampledKL",
    ),
    "reference": ("AdapterOff", "FrozenAdapter", "FullCopy", "MovingAnchor", "ReferenceStrategy"),
    "rewards": (
        "AdapterRewardModel",
        "ClipReward",
        "CosineLength",
        "GroupLengthReward",
        "LengthPenalty",
        "PairwiseWinRate",
        "PassRateLengthPenalty",
        "RepetitionPenalty",
        "RetryReward",
        "RewardModel",
        "RewardWrapper",
        "ScaleReward",
        "ShapingStrategy",
        "SoftOverlong",
    ),
    "specs": ("from_spec", "to_spec"),
    "trainer": ("GRPOExtTrainer",),
}
"""Module -> the names it gives to this package."""

_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = sorted([*_MODULE_OF, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
