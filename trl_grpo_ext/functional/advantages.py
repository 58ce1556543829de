"""Advantage formulas on segments. Each takes `(N,)` values and `(N,)` segment ids and returns `(N,)` float32.

Every formula obeys the same rules: a row without a score (NaN or infinite) gets 0 and touches nobody's baseline; a
segment that is constant, or has fewer than two scored rows, gets zeros; the work is done in float64.

`rows` may be the `ScoredSegments` of the same tensors, if there are any already.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_grpo_ext.errors import ShapeError
from trl_grpo_ext.functional.segments import ScoredSegments, dense_ids

MAD_TO_STD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""

MEAN_DEVIATION_TO_STD = 1.2533
"""Standard deviation of a normal distribution over its mean absolute deviation."""


def zscore(
    values: Tensor,
    segments: Tensor,
    *,
    eps: float = 1e-4,
    ddof: int = 1,
    scale: str = "group",
    rows: ScoredSegments | None = None,
) -> Tensor:
    """``(r - mean) / (std + eps)``; `scale` "batch" centres per segment but takes the std over all scored rows."""
    rows = ScoredSegments.of(values, segments, rows)
    if scale == "batch":
        everything = ScoredSegments(values, torch.zeros_like(segments))
        std_N = everything.spread(everything.std(ddof))
    else:
        std_N = rows.spread(rows.std(ddof))
    return rows.finish(rows.centred / (std_N + eps))


def mean_centered(values: Tensor, segments: Tensor, *, rows: ScoredSegments | None = None) -> Tensor:
    """``r - mean``."""
    rows = ScoredSegments.of(values, segments, rows)
    return rows.finish(rows.centred)


def leave_one_out(values: Tensor, segments: Tensor, *, rows: ScoredSegments | None = None) -> Tensor:
    """``r_i - mean_{j != i} r_j``, computed as ``n / (n - 1) * (r_i - mean)``, which cancels less."""
    rows = ScoredSegments.of(values, segments, rows)
    factor = rows.count / (rows.count - 1).clamp(min=1)
    return rows.finish(rows.centred * rows.spread(factor))


def rank(values: Tensor, segments: Tensor, *, rows: ScoredSegments | None = None) -> Tensor:
    """``(k - 1) / (n - 1) - 1/2`` for the average rank k in 1..n; ties share the mean rank."""
    rows = ScoredSegments.of(values, segments, rows)
    return rows.finish(rows.rank() / rows.spread((rows.count - 1).clamp(min=1)) - 0.5)


def robust_zscore(values: Tensor, segments: Tensor, *, eps: float = 1e-4, rows: ScoredSegments | None = None) -> Tensor:
    """``(r - median) / (1.4826 * MAD + eps)``, MAD being the median of ``|r - median|``.

    Where more than half of a segment is equal the MAD is 0; its scale is then 1.2533 times the mean of
    ``|r - median|``.
    """
    rows = ScoredSegments.of(values, segments, rows)
    deviation = rows.values - rows.spread(rows.median())
    distance = deviation.abs()
    mad = rows.median(distance)
    scale = torch.where(mad > 0, MAD_TO_STD * mad, MEAN_DEVIATION_TO_STD * rows.mean(distance))
    return rows.finish(deviation / rows.spread(scale + eps))


def optimal_baseline(
    values: Tensor, segments: Tensor, lengths: Tensor | None = None, *, rows: ScoredSegments | None = None
) -> Tensor:
    """``r_i - sum(len * r) / sum(len)`` over the scored rows; equal weights where all lengths are 0 (or None)."""
    rows = ScoredSegments.of(values, segments, rows)
    length_N = row_lengths(rows, lengths)
    total = rows.sum(length_N)
    # The same as the formula, taken from the mean: large scores of small spread then lose no digits.
    shift = rows.sum(length_N * rows.centred) / torch.where(total > 0, total, 1.0)
    return rows.finish(rows.centred - rows.spread(shift))


def row_lengths(rows: ScoredSegments, lengths: Tensor | None) -> Tensor:
    """Return `(N,)` float64 lengths beside the values of `rows`; without lengths all rows are equally long."""
    if lengths is None:
        return torch.ones_like(rows.values)
    if lengths.shape != rows.values.shape:
        raise ShapeError(f"`lengths` must be {tuple(rows.values.shape)} as the values, got {tuple(lengths.shape)}")
    return lengths.detach().to(rows.values.device, torch.float64)


def whiten(advantages: Tensor, scored: Tensor, *, eps: float = 1e-4) -> Tensor:
    """`(N,)` float64 ``(x - mean) / (std + eps)`` over the rows `scored` (ddof 1); fewer than two, or all equal: 0."""
    everything = ScoredSegments(
        torch.where(scored, advantages, torch.nan), torch.zeros_like(advantages, dtype=torch.int64)
    )
    std_N = everything.spread(everything.std(1))
    return torch.where(everything.live, everything.centred / (std_N + eps), 0.0)


def mean_spread(rows: ScoredSegments) -> Tensor | None:
    """0-dim mean std (ddof 1) of the segments with two scored rows or more; None if there is none.

    A constant segment counts with a std of exactly 0.
    """
    std = torch.where(rows.constant, 0.0, rows.std(1))[rows.count >= 2]
    return std.mean() if len(std) else None


def with_signal(advantages: Tensor, segments: Tensor) -> Tensor:
    """`(N,)` bool: the row's segment holds an advantage that is not 0."""
    ids, size = dense_ids(segments)
    found = torch.zeros(size, dtype=torch.bool, device=ids.device).index_fill_(0, ids[advantages != 0], True)
    return found[ids]
