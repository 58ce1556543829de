"""Shaping that needs the whole group: it runs on the gathered batch, before the advantage strategy.

TRL calls reward functions before it gathers, and a group may span processes, so none of this can be a reward function.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from trl_grpo_ext._strategy import Strategy
from trl_grpo_ext._validate import check_number
from trl_grpo_ext.batch import RewardBatch
from trl_grpo_ext.functional import shaping as functional


@dataclass(frozen=True, kw_only=True)
class ShapingStrategy(Strategy, ABC):
    """Reshapes the scores of a global batch: ``shaping(batch) -> RewardBatch``. The batch given is not changed.

    What is added to the score is a column of its own, so that the log shows it, and an advantage strategy that looks at
    each reward function sees one more. Several shapings run in the order given; each sees the columns of those before.
    A strategy never gathers, logs or knows about processes.
    """

    family: ClassVar[str] = "shaping"
    needs_text: ClassVar[bool] = False
    """Whether it reads `RewardBatch.prompts` and `RewardBatch.completions`."""
    replaces: ClassVar[bool] = False
    """Whether the scores before it are gone afterwards."""
    runs_once: ClassVar[bool] = False
    """Whether the trainer runs it on the main process only, and gives the others its result: for shaping that costs
    money or time, or does not come out the same everywhere."""

    @abstractmethod
    def __call__(self, batch: RewardBatch, **context: Any) -> RewardBatch:
        """Return the batch with other reward columns; unknown keywords are ignored."""


def with_column(batch: RewardBatch, name: str, values: Tensor, weight: float) -> RewardBatch:
    """Return the batch with one more `(N,)` reward column, NaN where it says nothing; a name taken gets a number."""
    dtype = torch.promote_types(batch.rewards.dtype, torch.float32)
    return dataclasses.replace(
        batch,
        rewards=torch.cat([batch.rewards.to(dtype), values.to(batch.rewards.device, dtype)[:, None]], dim=1),
        weights=torch.cat([batch.weights, batch.weights.new_tensor([weight])]),
        names=(*batch.names, unique_name(name, batch.names)),
    )


def unique_name(name: str, taken: tuple[str, ...]) -> str:
    """Return `name`, numbered from 2 on if it is taken."""
    number, unique = 1, name
    while unique in taken:
        number += 1
        unique = f"{name}#{number}"
    return unique


@dataclass(frozen=True, kw_only=True)
class GroupLengthReward(ShapingStrategy):
    """Adds ``weight * lambda``, ``lambda = 1/2 - (len - min) / (max - min)`` over the group's scored rows.

    The shortest completion of a group gets ``weight / 2`` more, the longest as much less; if all are equally long,
    none. A row with a score of at most `threshold` gets ``min(0, lambda)``: a failure is not rewarded for being
    short, but still pays for being long. Unscored rows stay unscored.

    Use it to shorten answers whose right length is unknown and differs from prompt to prompt; no target is needed. It
    never rests: among correct answers the shortest always wins, so keep `weight` below what a better answer earns, and
    switch it on late (Kimi k1.5 warms it up). With a known budget, `LengthPenalty` or `SoftOverlong` are safer.

    >>> batch = RewardBatch(
    ...     rewards=torch.tensor([[1.0], [1.0], [0.0]]), weights=torch.ones(1), lengths=torch.tensor([10, 30, 10]),
    ...     truncated=torch.zeros(3, dtype=torch.bool), num_generations=3, names=("correct",))
    >>> GroupLengthReward(weight=0.5)(batch).scores
    tensor([1.2500, 0.7500, 0.0000])

    Reference: Kimi k1.5, section 2.3.3, https://arxiv.org/abs/2501.12599
    """

    kind: ClassVar[str] = "group_length"

    weight: float = 1.0
    threshold: float = 0.0

    def validate(self) -> None:
        check_number("weight", self.weight, at_least=0)
        check_number("threshold", self.threshold)

    def __call__(self, batch: RewardBatch, **context: Any) -> RewardBatch:
        term = functional.relative_length(batch.scores, batch.groups, batch.lengths, threshold=self.threshold)
        return with_column(batch, self.kind, term, self.weight)


@dataclass(frozen=True, kw_only=True)
class PassRateLengthPenalty(ShapingStrategy):
    """Subtracts ``weight * max(0, mean score of the group) * len / max_length``.

    The more often a prompt is solved, the more its length costs: easy prompts are shortened, while for hard ones,
    where thinking longer is how they get solved at all, length stays free. Scores should be such that 0 is "never
    solved" and 1 "always"; set `max_length` to `max_completion_length`. Unscored rows stay unscored.

    Use it for prompts of mixed difficulty. The penalty has no floor: an always-solved prompt is shortened until it
    breaks, then recovers; a small `weight` (0.1 to 0.3 of a correct answer) keeps that gentle.

    >>> batch = RewardBatch(
    ...     rewards=torch.tensor([[1.0], [0.0]]), weights=torch.ones(1), lengths=torch.tensor([50, 100]),
    ...     truncated=torch.zeros(2, dtype=torch.bool), num_generations=2, names=("correct",))
    >>> PassRateLengthPenalty(weight=0.4, max_length=100)(batch).scores
    tensor([ 0.9000, -0.2000])

    Reference: length penalties scaled by pass rate as in ALP, https://arxiv.org/abs/2506.05256
    """

    kind: ClassVar[str] = "pass_rate_length"

    weight: float
    max_length: int

    def validate(self) -> None:
        check_number("weight", self.weight, at_least=0)
        check_number("max_length", self.max_length, at_least=1)

    def __call__(self, batch: RewardBatch, **context: Any) -> RewardBatch:
        term = functional.solved_share_length(batch.scores, batch.groups, batch.lengths, max_length=self.max_length)
        return with_column(batch, self.kind, -term, self.weight)
