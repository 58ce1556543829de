"""Transforms of finished advantages, applied in order by `Chain`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from torch import Tensor

from trl_grpo_ext._strategy import Strategy
from trl_grpo_ext._validate import check_number
from trl_grpo_ext.functional import advantages as functional


class Transform(Strategy, ABC):
    """Changes advantages: ``transform(advantages, scored) -> advantages``.

    `advantages` is `(N,)` float64, 0 in rows without a score, and `scored` `(N,)` bool. Unknown keywords are ignored.
    `Chain` sets rows without a score, and groups that gave no signal before, back to 0 after each transform.
    """

    family: ClassVar[str] = "transform"

    @abstractmethod
    def __call__(self, advantages: Tensor, scored: Tensor, **context: Any) -> Tensor:
        """Return the `(N,)` float64 transformed advantages."""


@dataclass(frozen=True)
class Clip(Transform):
    """Keeps advantages within ``[-limit, limit]``.

    Use it after `ZScore` or `RobustZScore`, so that one group of small spread or one outlier cannot take a whole
    step. A group's advantages need not sum to zero afterwards. The clipping of the loss (`epsilon`) bounds the
    policy's ratio, not the advantage, and is no substitute.

    >>> import torch
    >>> Clip(1.0)(torch.tensor([-2.0, 0.5, 3.0]), torch.ones(3, dtype=torch.bool))
    tensor([-1.0000,  0.5000,  1.0000])
    """

    kind: ClassVar[str] = "clip"

    limit: float

    def validate(self) -> None:
        check_number("limit", self.limit, above=0)

    def __call__(self, advantages: Tensor, scored: Tensor, **context: Any) -> Tensor:
        return advantages.clamp(-self.limit, self.limit)


@dataclass(frozen=True)
class Scale(Transform):
    """Multiplies by `factor`, which must not be negative: that would train towards the worse completions.

    Use it to bring a strategy to the size the learning rate was tuned for: ``Scale(3.0)`` after `Rank` gives about a
    z-score's. It changes the policy term against ``beta * KL`` as well.

    >>> import torch
    >>> Scale(2.0)(torch.tensor([-0.5, 0.5]), torch.ones(2, dtype=torch.bool))
    tensor([-1.,  1.])
    """

    kind: ClassVar[str] = "scale"

    factor: float

    def validate(self) -> None:
        check_number("factor", self.factor, at_least=0)

    def __call__(self, advantages: Tensor, scored: Tensor, **context: Any) -> Tensor:
        return advantages * self.factor


@dataclass(frozen=True)
class BatchWhiten(Transform):
    """Standardises over the whole batch: ``(x - mean) / (std + eps)`` over scored rows (ddof 1).

    Fewer than two scored rows, or all equal, give 0. Use it after `MeanCentered` or `LeaveOneOut` for a step size that
    does not follow the reward scale, without dividing each group by its own spread. Do not use it with few groups in a
    batch, whose std is noisy. ``Chain(LeaveOneOut(), transforms=[BatchWhiten()])`` is TRL's RLOO with
    `normalize_advantages`.

    >>> import torch
    >>> BatchWhiten(eps=0.0)(torch.tensor([-1.0, 0.0, 1.0]).double(), torch.ones(3, dtype=torch.bool))
    tensor([-1.,  0.,  1.], dtype=torch.float64)

    Reference: REINFORCE++, https://arxiv.org/abs/2501.03262
    """

    kind: ClassVar[str] = "batch_whiten"

    _: KW_ONLY
    eps: float = 1e-4

    def validate(self) -> None:
        check_number("eps", self.eps, at_least=0)

    def __call__(self, advantages: Tensor, scored: Tensor, **context: Any) -> Tensor:
        return functional.whiten(advantages, scored, eps=self.eps)
