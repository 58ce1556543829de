"""Wrappers that make length cost something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from trl_grpo_ext._validate import check_number
from trl_grpo_ext.rewards.base import RewardWrapper


@dataclass(frozen=True)
class LengthPenalty(RewardWrapper):
    """``raw - min(cap, alpha * max(0, len - target))``, with len in completion tokens.

    Against length hacking: a reward model that likes long answers makes completions grow without getting better.
    `cap` bounds the penalty. `gate` applies it only where ``raw >= gate``: without one, a group whose answers are
    all wrong still teaches the policy to fail *shorter*, and runs have collapsed that way. Start with an `alpha`
    that costs a tenth of the reward's range at twice the target.

    >>> def correct(completions, **kwargs):
    ...     return [1.0, 1.0, 0.0]
    >>> reward = LengthPenalty(correct, alpha=0.01, target=100, gate=0.5)
    >>> reward(prompts=["p"] * 3, completions=["a"] * 3, completion_ids=[[0] * 90, [0] * 150, [0] * 150])
    [1.0, 0.5, 0.0]

    Reference: Kimi k1.5, whose length reward gives failures no bonus, https://arxiv.org/abs/2501.12599
    """

    kind: ClassVar[str] = "length_penalty"

    alpha: float
    target: float
    cap: float | None = None
    gate: float | None = None

    def validate(self) -> None:
        check_number("alpha", self.alpha, at_least=0)
        check_number("target", self.target, at_least=0)
        check_number("cap", self.cap, at_least=0, optional=True)
        check_number("gate", self.gate, optional=True)

    def reshape(
        self, raw: list[float | None], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float | None]:
        return [self._penalise(score, len(ids)) for score, ids in zip(raw, completion_ids, strict=True)]

    def _penalise(self, score: float | None, length: int) -> float | None:
        if score is None or (self.gate is not None and not score >= self.gate):
            return score
        penalty = self.alpha * max(0, length - self.target)
        return score - (penalty if self.cap is None else min(self.cap, penalty))
