"""Scores from comparisons: completions of a group are judged against each other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from trl_grpo_ext._strategy import import_object
from trl_grpo_ext._validate import check_number
from trl_grpo_ext.batch import RewardBatch
from trl_grpo_ext.errors import ConfigError, RewardError
from trl_grpo_ext.functional.pairs import draw_pairs, win_rates
from trl_grpo_ext.rewards.base import as_numbers, callable_name, is_async
from trl_grpo_ext.rewards.limits import run_async
from trl_grpo_ext.rewards.shaping import ShapingStrategy


@dataclass(frozen=True)
class PairwiseWinRate(ShapingStrategy):
    """Replaces each completion's score by its mean chance to beat the others of its group, as a judge sees it.

    ``judge(prompts, firsts, seconds) -> list[float]`` gets lists of equal length (strings, or message lists for
    conversational data) and says how likely the first is better, in [0, 1]; None for a pair it can't judge. It may be
    async, and may be given as ``"module:function"``. It is called once per batch, with every pair in both orders, so
    that a preference for the first place cancels out: a pair counts ``(judge(a, b) + 1 - judge(b, a)) / 2``.

    `pairs` None compares all: ``G * (G - 1)`` judgements per group. A number bounds that to about ``G * pairs``: each
    completion meets `pairs` others, drawn with `seed`. 3 to 5 are usually enough to find the best.

    The win rate is the only column afterwards, at weight 1; the reward functions' own scores are still logged. Only
    rows that some function scored take part, so a run with nothing but a judge needs a reward function that returns
    0. On several processes the judge runs on the main one, over the global batch, and the others get its result.

    Use it where "which is better" is easier to say than "how good is it". Win rates are relative: their group mean is
    about 1/2 however good the policy is, so watch a score from elsewhere for progress.

    >>> def longer(prompts, firsts, seconds):
    ...     return [float(len(a) > len(b)) for a, b in zip(firsts, seconds)]
    >>> batch = RewardBatch(
    ...     rewards=torch.zeros(3, 1), weights=torch.ones(1), lengths=torch.tensor([1, 2, 3]),
    ...     truncated=torch.zeros(3, dtype=torch.bool), num_generations=3, names=("none",),
    ...     prompts=["p"] * 3, completions=["a", "bb", "ccc"])
    >>> PairwiseWinRate(longer)(batch).scores
    tensor([0.0000, 0.5000, 1.0000])
    """

    kind: ClassVar[str] = "pairwise_win_rate"
    needs_text: ClassVar[bool] = True
    replaces: ClassVar[bool] = True
    runs_once: ClassVar[bool] = True

    judge: Callable[..., Sequence[float | None]]
    _: KW_ONLY
    pairs: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.judge, str):
            object.__setattr__(self, "judge", import_object(self.judge))
        super().__post_init__()

    def validate(self) -> None:
        if not callable(self.judge):
            raise ConfigError(f"`judge` must be a function or 'module:function', got {self.judge!r}")
        check_number("pairs", self.pairs, at_least=1, integer=True, optional=True)
        check_number("seed", self.seed, at_least=0, at_most=2**63 - 1, integer=True)  # torch's generators take no more

    def __call__(self, batch: RewardBatch, **context: Any) -> RewardBatch:
        if batch.prompts is None or batch.completions is None:
            raise RewardError(f"{self.kind} compares texts: the batch must hold `prompts` and `completions`")
        generator = torch.Generator().manual_seed(self.seed)
        first, second = draw_pairs(batch.scores, batch.groups, self.pairs, generator)
        chance = self._chances(batch.prompts, batch.completions, first, second)
        rates = win_rates(first, second, chance, rows=len(batch.rewards))
        dtype = torch.promote_types(batch.rewards.dtype, torch.float32)
        return dataclasses.replace(
            batch,
            rewards=rates[:, None].to(batch.rewards.device, dtype),
            weights=batch.weights.new_ones(1),
            names=(self.kind,),
        )

    def _chances(self, prompts: list, completions: list, first: Tensor, second: Tensor) -> Tensor:
        """Return the `(P,)` chance of the first to win, from both orders; NaN for a pair not judged."""
        if not len(first):
            return torch.zeros(0, dtype=torch.float64)
        a, b = first.tolist() + second.tolist(), second.tolist() + first.tolist()
        texts = [prompts[i] for i in a], [completions[i] for i in a], [completions[i] for i in b]
        answers = run_async(self.judge, *texts) if is_async(self.judge) else self.judge(*texts)
        forward, backward = torch.tensor(self._checked(answers, len(a)), dtype=torch.float64).chunk(2)
        return (forward + 1 - backward) / 2

    def _checked(self, answers: Any, expected: int) -> list[float]:
        name = callable_name(self.judge)
        numbers = [math.nan if number is None else number for number in as_numbers(answers, f"judge {name!r}")]
        if len(numbers) != expected:
            raise RewardError(f"judge {name!r} returned {len(numbers)} answers for {expected} pairs")
        outside = [number for number in numbers if not math.isnan(number) and not 0 <= number <= 1]
        if outside:
            raise RewardError(f"judge {name!r} must return chances in [0, 1], got {outside[0]!r}")
        return numbers
