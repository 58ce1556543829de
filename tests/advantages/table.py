"""The one table of advantage strategies that the contract test runs over, and how to make batches for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trl_grpo_ext.advantages import (
    Adaptive,
    AdvantageStrategy,
    BatchWhiten,
    Chain,
    Clip,
    LeaveOneOut,
    LengthBucketed,
    MeanCentered,
    Mix,
    OptimalBaseline,
    PerReward,
    Rank,
    RobustZScore,
    Scale,
    ZScore,
)
from trl_grpo_ext.batch import RewardBatch


@dataclass(frozen=True)
class Row:
    """A strategy and what is true of it beyond the rules for all."""

    strategy: AdvantageStrategy
    sums_to_zero: bool = True
    """The advantages of a segment sum to zero."""
    shift_invariant: bool = True
    """Adding a constant to one segment's scores changes nothing."""
    across_groups: bool = False
    """Compares rows of different groups, so that a constant group need not get zeros."""


TABLE = {
    "zscore": Row(ZScore()),
    "zscore_batch": Row(ZScore(scale="batch", ddof=0, eps=1e-6), shift_invariant=False),
    "mean_centered": Row(MeanCentered()),
    "leave_one_out": Row(LeaveOneOut()),
    "rank": Row(Rank()),
    "robust_zscore": Row(RobustZScore(), sums_to_zero=False),
    "optimal_baseline": Row(OptimalBaseline(), sums_to_zero=False),
    "length_bucketed": Row(LengthBucketed()),
    "length_bucketed_edges": Row(LengthBucketed(Rank(), edges=[8, 32], min_size=3)),
    "length_bucketed_zero": Row(LengthBucketed(MeanCentered(), buckets=3, min_size=3, small="zero")),
    "length_bucketed_batch": Row(
        LengthBucketed(Rank(), buckets=3, scope="batch"), sums_to_zero=False, across_groups=True
    ),
    "per_reward": Row(PerReward()),
    "per_reward_named": Row(PerReward(Rank(), strategies={"a": LengthBucketed()}, whiten=False)),
    "mix": Row(Mix(parts=[(0.5, Rank()), (2.0, LeaveOneOut())])),
    "chain": Row(Chain(ZScore(), transforms=[Clip(1.0), BatchWhiten(), Scale(0.5)]), sums_to_zero=False),
    "mix_of_chains": Row(Mix(parts=[(1.0, Chain(Rank(), transforms=[Scale(3.0)])), (0.1, LengthBucketed())])),
    "adaptive": Row(Adaptive()),
    "adaptive_nested": Row(
        Adaptive(before=LengthBucketed(Rank()), after=PerReward(Adaptive(patience=1)), min_std=0.0, patience=1)
    ),
}


def batch_of(
    rewards: Sequence | Tensor,
    num_generations: int | None = None,
    *,
    lengths: Sequence[int] | Tensor | None = None,
    weights: Sequence[float] | None = None,
    names: Sequence[str] | None = None,
    training: bool = True,
) -> RewardBatch:
    """Return a batch of `(N,)` or `(N, F)` rewards, one group by default; None and nan mean "not scored"."""
    if not isinstance(rewards, Tensor):
        rows = [row if isinstance(row, (list, tuple)) else [row] for row in rewards]
        rewards = torch.tensor([[float("nan") if x is None else x for x in row] for row in rows])
    if rewards.dim() == 1:
        rewards = rewards[:, None]
    n, f = rewards.shape
    return RewardBatch(
        rewards=rewards,
        weights=torch.ones(f) if weights is None else torch.tensor(weights),
        lengths=torch.full((n,), 10) if lengths is None else torch.as_tensor(lengths),
        truncated=torch.zeros(n, dtype=torch.bool),
        num_generations=num_generations or max(1, n),
        names=tuple("abcdefgh"[:f]) if names is None else tuple(names),
        training=training,
    )


def one_segment(n: int) -> Tensor:
    """Return the partition of n rows into one segment."""
    return torch.zeros(n, dtype=torch.int64)
