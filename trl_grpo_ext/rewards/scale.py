"""Wrappers that change the range of a score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from trl_grpo_ext._validate import check_number
from trl_grpo_ext.errors import ConfigError
from trl_grpo_ext.rewards.base import RewardWrapper


@dataclass(frozen=True)
class ClipReward(RewardWrapper):
    """``min(high, max(low, raw))``.

    Keeps one runaway score of a reward model from dominating its group; scores beyond a limit are then tied. None for
    one of the limits leaves that side open.

    >>> def score(completions, **kwargs):
    ...     return [-7.0, 0.5, None]
    >>> ClipReward(score, low=-1.0, high=1.0)(prompts=["p"] * 3, completions=["a"] * 3)
    [-1.0, 0.5, None]
    """

    kind: ClassVar[str] = "clip_reward"
    needs_completion_ids: ClassVar[bool] = False

    low: float | None
    high: float | None

    def validate(self) -> None:
        check_number("low", self.low, optional=True)
        check_number("high", self.high, optional=True)
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ConfigError(f"`low` must be <= `high` ({self.high!r}), got {self.low!r}")

    def reshape(
        self, raw: list[float | None], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float | None]:
        return [None if score is None else self._clip(score) for score in raw]

    def _clip(self, score: float) -> float:
        if self.low is not None and score < self.low:
            return float(self.low)
        return float(self.high) if self.high is not None and score > self.high else score


@dataclass(frozen=True)
class ScaleReward(RewardWrapper):
    """``scale * raw + shift``.

    Brings a reward into the range that the wrappers and functions beside it expect. Within a group a shift changes no
    advantage, and a scale changes none that is divided by the spread; a weight in `reward_weights` does the same for
    a sum.

    >>> def score(completions, **kwargs):
    ...     return [0.0, 10.0, None]
    >>> ScaleReward(score, scale=0.1, shift=-0.5)(prompts=["p"] * 3, completions=["a"] * 3)
    [-0.5, 0.5, None]
    """

    kind: ClassVar[str] = "scale_reward"
    needs_completion_ids: ClassVar[bool] = False

    scale: float = 1.0
    shift: float = 0.0

    def validate(self) -> None:
        check_number("scale", self.scale)
        check_number("shift", self.shift)

    def reshape(
        self, raw: list[float | None], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float | None]:
        return [None if score is None else self.scale * score + self.shift for score in raw]
