"""Strategies made of others: a weighted sum, a chain of transforms, and one strategy per reward function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from trl_grpo_ext._strategy import nested
from trl_grpo_ext._suggest import did_you_mean
from trl_grpo_ext._validate import check_bool, check_number
from trl_grpo_ext.advantages.base import AdvantageOutput, AdvantageStrategy, Composite, batch_metrics, prefixed
from trl_grpo_ext.advantages.group import ZScore
from trl_grpo_ext.advantages.transforms import Transform
from trl_grpo_ext.batch import RewardBatch
from trl_grpo_ext.errors import ConfigError
from trl_grpo_ext.functional import advantages as functional
from trl_grpo_ext.functional.segments import saturated, work_device


@dataclass(frozen=True, kw_only=True)
class Mix(Composite):
    """Weighted sum of strategies: ``sum_k w_k * A_k``.

    `parts` is a list of ``(weight, strategy)``; weights must be >= 0 and need not sum to 1. Use it to hedge: half
    rank, half z-score keeps some of the size of the differences and still bounds each group. Mixing two strategies of
    the same shape (`MeanCentered` and `LeaveOneOut`) only rescales. Metrics of part k are logged under ``part_k/``.

    >>> import torch
    >>> from trl_grpo_ext.advantages import MeanCentered, Rank
    >>> mix = Mix(parts=[(1.0, Rank()), (0.5, MeanCentered())])
    >>> mix.normalize(torch.tensor([1.0, 2.0, 4.0, 2.0]), torch.zeros(4, dtype=torch.int64))
    tensor([-1.1250, -0.1250,  1.3750, -0.1250])
    """

    kind: ClassVar[str] = "mix"

    parts: Sequence[tuple[float, AdvantageStrategy]] = nested("advantage")

    def validate(self) -> None:
        if not isinstance(self.parts, tuple) or not self.parts:
            raise ConfigError(f"`parts` must be a list of (weight, strategy), got {self.parts!r}")
        for index, part in enumerate(self.parts):
            if not (isinstance(part, tuple) and len(part) == 2 and isinstance(part[1], AdvantageStrategy)):
                raise ConfigError(f"`parts[{index}]` must be (weight, strategy), got {part!r}")
            check_number(f"parts[{index}][0]", part[0], at_least=0)
        if not any(weight for weight, _ in self.parts):
            raise ConfigError(f"one of the weights of `parts` must be > 0, or nothing is learnt; got {self.parts!r}")

    def normalize(self, values: Tensor, segments: Tensor, **context: Any) -> Tensor:
        return self._sum([part.normalize(values, segments, **context) for _, part in self.parts])

    def evaluate(self, batch: RewardBatch, **context: Any) -> AdvantageOutput:
        outputs = [part(batch.evaluation, **context) for _, part in self.parts]
        advantages = self._sum([output.advantages for output in outputs])
        metrics: dict[str, float] = {}
        for index, output in enumerate(outputs):
            metrics.update(prefixed(f"part_{index}", output.metrics))
        return AdvantageOutput(advantages, {**metrics, **batch_metrics(batch, advantages)})

    def _sum(self, advantages: list[Tensor]) -> Tensor:
        work, device = work_device(advantages[0]), advantages[0].device
        terms = [weight * x.to(work, torch.float64) for (weight, _), x in zip(self.parts, advantages, strict=True)]
        return saturated(sum(terms[1:], start=terms[0])).to(device)


@dataclass(frozen=True)
class Chain(Composite):
    """A strategy followed by `transforms`, applied in order: `Clip`, `Scale`, `BatchWhiten`.

    A row without a score stays exactly 0, and so does a group to which the strategy gave zeros only (no spread, fewer
    than two scores): whitening must not make a signal out of such a group.

    Use it to bound or rescale any strategy. The order matters: clip before scaling clips at another height than after.

    >>> import torch
    >>> from trl_grpo_ext.advantages import MeanCentered
    >>> chain = Chain(MeanCentered(), transforms=["batch_whiten", {"kind": "clip", "limit": 1.0}])
    >>> chain.normalize(torch.tensor([1.0, 2.0, 4.0, 2.0]), torch.zeros(4, dtype=torch.int64))
    tensor([-0.9933, -0.1987,  1.0000, -0.1987])
    """

    kind: ClassVar[str] = "chain"

    strategy: AdvantageStrategy = nested("advantage")
    _: KW_ONLY
    transforms: Sequence[Transform] = nested("transform", default=())

    def validate(self) -> None:
        check_strategy("strategy", self.strategy)
        if not isinstance(self.transforms, tuple):
            raise ConfigError(f"`transforms` must be a list of transforms, got {self.transforms!r}")
        for index, transform in enumerate(self.transforms):
            if not isinstance(transform, Transform):
                raise ConfigError(f"`transforms[{index}]` must be a transform, got {transform!r}")

    def normalize(self, values: Tensor, segments: Tensor, **context: Any) -> Tensor:
        advantages = self.strategy.normalize(values, segments, **context)
        return self._transform(advantages, values.isfinite(), segments)

    def evaluate(self, batch: RewardBatch, **context: Any) -> AdvantageOutput:
        output = self.strategy(batch.evaluation, **context)
        advantages = self._transform(output.advantages, batch.scores.isfinite(), batch.groups)
        return AdvantageOutput(advantages, {**output.metrics, **batch_metrics(batch, advantages)})

    def _transform(self, advantages: Tensor, scored: Tensor, segments: Tensor) -> Tensor:
        work, device = work_device(advantages), advantages.device
        advantages, scored = advantages.to(work, torch.float64), scored.to(work)
        kept = scored & functional.with_signal(advantages, segments.to(work))
        for transform in self.transforms:
            advantages = torch.where(kept, transform(advantages, scored), 0.0)
        return saturated(advantages).to(device)


@dataclass(frozen=True)
class PerReward(Composite):
    """Each reward function normalised on its own, then summed: ``sum_f w_f * A_f``, whitened over the batch (GDPO).

    Column f goes through ``strategies[name_f]``, or else `inner`, per group; a cell that its function did not score
    adds 0. `whiten`: ``(x - mean) / (std + eps)`` over the scored rows of the batch (ddof 1); a group that gave no
    signal stays exactly 0. The defaults equal TRL's ``multi_objective_aggregation="normalize_then_sum"``.

    Use it when reward functions differ in scale or sparsity: summed first, the one that varies most hides the others,
    and different combinations of scores collapse into the same advantage. Weights then weigh signals, not raw scores.
    With one function it is `inner`, whitened. Do not use it where the sum is what counts, as in a reward minus its
    penalty. Metrics of a function are logged under its name.

    A strategy with state that serves several functions follows the summed score; one that serves a single function
    follows that function.

    >>> import torch
    >>> batch = RewardBatch(
    ...     rewards=torch.tensor([[0.0, 30.0], [1.0, 10.0], [0.0, 20.0], [0.0, 40.0]]), weights=torch.ones(2),
    ...     lengths=torch.ones(4, dtype=torch.int64), truncated=torch.zeros(4, dtype=torch.bool),
    ...     num_generations=4, names=("correct", "style"))
    >>> PerReward("rank", whiten=False)(batch).advantages
    tensor([ 0.0000,  0.0000, -0.3333,  0.3333])

    Reference: GDPO, https://arxiv.org/abs/2601.05242
    """

    kind: ClassVar[str] = "per_reward"
    aliases: ClassVar[tuple[str, ...]] = ("gdpo",)

    inner: AdvantageStrategy = nested("advantage", default_factory=ZScore)
    _: KW_ONLY
    strategies: Mapping[str, AdvantageStrategy] | None = nested("advantage", default=None, hash=False)
    whiten: bool = True
    eps: float = 1e-4

    def validate(self) -> None:
        check_strategy("inner", self.inner)
        if self.strategies is not None and not isinstance(self.strategies, Mapping):
            raise ConfigError(f"`strategies` must map reward names to strategies, got {self.strategies!r}")
        for name, strategy in (self.strategies or {}).items():
            check_strategy(f"strategies[{name!r}]", strategy)
        check_bool("whiten", self.whiten)
        check_number("eps", self.eps, at_least=0)

    def normalize(self, values: Tensor, segments: Tensor, **context: Any) -> Tensor:
        advantages = self.inner.normalize(values, segments, **context)
        work = work_device(advantages)
        total, scored = advantages.to(work, torch.float64), values.isfinite().to(work)
        return self._finish(total, scored, segments.to(work)).to(advantages.device)

    def evaluate(self, batch: RewardBatch, **context: Any) -> AdvantageOutput:
        work, device = work_device(batch.rewards), batch.rewards.device
        total = torch.zeros(len(batch.rewards), dtype=torch.float64, device=work)
        metrics: dict[str, float] = {}
        for index, (name, strategy) in enumerate(self._columns(batch)):
            output = strategy(batch.column(index).evaluation, **context)
            total += batch.weights[index].to(work, torch.float64) * output.advantages.to(work, torch.float64)
            metrics.update(prefixed(name, output.metrics))
        advantages = self._finish(total, batch.scores.isfinite().to(work), batch.groups.to(work)).to(device)
        return AdvantageOutput(advantages, {**metrics, **batch_metrics(batch, advantages)})

    def observe(self, batch: RewardBatch) -> None:
        serving: dict[int, list[int]] = {}
        columns = self._columns(batch)
        for index, (_, strategy) in enumerate(columns):
            serving.setdefault(id(strategy), []).append(index)
        for indices in serving.values():
            strategy = columns[indices[0]][1]
            if strategy.has_state:
                strategy.observe(batch.column(indices[0]) if len(indices) == 1 else batch)

    def _columns(self, batch: RewardBatch) -> list[tuple[str, AdvantageStrategy]]:
        """Return each reward function's name and strategy."""
        self.check_names(batch.names)
        return [(name, (self.strategies or {}).get(name, self.inner)) for name in batch.names]

    def check_names(self, names: Sequence[str]) -> None:
        """Raise `ConfigError` if `strategies` names a reward function that is not among `names`."""
        for name in self.strategies or {}:
            if name not in names:
                raise ConfigError(
                    f"`strategies` of {self.kind!r} names {name!r}, which is no reward function of this run"
                    f"{did_you_mean(name, names)}"
                )

    def _finish(self, total: Tensor, scored: Tensor, segments: Tensor) -> Tensor:
        if self.whiten:
            kept = scored & functional.with_signal(total, segments)
            total = torch.where(kept, functional.whiten(total, scored, eps=self.eps), 0.0)
        return saturated(total)


def check_strategy(name: str, value: Any) -> None:
    """Raise `ConfigError` unless `value` is one advantage strategy."""
    if not isinstance(value, AdvantageStrategy):
        raise ConfigError(f"`{name}` must be an advantage strategy, got {value!r}")
