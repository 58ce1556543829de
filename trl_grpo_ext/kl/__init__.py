"""KL estimators, each of which knows under which weighting its gradient is right, and beta control."""

from trl_grpo_ext.kl.base import WEIGHTINGS, KLEstimator, SampledKL
from trl_grpo_ext.kl.beta import AdaptiveBeta, BetaControl, ConstantBeta, LinearBeta
from trl_grpo_ext.kl.estimators import K1, K2, K3, AbsK, K3Plus
from trl_grpo_ext.kl.exact import ExactKL
from trl_grpo_ext.kl.weighting import exact_weighting, resolve_weighting

__all__ = [
    "K1",
    "K2",
    "K3",
    "WEIGHTINGS",
    "AbsK",
    "AdaptiveBeta",
    "BetaControl",
    "ConstantBeta",
    "ExactKL",
    "K3Plus",
    "KLEstimator",
    "LinearBeta",
    "SampledKL",
    "exact_weighting",
    "resolve_weighting",
]
