"""A strategy that changes over the course of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from trl_grpo_ext._strategy import nested
from trl_grpo_ext._validate import check_number
from trl_grpo_ext.advantages.base import AdvantageOutput, AdvantageStrategy, Composite
from trl_grpo_ext.advantages.combine import check_strategy
from trl_grpo_ext.advantages.group import Rank, ZScore
from trl_grpo_ext.batch import RewardBatch
from trl_grpo_ext.errors import StateError
from trl_grpo_ext.functional.advantages import mean_spread


@dataclass
class _Progress:
    """What an `Adaptive` has seen so far."""

    streak: int = 0
    """Consecutive training batches, up to the last, whose mean group std was large enough."""
    switched: bool = False


@dataclass(frozen=True, kw_only=True)
class Adaptive(Composite):
    """`before` until rewards spread out, then `after` for good.

    The switch follows `patience` consecutive training batches whose mean group std (ddof 1) is at least `min_std`;
    the batch that completes the streak is still given to `before`. Groups with fewer than two scored rows do not
    count in the mean, and evaluation never counts. Calls of `normalize` use whichever strategy is active. Inside
    `LengthBucketed` the groups are its cells, whose std is what `after` would divide by.

    Use it to start safely with `Rank`, while most groups are all wrong or nearly tied, and go over to `ZScore`, which
    keeps the size of differences, once there is something to measure. Set `min_std` on your reward's scale: for binary
    rewards and G = 8 the mean std is about 0.5 when half of the answers are right, and 0.1 when one in twenty-five is.
    The size of advantages jumps at the switch, since a z-score is about three times a rank;
    ``Chain(Rank(), transforms=[Scale(3.0)])`` as `before` evens that out, under any loss type.

    The state (streak and switch) is saved in checkpoints; it takes no part in equality or in the spec.

    >>> Adaptive(patience=5)
    Adaptive(before=Rank(), after=ZScore(eps=0.0001, ddof=1, scale='group'), min_std=0.1, patience=5)
    >>> Adaptive().state_dict()
    {'streak': 0, 'switched': False}
    """

    kind: ClassVar[str] = "adaptive"

    before: AdvantageStrategy = nested("advantage", default_factory=Rank)
    after: AdvantageStrategy = nested("advantage", default_factory=ZScore)
    min_std: float = 0.1
    patience: int = 10
    _progress: _Progress = field(default_factory=_Progress, init=False, repr=False, compare=False)

    def validate(self) -> None:
        check_strategy("before", self.before)
        check_strategy("after", self.after)
        check_number("min_std", self.min_std, at_least=0)
        check_number("patience", self.patience, at_least=1, integer=True)

    @property
    def active(self) -> AdvantageStrategy:
        """The strategy that the next batch is given to."""
        return self.after if self._progress.switched else self.before

    def normalize(self, values: Tensor, segments: Tensor, **context: Any) -> Tensor:
        return self.active.normalize(values, segments, **context)

    def evaluate(self, batch: RewardBatch, **context: Any) -> AdvantageOutput:
        output = self.active(batch.evaluation, **context)
        spread = mean_spread(batch.rows)
        metrics = {
            "adaptive_after": float(self._progress.switched),
            "group_std": 0.0 if spread is None else spread.item(),
        }
        return AdvantageOutput(output.advantages, {**output.metrics, **metrics})

    def observe(self, batch: RewardBatch) -> None:
        if self.active.has_state:
            self.active.observe(batch)
        if not self._progress.switched:
            spread = mean_spread(batch.rows)
            enough = spread is not None and spread.item() >= self.min_std
            self._progress.streak = self._progress.streak + 1 if enough else 0
            self._progress.switched = self._progress.streak >= self.patience

    @property
    def has_state(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"streak": self._progress.streak, "switched": self._progress.switched, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        streak, switched = state["streak"], state["switched"]
        if type(streak) is not int or streak < 0 or type(switched) is not bool:
            raise StateError(f"the state of {self.kind!r} must hold a count and a flag, got {dict(state)!r}")
        self._progress.streak, self._progress.switched = streak, switched
