"""The KL summed over the vocabulary instead of estimated from the sampled token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from trl_grpo_ext.errors import ConfigError, ShapeError
from trl_grpo_ext.functional import exact_kl as functional
from trl_grpo_ext.kl.base import KLEstimator, check_shapes


@dataclass(frozen=True, kw_only=True)
class ExactKL(KLEstimator):
    """The KL itself: ``sum_v pi(v) (log pi(v) - log ref(v))`` at every token.

    Value and gradient are exact on- and off-policy, without sampling noise and without a ratio. It costs two
    projections through the head (the policy's and the reference's), both repeated in the backward pass, and needs the
    last hidden states of both models; a trainer calls `from_hidden`, which works in tiles and never holds the
    `(B, T, V)` log-probs. Use it when the KL's noise matters: few tokens per step, a tight KL target, comparisons of
    the other estimators. Like every term in the loss it ignores how earlier tokens steer later KL.

    >>> import torch
    >>> policy, reference = torch.tensor([[[0.9, 0.1]]]).log(), torch.tensor([[[0.5, 0.5]]]).log()
    >>> ExactKL()(policy, reference)
    tensor([[0.3681]])

    Reference: https://arxiv.org/abs/2506.09477
    """

    kind: ClassVar[str] = "exact"
    gradient: ClassVar[Mapping[str, str]] = {"none": "exact", "ratio": "unused", "detached": "unused"}
    needs_vocabulary: ClassVar[bool] = True

    def __call__(
        self,
        logps: Tensor,
        ref_logps: Tensor,
        *,
        weighting: str = "none",
        mask: Tensor | None = None,
        **context: Any,
    ) -> Tensor:
        """Return the `(B, T)` KL of `(B, T, V)` log-probs, differentiable by `logps`, in float32 at least.

        Where `mask` `(B, T)` is 0 the value and its gradient are 0, whatever stands there. Log-probs of -inf count as
        probability 0. Unknown keywords (`old_logps` among them) are ignored.

        Raises `ShapeError` if the shapes do not fit, `ConfigError` for a weighting other than "none".
        """
        if weighting != "none":
            raise ConfigError(
                f"`weighting` must be 'none' for {self!r}, which sums over the vocabulary: got {weighting!r}"
            )
        if logps.dim() != 3:
            raise ShapeError(f"{self!r} takes (B, T, V) log-probs of the whole vocabulary, got {tuple(logps.shape)}")
        check_shapes(logps, ref_logps=ref_logps)
        if mask is not None and mask.shape != logps.shape[:2]:
            raise ShapeError(f"`mask` must be {tuple(logps.shape[:2])}, got {tuple(mask.shape)}")
        return functional.vocabulary_kl(logps, ref_logps, mask)

    def from_hidden(
        self, hidden: Tensor, ref_hidden: Tensor, weight: Tensor, ref_weight: Tensor, **settings: Any
    ) -> Tensor:
        """Return the `(B, T)` KL from `(B, T, H)` hidden states and `(V, H)` head weights, in tiles.

        `settings` are those of `trl_grpo_ext.functional.exact_kl.exact_kl`: biases, temperature, logit scale, cap,
        mask and tile sizes.
        """
        return functional.exact_kl(hidden, ref_hidden, weight, ref_weight, **settings)
