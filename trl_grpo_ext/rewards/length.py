"""Wrappers that make length cost something."""

from __future__ import annotations

import math
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


@dataclass(frozen=True)
class SoftOverlong(RewardWrapper):
    """``raw`` plus DAPO's ramp: 0 up to ``max_length - buffer`` tokens, then linear to -1 at `max_length`, -1 beyond.

    Says "stop before you are cut off", without rewarding brevity as such: set `max_length` to `max_completion_length`
    and `buffer` to a fifth of it. Prefer it to `LengthPenalty` when long answers are fine and only truncation hurts.
    The penalty is 1 at most, so scale the inner reward to a range of about 1 or more.

    >>> def correct(completions, **kwargs):
    ...     return [1.0, 1.0, 1.0]
    >>> reward = SoftOverlong(correct, max_length=100, buffer=20)
    >>> reward(prompts=["p"] * 3, completions=["a"] * 3, completion_ids=[[0] * 80, [0] * 90, [0] * 120])
    [1.0, 0.5, 0.0]

    Reference: DAPO, equation 13, https://arxiv.org/abs/2503.14476
    """

    kind: ClassVar[str] = "soft_overlong"

    max_length: int
    buffer: int

    def validate(self) -> None:
        check_number("max_length", self.max_length, at_least=1, integer=True)
        check_number("buffer", self.buffer, at_least=0, integer=True)

    def reshape(
        self, raw: list[float | None], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float | None]:
        return [
            None if score is None else score + self._ramp(len(ids))
            for score, ids in zip(raw, completion_ids, strict=True)
        ]

    def _ramp(self, length: int) -> float:
        excess = length - (self.max_length - self.buffer)
        if excess <= 0:
            return 0.0
        return -1.0 if length > self.max_length else -excess / self.buffer


@dataclass(frozen=True)
class CosineLength(RewardWrapper):
    """Replaces a right/wrong score by one that falls (right) or rises (wrong) with length along half a cosine.

    ``low + (high - low) / 2 * (1 + cos(pi * min(1, len / max_len)))``: a right answer (``raw >= threshold``) goes
    from `max_value_correct` when short to `min_value_correct` at `max_len` and beyond; a wrong one from
    `min_value_wrong` when short to `max_value_wrong`, so that giving up early costs most. Field names and values are
    those of TRL's `get_cosine_scaled_reward`, which takes correctness from math verification; here any reward
    function says it.

    Use it to keep reasoning concise when correct and to let it go on when not. Not for graded rewards: all that is
    kept of them is which side of `threshold` they are on.

    >>> def correct(completions, **kwargs):
    ...     return [1.0, 0.0]
    >>> reward = CosineLength(correct, max_len=100)
    >>> reward(prompts=["p"] * 2, completions=["a"] * 2, completion_ids=[[0] * 50, [0] * 50])
    [0.75, -0.75]

    Reference: Demystifying Long Chain-of-Thought Reasoning, appendix C.1, https://arxiv.org/abs/2502.03373
    """

    kind: ClassVar[str] = "cosine_length"

    max_len: int
    min_value_wrong: float = -1.0
    max_value_wrong: float = -0.5
    min_value_correct: float = 0.5
    max_value_correct: float = 1.0
    threshold: float = 0.5

    def validate(self) -> None:
        check_number("max_len", self.max_len, at_least=1, integer=True)
        for name in ("min_value_wrong", "max_value_wrong", "min_value_correct", "max_value_correct", "threshold"):
            check_number(name, getattr(self, name))

    def reshape(
        self, raw: list[float | None], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float | None]:
        return [
            None if score is None else self._value(score >= self.threshold, len(ids))
            for score, ids in zip(raw, completion_ids, strict=True)
        ]

    def _value(self, right: bool, length: int) -> float:
        short, long = (
            (self.max_value_correct, self.min_value_correct) if right else (self.min_value_wrong, self.max_value_wrong)
        )
        return long + 0.5 * (short - long) * (1.0 + math.cos(math.pi * min(1.0, length / self.max_len)))
