"""Reductions over an arbitrary partition of rows, in float64, with no Python loop over rows or segments.

Suffixes: N rows (completions), K segments (groups, or the cells of a refined partition).
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from trl_grpo_ext.errors import ShapeError

CONSTANT_TOLERANCE = 4 * 2.0**-23
"""A segment is constant iff ``max - min`` is at most this times its largest magnitude: four float32 roundings."""

_FLOAT32_MAX = torch.finfo(torch.float32).max


class ScoredSegments:
    """`(N,)` values cut into segments, some rows without a score.

    `values` is `(N,)` of any real dtype; NaN and infinities mean "not scored". Magnitudes beyond float32's largest are
    saturated there, so that no square overflows. `segments` is `(N,)` integer: rows with equal ids form a segment; the
    ids may come in any order and need not be dense.

    Reductions cover scored rows only and return `(K,)` float64; a segment without scored rows gives 0. Methods that take
    `x` reduce any `(N,)` float64 tensor over the same rows; by default it is the values.
    """

    def __init__(self, values: Tensor, segments: Tensor) -> None:
        if values.dim() != 1 or segments.shape != values.shape:
            raise ShapeError(
                f"values and segments must both be (N,), got {tuple(values.shape)} and {tuple(segments.shape)}"
            )
        if segments.is_floating_point() or segments.is_complex() or segments.dtype == torch.bool:
            raise ShapeError(f"segments must hold integers, got {segments.dtype}")
        self.device = values.device
        # MPS has no float64; a batch of scores is small, so such tensors are reduced on the CPU.
        work = torch.device("cpu") if values.device.type == "mps" else values.device
        values_N = values.detach().to(work, torch.float64)
        self.scored = torch.isfinite(values_N)
        self.values = torch.where(self.scored, values_N, 0.0).clamp(-_FLOAT32_MAX, _FLOAT32_MAX)
        self.ids, self.size = _dense(segments.to(work, torch.int64))

    @cached_property
    def count(self) -> Tensor:
        """`(K,)` float64 number of scored rows."""
        return self.sum(self.scored.to(torch.float64))

    def sum(self, x: Tensor | None = None) -> Tensor:
        """Sum over the scored rows of each segment."""
        x_N = self.values if x is None else torch.where(self.scored, x, 0.0)
        return x_N.new_zeros(self.size).index_add_(0, self.ids, x_N)

    def mean(self, x: Tensor | None = None) -> Tensor:
        """Mean over the scored rows of each segment."""
        return self.sum(x) / self.count.clamp(min=1)

    def max(self, x: Tensor | None = None) -> Tensor:
        """Largest value of each segment."""
        return self._extreme(self.values if x is None else x, "amax", -torch.inf)

    def min(self, x: Tensor | None = None) -> Tensor:
        """Smallest value of each segment."""
        return self._extreme(self.values if x is None else x, "amin", torch.inf)

    def std(self, ddof: int) -> Tensor:
        """Standard deviation with divisor ``n - ddof`` (two passes); 0 where that is not positive."""
        variance = self.sum(self.centred().square()) / (self.count - ddof).clamp(min=1)
        return torch.where(self.count > ddof, variance, 0.0).sqrt()

    def centred(self, centre: Tensor | None = None) -> Tensor:
        """`(N,)` values minus the segment's `centre` `(K,)`, by default its mean."""
        return self.values - self.spread(self.mean() if centre is None else centre)

    def spread(self, x: Tensor) -> Tensor:
        """`(N,)` value of each row's segment, from `(K,)`."""
        return x.index_select(0, self.ids)

    @cached_property
    def constant(self) -> Tensor:
        """`(K,)` bool: all scored rows are equal up to float32 rounding (also true of fewer than two)."""
        return (self.count < 2) | (self.max() - self.min() <= CONSTANT_TOLERANCE * self.max(self.values.abs()))

    @cached_property
    def live(self) -> Tensor:
        """`(N,)` bool: the row is scored and its segment is not constant. All other rows get advantage 0."""
        return self.scored & ~self.spread(self.constant)

    @cached_property
    def order(self) -> Tensor:
        """`(N,)` row numbers sorted by segment, within it scored rows first, by value (stable)."""
        return self.order_by(self.values)

    def order_by(self, x: Tensor) -> Tensor:
        """As `order`, with `x` `(N,)` in the place of the values."""
        by_value = torch.where(self.scored, x, torch.inf).argsort(stable=True)
        return by_value[self.ids[by_value].argsort(stable=True)]

    @cached_property
    def start(self) -> Tensor:
        """`(K,)` int64: where each segment begins in `order`."""
        sizes = torch.bincount(self.ids, minlength=self.size)
        return sizes.cumsum(0) - sizes

    def rank(self, x: Tensor | None = None) -> Tensor:
        """`(N,)` average 0-based rank of each scored row within its segment; ties share their mean rank."""
        x_N, order = (self.values, self.order) if x is None else (x, self.order_by(x))
        if not len(order):
            return x_N.new_zeros(0)
        # Rows without a score sort last, as +inf, so that they never tie with a scored value.
        ids, ordered = self.ids[order], torch.where(self.scored, x_N, torch.inf)[order]
        is_first = torch.ones_like(ids, dtype=torch.bool)
        is_first[1:] = (ids[1:] != ids[:-1]) | (ordered[1:] != ordered[:-1])
        # Runs of equal values: the mean of the positions first..last is their average rank.
        first = is_first.nonzero().squeeze(1)
        run = is_first.cumsum(0) - 1
        last = torch.cat([first[1:], first.new_tensor([len(order)])]) - 1
        position = ((first + last).to(torch.float64) / 2)[run]
        rank = torch.empty_like(position)
        rank[order] = position - self.start[ids].to(torch.float64)
        return rank

    def median(self, x: Tensor | None = None) -> Tensor:
        """Median of each segment; of an even count, the mean of the two middle values."""
        x_N, order = (self.values, self.order) if x is None else (x, self.order_by(x))
        if not len(order):
            return x_N.new_zeros(self.size)
        count = self.count.to(torch.int64)
        low = (self.start + (count - 1).clamp(min=0) // 2).clamp(max=len(order) - 1)
        high = (self.start + count // 2).clamp(max=len(order) - 1)
        middle = (x_N[order[low]] + x_N[order[high]]) / 2
        return torch.where(count > 0, middle, 0.0)

    def finish(self, advantages: Tensor, rows: Tensor | None = None) -> Tensor:
        """`(N,)` float32 on the input's device: `advantages` where `rows` (default: `live`), exactly 0 elsewhere.

        Saturates at float32's limits; a 0/0 counts as 0.
        """
        kept = torch.where(self.live if rows is None else rows, advantages, 0.0)
        kept = torch.nan_to_num(kept, nan=0.0, posinf=_FLOAT32_MAX, neginf=-_FLOAT32_MAX)
        return kept.clamp(-_FLOAT32_MAX, _FLOAT32_MAX).to(torch.float32).to(self.device)

    def _extreme(self, x: Tensor, reduce: str, empty: float) -> Tensor:
        filled = torch.where(self.scored, x, empty)
        extreme = x.new_full((self.size,), empty).scatter_reduce_(0, self.ids, filled, reduce)
        return torch.where(self.count > 0, extreme, 0.0)


def _dense(ids: Tensor) -> tuple[Tensor, int]:
    """Return ids in ``0..K-1`` and K. Small non-negative ids are kept (some segments may then be empty)."""
    if not len(ids):
        return ids, 0
    low, high = (int(x) for x in ids.aminmax())
    if low >= 0 and high < 2 * len(ids):
        return ids, high + 1
    unique, inverse = ids.unique(return_inverse=True)
    return inverse, len(unique)
