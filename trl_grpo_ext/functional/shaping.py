"""Terms that a completion's score gets for how it stands within its group: `(N,)` float64, NaN for unscored rows.

Suffixes: N rows (completions), K segments (groups). `scores_N` is `(N,)` with NaN where a row has no score,
`segments_N` and `lengths_N` are `(N,)` integer; see `ScoredSegments` for which partitions are allowed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_grpo_ext.functional.segments import ScoredSegments


def relative_length(scores: Tensor, segments: Tensor, lengths: Tensor, *, threshold: float) -> Tensor:
    """Return ``1/2 - (len - min) / (max - min)`` over each segment's scored rows; 0 where all lengths are equal.

    A row whose score is at most `threshold` gets ``min(0, .)``: being short is no merit of a failure.

    >>> zero = torch.zeros(3, dtype=torch.int64)
    >>> relative_length(torch.tensor([1.0, 1.0, 0.0]), zero, torch.tensor([10, 30, 10]), threshold=0.0).tolist()
    [0.5, -0.5, 0.0]
    """
    rows = ScoredSegments(scores, segments)
    length = lengths.to(rows.values)
    low, high = rows.min(length), rows.max(length)
    span = rows.spread(high - low)
    term = torch.where(span > 0, 0.5 - (length - rows.spread(low)) / span.clamp(min=1), 0.0)
    limit = scores.new_tensor(threshold).to(rows.values)  # 0.3 is the same number here as among the scores
    term = torch.where(rows.values > limit, term, term.clamp(max=0.0))
    return torch.where(rows.scored, term, torch.nan).to(rows.device)


def solved_share_length(scores: Tensor, segments: Tensor, lengths: Tensor, *, max_length: float) -> Tensor:
    """Return ``max(0, mean score of the segment) * len / max_length``.

    >>> zero = torch.zeros(2, dtype=torch.int64)
    >>> solved_share_length(torch.tensor([1.0, 0.0]), zero, torch.tensor([50, 100]), max_length=100).tolist()
    [0.25, 0.5]
    """
    rows = ScoredSegments(scores, segments)
    term = rows.spread(rows.mean().clamp(min=0.0)) * lengths.to(rows.values) / max_length
    return torch.where(rows.scored, term, torch.nan).to(rows.device)
