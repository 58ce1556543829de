"""The global reward batch: what advantage strategies and shaping see."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import Tensor

from trl_grpo_ext.errors import ShapeError
from trl_grpo_ext.functional.segments import ScoredSegments, work_device


@dataclass(frozen=True, kw_only=True)
class RewardBatch:
    """Rewards of one generation batch, gathered over all processes, rows in group order.

    Shapes: N completions, F reward functions; N is a multiple of G = `num_generations`, and rows ``g * G`` to
    ``(g + 1) * G - 1`` answer the same prompt. Raises `ShapeError` (a ``ValueError``) if the shapes disagree.
    """

    rewards: Tensor
    """`(N, F)` float; NaN where a function did not score a row. An infinite cell counts as NaN."""
    weights: Tensor
    """`(F,)` weight of each function."""
    lengths: Tensor
    """`(N,)` int64 completion lengths in tokens."""
    truncated: Tensor
    """`(N,)` bool: no end-of-sequence token within `max_completion_length`."""
    num_generations: int
    """G, the group size."""
    names: tuple[str, ...]
    """The reward functions' names."""
    training: bool = True
    prompts: list | None = None
    """Gathered only when a strategy says ``needs_text = True``."""
    completions: list | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        for field in ("rewards", "weights", "lengths", "truncated"):
            if not isinstance(getattr(self, field), Tensor):
                raise ShapeError(f"`{field}` must be a tensor, got {type(getattr(self, field)).__name__}")
        if self.rewards.dim() != 2:
            raise ShapeError(f"`rewards` must be (N, F), got shape {tuple(self.rewards.shape)}")
        n, f = self.rewards.shape
        for field, expected in {"weights": (f,), "lengths": (n,), "truncated": (n,)}.items():
            got = tuple(getattr(self, field).shape)
            if got != expected:
                raise ShapeError(f"`{field}` must have shape {expected} for rewards of shape {(n, f)}, got {got}")
        if len(self.names) != f:
            raise ShapeError(f"`names` must name {f} reward functions, got {len(self.names)}: {self.names}")
        if not isinstance(self.num_generations, Integral):
            raise ShapeError(f"`num_generations` must be an integer, got {self.num_generations!r}")
        if self.num_generations < 1 or n % self.num_generations:
            raise ShapeError(
                f"the batch must hold whole groups: {n} rows do not divide by num_generations={self.num_generations}"
            )
        for field in ("prompts", "completions"):
            value = getattr(self, field)
            if value is not None and len(value) != n:
                raise ShapeError(f"`{field}` must hold {n} entries, got {len(value)}")

    @cached_property
    def cells(self) -> Tensor:
        """`(N, F)` float64 rewards with infinite cells turned into NaN."""
        rewards = self.rewards.detach().to(work_device(self.rewards), torch.float64)
        return rewards if self._complete else torch.where(rewards.isinf(), torch.nan, rewards)

    @cached_property
    def scores(self) -> Tensor:
        """`(N,)` weighted sum of each row's finite cells; NaN where no function scored the row.

        It has the rewards' precision (float32 at least) and saturates there: a sum is never infinite.
        """
        weights = self.weights.to(self.cells.device, torch.float64)
        scores = (self.cells if self._complete else self.cells.nan_to_num()) @ weights
        if not self._complete:
            scores = torch.where(self.cells.isnan().all(dim=1), torch.nan, scores)
        dtype = torch.promote_types(self.rewards.dtype, torch.float32)
        return scores.clamp_(torch.finfo(dtype).min, torch.finfo(dtype).max).to(self.rewards.device, dtype)

    @cached_property
    def _complete(self) -> bool:
        """Whether every cell is finite; saves passes over large batches."""
        return bool(self.rewards.sum(dtype=torch.float64).isfinite())

    @cached_property
    def groups(self) -> Tensor:
        """`(N,)` int64 group ids ``0 .. N // G - 1``."""
        return torch.arange(len(self.rewards), device=self.rewards.device) // self.num_generations

    @cached_property
    def rows(self) -> ScoredSegments:
        """The scores cut into groups, ready for reductions."""
        return ScoredSegments(self.scores, self.groups)

    # Views: what a strategy shows to the strategies inside it. They share this batch's tensors.

    _centred_within: ClassVar[tuple[Tensor, ...]] = ()
    """Partitions within which columns are centred, one after the other; set on views only."""

    @property
    def evaluation(self) -> RewardBatch:
        """The batch with `training` False: seeing it never changes a strategy's state."""
        return self._view(training=False, rows=self.rows) if self.training else self

    def refined(self, segments: Tensor, *, centred: bool = False) -> RewardBatch:
        """Return the batch cut into other `(N,)` segments than its groups; `num_generations` means nothing there.

        `centred`: scores, and columns taken from the view, have their group's mean subtracted first.
        """
        if not centred:
            return self._view("rows", scores=self.scores, cells=self.cells, groups=segments)
        centrings = (*self._centred_within, self.groups)
        return self._view("rows", scores=self.rows.centred_scores(), groups=segments, _centred_within=centrings)

    def column(self, index: int) -> RewardBatch:
        """Return the batch with one reward function only, at weight 1; its scores are float64."""
        scores = self.cells[:, index].contiguous()
        for segments in self._centred_within:
            scores = ScoredSegments(scores, segments).centred_scores()
        return self._view(
            *("rows", "cells", "_complete"),
            rewards=scores[:, None],
            scores=scores,
            weights=self.weights.new_ones(1),
            names=(self.names[index],),
            groups=self.groups,
            _centred_within=(),
        )

    def _view(self, *stale: str, **values: Any) -> RewardBatch:
        """Return a copy without the `stale` derived tensors and with `values` in the place of its own."""
        view = copy.copy(self)
        for name in stale:
            view.__dict__.pop(name, None)
        view.__dict__.update(values)
        return view
