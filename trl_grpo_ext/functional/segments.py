"""Reductions over an arbitrary partition of rows, in float64, with no Python loop over rows or segments.

Suffixes: N rows (completions), K segments (groups, or the cells of a refined partition), M rows of the largest segment.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from trl_grpo_ext.errors import ShapeError

CONSTANT_TOLERANCE = 4 * 2.0**-23
"""A segment is constant iff ``max - min`` is at most this times its largest magnitude: four float32 roundings."""

_FLOAT32_MAX = torch.finfo(torch.float32).max
_GRID_LIMIT = 4
"""Segments are sorted side by side in a `(K, M)` grid if that is at most this many times larger than the rows."""


class ScoredSegments:
    """`(N,)` values cut into segments, some rows without a score.

    `values` is `(N,)` of any real dtype; NaN and infinities mean "not scored". Magnitudes beyond float32's largest are
    saturated there, so that no square overflows. `segments` is `(N,)` integer: rows with equal ids form a segment; the
    ids may come in any order and need not be dense.

    Reductions cover scored rows only and return `(K,)` float64; a segment without scored rows gives 0. Methods that
    take `x` reduce any `(N,)` float64 tensor over the same rows; by default it is the values.
    """

    def __init__(self, values: Tensor, segments: Tensor) -> None:
        if values.dim() != 1 or segments.shape != values.shape:
            raise ShapeError(
                f"values and segments must both be (N,), got {tuple(values.shape)} and {tuple(segments.shape)}"
            )
        if segments.is_floating_point() or segments.is_complex() or segments.dtype == torch.bool:
            raise ShapeError(f"segments must hold integers, got {segments.dtype}")
        self.source = values, segments
        self.device = values.device
        work = work_device(values)
        values_N = values.detach().to(work, torch.float64)
        # The usual case, all rows scored, is told by one sum, and then no pass is spent on masks.
        self.complete = bool(values_N.sum().isfinite())
        self.scored = torch.ones_like(values_N, dtype=torch.bool) if self.complete else torch.isfinite(values_N)
        self.values = self._or_else(values_N, 0.0).clamp(-_FLOAT32_MAX, _FLOAT32_MAX)
        ids = segments.to(work, torch.int64)
        # Groups as a batch holds them, in order and all of one size, are reduced as the rows of a matrix.
        self.shape = _matrix_shape(ids)
        self.ids, self.size = dense_ids(ids) if self.shape is None else (ids, self.shape[0])

    @classmethod
    def of(cls, values: Tensor, segments: Tensor, rows: ScoredSegments | None = None) -> ScoredSegments:
        """Return `rows` if they were made from these very tensors, so that nothing is reduced twice; else new ones."""
        if rows is not None and rows.source[0] is values and rows.source[1] is segments:
            return rows
        return cls(values, segments)

    @cached_property
    def count(self) -> Tensor:
        """`(K,)` float64 number of scored rows."""
        return self._sizes.to(torch.float64) if self.complete else self._add(self.scored.to(torch.float64))

    def sum(self, x: Tensor | None = None) -> Tensor:
        """Sum over the scored rows of each segment."""
        return self._add(self.values if x is None else self._or_else(x, 0.0))

    def mean(self, x: Tensor | None = None) -> Tensor:
        """Mean over the scored rows of each segment."""
        return self.sum(x) / self.count.clamp(min=1)

    def max(self, x: Tensor | None = None) -> Tensor:
        """Largest value of each segment."""
        return self._extreme(self.values if x is None else x, "amax", -torch.inf)

    def min(self, x: Tensor | None = None) -> Tensor:
        """Smallest value of each segment."""
        return self._extreme(self.values if x is None else x, "amin", torch.inf)

    @cached_property
    def centred(self) -> Tensor:
        """`(N,)` values minus their segment's mean."""
        return self.values - self.spread(self.mean())

    def centred_scores(self) -> Tensor:
        """`(N,)` float64: `centred`, but exactly 0 in constant segments, and NaN where there is no score.

        The last 12 of 53 bits are rounded off. They hold the rounding of the mean, which would otherwise order rows
        that are equal once they are compared across segments.
        """
        split = self.centred * (2.0**12 + 1)  # Veltkamp's splitting
        rounded = split - (split - self.centred)
        zero = self.spread(self.constant) | (self.centred.abs() <= 2.0**-40 * self.spread(self.magnitude))
        return torch.where(self.scored, torch.where(zero, 0.0, rounded), torch.nan)

    def std(self, ddof: int) -> Tensor:
        """Standard deviation with divisor ``n - ddof`` (two passes); 0 where that is not positive."""
        variance = self.sum(self.centred.square()) / (self.count - ddof).clamp(min=1)
        return torch.where(self.count > ddof, variance, 0.0).sqrt()

    def spread(self, x: Tensor) -> Tensor:
        """`(N,)` value of each row's segment, from `(K,)`."""
        if self.shape is not None:
            return x[:, None].expand(self.shape).reshape(-1)
        return x.index_select(0, self.ids)

    @cached_property
    def magnitude(self) -> Tensor:
        """Largest absolute value of each segment."""
        return torch.maximum(self._range[0].abs(), self._range[1].abs())

    @cached_property
    def constant(self) -> Tensor:
        """`(K,)` bool: all scored rows are equal up to float32 rounding (also true of fewer than two)."""
        low, high = self._range
        return (self.count < 2) | (high - low <= CONSTANT_TOLERANCE * self.magnitude)

    @property
    def constant_share(self) -> Tensor:
        """0-dim share of the segments that are constant; 0 of no segments."""
        return self.constant.sum() / max(1, self.size)

    @cached_property
    def live(self) -> Tensor:
        """`(N,)` bool: the row is scored and its segment is not constant. All other rows get advantage 0."""
        return self.scored & ~self.spread(self.constant)

    @cached_property
    def start(self) -> Tensor:
        """`(K,)` int64: where each segment begins in `order`."""
        return self._sizes.cumsum(0) - self._sizes

    def order(self, x: Tensor | None = None) -> Tensor:
        """`(N,)` row numbers sorted by segment, within it by value, rows without a score last."""
        return self._sorted(x)[0]

    def rank(self, x: Tensor | None = None) -> Tensor:
        """`(N,)` average 0-based rank of each scored row within its segment; ties share their mean rank."""
        order, start, ordered = self._sorted(x)
        if not len(order):
            return self.values.new_zeros(0)
        is_first = torch.ones_like(start, dtype=torch.bool)
        is_first[1:] = (start[1:] != start[:-1]) | (ordered[1:] != ordered[:-1])
        # Runs of equal values: the mean of the positions first..last is their average rank.
        first = is_first.nonzero().squeeze(1)
        last = torch.cat([first[1:], first.new_tensor([len(order)])]) - 1
        middle = (first + last).to(torch.float64) / 2
        if len(first) < len(order):
            middle = middle[is_first.cumsum(0) - 1]
        return torch.empty_like(ordered).index_copy_(0, order, middle - start)

    def median(self, x: Tensor | None = None) -> Tensor:
        """Median of each segment; of an even count, the mean of the two middle values."""
        _, _, ordered = self._sorted(x)
        if not len(ordered):
            return ordered.new_zeros(self.size)
        count = self.count.to(torch.int64)
        low = (self.start + (count - 1).clamp(min=0) // 2).clamp(max=len(ordered) - 1)
        high = (self.start + count // 2).clamp(max=len(ordered) - 1)
        return torch.where(count > 0, (ordered[low] + ordered[high]) / 2, 0.0)

    def finish(self, advantages: Tensor) -> Tensor:
        """`(N,)` float32 on the input's device: `advantages` where `live`, exactly 0 elsewhere; saturated."""
        return saturated(torch.where(self.live, advantages, 0.0)).to(self.device)

    @cached_property
    def _sizes(self) -> Tensor:
        """`(K,)` int64 number of rows, scored or not."""
        if self.shape is not None:
            return self.ids.new_full((self.size,), self.shape[1])
        return self.ids.new_zeros(self.size).index_add_(0, self.ids, torch.ones_like(self.ids))

    @cached_property
    def _by_segment(self) -> tuple[Tensor, Tensor]:
        """`(N,)` row numbers sorted by segment (stable), and the segments of these rows."""
        ids, order = self.ids.to(torch.int32).sort(stable=True)  # several times faster than on int64
        return order, ids.to(torch.int64)

    def _sorted(self, x: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """`(N,)` `order`; the `start` of its rows' segments; and their values, +inf for rows without a score."""
        keys_N = self._or_else(self.values if x is None else x, torch.inf)
        if self.shape is not None:
            ordered_KM, column_KM = keys_N.reshape(self.shape).sort(dim=1)
            return (column_KM + self.start[:, None]).flatten(), self.spread(self.start), ordered_KM.flatten()
        rows, ids = self._by_segment
        start = self.start[ids]
        largest = int(self._sizes.max()) if self.size else 0
        if self.size * largest > _GRID_LIMIT * len(keys_N):
            by_value = keys_N.argsort(stable=True)
            order = by_value[self.ids[by_value].argsort(stable=True)]
            return order, start, keys_N[order]
        # A segment fills the first columns of its row of the grid; NaN behind it sorts after everything.
        slot = ids * largest + torch.arange(len(ids), device=ids.device) - start
        grid = keys_N.new_full((self.size * largest,), torch.nan).index_copy_(0, slot, keys_N[rows])
        ordered_KM, column_KM = grid.view(self.size, largest).sort(dim=1)
        return rows[column_KM.flatten()[slot] + start], start, ordered_KM.flatten()[slot]

    def _add(self, x: Tensor) -> Tensor:
        """`(K,)` sum over all rows, scored or not."""
        if self.shape is not None:
            return x.reshape(self.shape).sum(dim=1)
        return x.new_zeros(self.size).index_add_(0, self.ids, x)

    def _or_else(self, x: Tensor, missing: float) -> Tensor:
        """`(N,)` `x`, and `missing` in rows without a score."""
        return x if self.complete else torch.where(self.scored, x, missing)

    @cached_property
    def _range(self) -> tuple[Tensor, Tensor]:
        return self.min(), self.max()

    def _extreme(self, x: Tensor, reduce: str, empty: float) -> Tensor:
        filled = self._or_else(x, empty)
        if self.shape is not None:
            matrix = filled.reshape(self.shape)
            extreme = matrix.amax(dim=1) if reduce == "amax" else matrix.amin(dim=1)
        else:
            extreme = x.new_full((self.size,), empty).scatter_reduce_(0, self.ids, filled, reduce)
        return torch.where(self.count > 0, extreme, 0.0)


def saturated(x: Tensor) -> Tensor:
    """Return `x` in float32, its magnitude kept at float32's largest; a 0/0 counts as 0."""
    x = torch.nan_to_num(x, nan=0.0, posinf=_FLOAT32_MAX, neginf=-_FLOAT32_MAX)
    return x.clamp_(-_FLOAT32_MAX, _FLOAT32_MAX).to(torch.float32)


def work_device(x: Tensor) -> torch.device:
    """Return where to compute in float64: MPS has none, and a batch of scores is small enough for the CPU."""
    return torch.device("cpu") if x.device.type == "mps" else x.device


def dense_ids(ids: Tensor) -> tuple[Tensor, int]:
    """Return the ids renumbered ``0..K-1``, in the order of the given ids, as int64; and K."""
    ids = ids.to(torch.int64)  # torch takes no narrower index
    if not len(ids):
        return ids, 0
    low, high = (int(x) for x in ids.aminmax())
    if low < 0 or high >= 2 * len(ids):
        unique, inverse = ids.unique(return_inverse=True)
        return inverse, len(unique)
    used = torch.zeros(high + 1, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    number = used.cumsum(0) - 1
    return (ids if bool(used.all()) else number[ids]), int(number[-1]) + 1


def _matrix_shape(ids: Tensor) -> tuple[int, int] | None:
    """Return `(K, M)` if the ids are 0 .. K-1 in order, M times each."""
    size = int(ids[-1]) + 1 if len(ids) else 0
    if size <= 0 or len(ids) % size:
        return None
    shape = (size, len(ids) // size)
    regular = ids.reshape(shape) == torch.arange(size, device=ids.device)[:, None]
    return shape if bool(regular.all()) else None
