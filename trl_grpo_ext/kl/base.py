"""The contract of a KL estimator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from trl_grpo_ext._strategy import Strategy
from trl_grpo_ext._validate import check_choice
from trl_grpo_ext.errors import ShapeError
from trl_grpo_ext.functional import kl as functional

WEIGHTINGS = ("none", "ratio", "detached")
"""The loss term is left plain, or multiplied by the differentiable ``rho = pi / pi_old``, or by ``rho`` held fixed."""


@dataclass(frozen=True, kw_only=True)
class KLEstimator(Strategy, ABC):
    """Estimates ``KL(policy || reference)`` per token, differentiable by the policy's log-probs.

    The value's gradient is what the loss uses. `gradient` says, for each weighting, what the *expected* gradient of the
    loss term is, against the true gradient of the KL at that token:

    "exact"; "zero"; "forward" (that of ``KL(reference || policy)``); "wrong" (another weighting of this estimator is
    exact); "biased" (no weighting of it is); "unused" (there is nothing to weight). Left plain, it is judged on-policy;
    weighted, on- and off-policy. All loss-placed token terms ignore how earlier tokens steer later KL.
    """

    family: ClassVar[str] = "kl"
    gradient: ClassVar[Mapping[str, str]]
    needs_vocabulary: ClassVar[bool] = False
    """Whether it reads the whole next-token distributions, not only the log-probs of the sampled tokens."""

    @property
    def name(self) -> str:
        """The kind, as the log shows it."""
        return vars(type(self)).get("kind", type(self).__name__)

    @abstractmethod
    def __call__(self, logps: Tensor, ref_logps: Tensor, **context: Any) -> Tensor:
        """Return the `(B, T)` loss term (without beta), differentiable by `logps`, in float32 at least."""


@dataclass(frozen=True, kw_only=True)
class SampledKL(KLEstimator):
    """An estimator that sees the sampled tokens only: ``estimator(logps, ref_logps) -> (B, T)``, all `(B, T)`.

    Subclasses implement `estimate`, and `clipped` if they clamp the log-ratio.
    """

    @abstractmethod
    def estimate(self, d: Tensor, *, half: bool = False) -> functional.Estimate:
        """Return value and derivatives for `(B, T)` log-ratios ``d = log pi - log ref``.

        `half` says that the log-probs are float16, whose gradients overflow early.
        """

    def clipped(self, logps: Tensor, ref_logps: Tensor) -> Tensor:
        """Return `(B, T)` bool: tokens whose log-ratio was clamped."""
        return torch.zeros_like(logps, dtype=torch.bool)

    def __call__(
        self,
        logps: Tensor,
        ref_logps: Tensor,
        old_logps: Tensor | None = None,
        *,
        weighting: str = "none",
        mask: Tensor | None = None,
        **context: Any,
    ) -> Tensor:
        """Return the `(B, T)` loss term (without beta), differentiable by `logps`, in float32 at least.

        All inputs are `(B, T)`. `old_logps` are those of the policy that sampled the tokens; None means the present
        one. Where `mask` is 0 the term and its gradient are 0, whatever stands there. Unknown keywords are ignored.

        Raises `ShapeError` if the shapes differ, `ConfigError` for an unknown weighting.
        """
        check_choice("weighting", weighting, WEIGHTINGS)
        check_shapes(logps, ref_logps=ref_logps, old_logps=old_logps, mask=mask)
        d = functional.log_ratio(logps, ref_logps)
        log_rho = None if old_logps is None else functional.log_ratio(logps, old_logps)
        if mask is not None:
            d = torch.where(mask.bool(), d, 0.0)
        value, slope = functional.weighted(self.estimate(d, half=logps.dtype == torch.float16), log_rho, weighting)
        if mask is not None:
            value, slope = (torch.where(mask.bool(), x, 0.0) for x in (value, slope))
        return functional.ValueWithSlope.apply(logps, value, slope)


def check_shapes(logps: Tensor, **others: Tensor | None) -> None:
    """Raise `ShapeError` unless each of `others` is None or has the shape of `logps`."""
    for label, other in others.items():
        if other is not None and other.shape != logps.shape:
            raise ShapeError(f"`{label}` must have the shape of logps, {tuple(logps.shape)}, got {tuple(other.shape)}")
