"""A wrapper against saying the same thing over and over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from trl_grpo_ext._validate import check_number
from trl_grpo_ext.rewards.base import RewardWrapper


@dataclass(frozen=True)
class RepetitionPenalty(RewardWrapper):
    """``raw + max_penalty * (1 - distinct n-grams / n-grams)``, over the completion's tokens.

    0 for a completion in which no n-gram of `ngram_size` tokens occurs twice (or that is shorter than one), nearly
    `max_penalty` for one that repeats a token for ever. Equals TRL's `get_repetition_penalty_reward`. Use it beside a
    length reward, which is easily hacked by repetition; small n-grams punish honest repetition (code, tables, sums).

    >>> def correct(completions, **kwargs):
    ...     return [1.0, 1.0]
    >>> reward = RepetitionPenalty(correct, ngram_size=2)
    >>> reward(prompts=["p"] * 2, completions=["a"] * 2, completion_ids=[[1, 2, 3, 4], [5, 5, 5, 5, 5]])
    [1.0, 0.25]

    Reference: Demystifying Long Chain-of-Thought Reasoning, appendix C.2, https://arxiv.org/abs/2502.03373
    """

    kind: ClassVar[str] = "repetition_penalty"

    ngram_size: int = 3
    max_penalty: float = -1.0

    def validate(self) -> None:
        check_number("ngram_size", self.ngram_size, at_least=1, integer=True)
        check_number("max_penalty", self.max_penalty, at_most=0)

    def reshape(
        self, raw: list[float | None], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float | None]:
        return [
            None if score is None else score + self._penalty(ids)
            for score, ids in zip(raw, completion_ids, strict=True)
        ]

    def _penalty(self, ids: Sequence[int]) -> float:
        ngrams = [tuple(ids[i : i + self.ngram_size]) for i in range(len(ids) - self.ngram_size + 1)]
        return (1 - len(set(ngrams)) / len(ngrams)) * self.max_penalty if ngrams else 0.0
