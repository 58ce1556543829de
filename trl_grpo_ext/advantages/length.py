"""Comparing completions of like length only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from trl_grpo_ext._strategy import nested
from trl_grpo_ext._validate import check_choice, check_number
from trl_grpo_ext.advantages.base import AdvantageOutput, AdvantageStrategy, Composite, batch_metrics
from trl_grpo_ext.advantages.combine import check_strategy
from trl_grpo_ext.advantages.group import ZScore
from trl_grpo_ext.batch import RewardBatch
from trl_grpo_ext.errors import ConfigError
from trl_grpo_ext.functional.buckets import LengthCells, length_cells
from trl_grpo_ext.functional.segments import ScoredSegments


@dataclass(frozen=True)
class LengthBucketed(Composite):
    """Applies `inner` within buckets of completion length, so that a score is compared with those of like length.

    ``edges=[a, b]`` gives the buckets ``len <= a``, ``a < len <= b``, ``len > b``. Otherwise there are `buckets`
    quantile buckets (2 by default): ``floor(buckets * r / n)`` for the average 0-based rank r of the length among the
    n scored rows of the scope; equal lengths share a bucket.

    `scope` "group" cuts each group by itself. "batch" first subtracts each group's mean score (constant groups become
    0), then compares all rows of the batch that lie in one bucket. That suits small groups, but a whole group may
    then be better or worse than its bucket.

    A cell of fewer than `min_size` scored rows is joined to the neighbour of nearest mean length (`small` "merge": the
    smallest first, ties to the shorter, until all are big enough or one is left), or its rows get 0 (`small` "zero").

    Use it against a reward model that likes long answers: length alone then earns nothing. Do not use it where length
    is right to matter, nor with fewer than about ``4 * buckets`` completions in a group, unless `scope` is "batch".
    With `loss_type` "grpo" or "dapo" the loss still weighs tokens by length; it does not replace "dr_grpo". Without
    lengths (`normalize` called with values and segments only) all rows are equally long, and lie in one bucket.

    >>> import torch
    >>> rewards, lengths = torch.tensor([1.0, 2.0, 3.0, 5.0]), torch.tensor([10, 20, 300, 400])
    >>> LengthBucketed("mean_centered").normalize(rewards, torch.zeros(4, dtype=torch.int64), lengths=lengths)
    tensor([-0.5000,  0.5000, -1.0000,  1.0000])

    Reference: A Long Way to Go (length correlations in RLHF), https://arxiv.org/abs/2310.03716
    """

    kind: ClassVar[str] = "length_bucketed"

    inner: AdvantageStrategy = nested("advantage", default_factory=ZScore)
    _: KW_ONLY
    buckets: int | None = None
    edges: Sequence[float] | None = None
    min_size: int = 2
    small: str = "merge"
    scope: str = "group"

    def __post_init__(self) -> None:
        if isinstance(self.edges, Sequence) and not isinstance(self.edges, str):
            object.__setattr__(self, "edges", tuple(self.edges))
        super().__post_init__()

    def validate(self) -> None:
        check_strategy("inner", self.inner)
        check_number("buckets", self.buckets, at_least=1, integer=True, optional=True)
        if self.edges is not None:
            _check_edges(self.edges)
            if self.buckets is not None:
                raise ConfigError(
                    f"`edges` and `buckets` exclude each other, got edges={list(self.edges)} and buckets={self.buckets}"
                )
        check_number("min_size", self.min_size, at_least=1, integer=True)
        check_choice("small", self.small, ("merge", "zero"))
        check_choice("scope", self.scope, ("group", "batch"))

    def normalize(self, values: Tensor, segments: Tensor, **context: Any) -> Tensor:
        rows = ScoredSegments.of(values, segments, context.get("rows"))
        split = self._split(values, segments, context.get("lengths"), rows)
        device = values.device
        if self.scope == "batch":
            values = rows.centred_scores()
        advantages = self.inner.normalize(values, split.cells, **context)
        return self._zeroed(advantages, split).to(device)

    def evaluate(self, batch: RewardBatch, **context: Any) -> AdvantageOutput:
        split = self._split(batch.scores, batch.groups, batch.lengths, batch.rows)
        output = self.inner(self._view(batch, split).evaluation, **context)
        advantages = self._zeroed(output.advantages, split).to(batch.rewards.device)
        metrics = {name: value for name, value in output.metrics.items() if name not in ("constant_groups", "abs_max")}
        metrics["constant_cells"] = output.metrics.get("constant_groups", 0.0)
        return AdvantageOutput(advantages, {**metrics, **self._metrics(split), **batch_metrics(batch, advantages)})

    def observe(self, batch: RewardBatch) -> None:
        if self.inner.has_state:
            self.inner.observe(self._view(batch, self._split(batch.scores, batch.groups, batch.lengths, batch.rows)))

    def _split(self, values: Tensor, segments: Tensor, lengths: Tensor | None, rows: ScoredSegments) -> LengthCells:
        scopes = torch.zeros_like(segments) if self.scope == "batch" else segments
        return length_cells(
            values,
            scopes,
            lengths,
            buckets=2 if self.buckets is None else self.buckets,
            edges=self.edges,
            min_size=self.min_size,
            merge=self.small == "merge",
            rows=rows,
        )

    def _view(self, batch: RewardBatch, split: LengthCells) -> RewardBatch:
        """Return the batch as `inner` sees it: the cells are its groups."""
        return batch.refined(split.cells, centred=self.scope == "batch")

    def _zeroed(self, advantages: Tensor, split: LengthCells) -> Tensor:
        if self.small == "merge":
            return advantages
        return torch.where(split.small.to(advantages.device), 0.0, advantages)

    def _metrics(self, split: LengthCells) -> dict[str, float]:
        """Return each bucket's scored rows before merging, and the fractions of scored rows merged and zeroed."""
        rows = max(1, int(split.scored.sum()))
        sizes = torch.bincount(split.buckets[split.scored], minlength=split.size).tolist()
        metrics = {f"bucket_{index}_size": float(size) for index, size in enumerate(sizes)}
        metrics["merged_fraction"] = split.joined.sum().item() / rows
        metrics["zeroed_fraction"] = split.small.sum().item() / rows if self.small == "zero" else 0.0
        return metrics


def _check_edges(edges: Any) -> None:
    if not isinstance(edges, tuple):
        raise ConfigError(f"`edges` must be a list of numbers, got {edges!r}")
    for index, edge in enumerate(edges):
        check_number(f"edges[{index}]", edge)
    if any(low >= high for low, high in pairwise(edges)):
        raise ConfigError(f"`edges` must be strictly increasing, got {list(edges)}")
