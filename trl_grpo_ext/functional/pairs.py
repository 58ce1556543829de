"""Comparisons within groups: which pairs to judge, and what the judgements say of each row.

Suffixes: N rows (completions), P pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_grpo_ext.functional.segments import ScoredSegments


def draw_pairs(
    scores: Tensor, segments: Tensor, pairs: int | None, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Return the rows `(P,)` and `(P,)` of the pairs to compare, both int64, each pair once.

    Pairs are within a segment, between rows that have a score (not NaN). Each row is in `pairs` of them: all of its
    segment's if there are no more or `pairs` is None, and one row in one more where rows and `pairs` are both odd.
    Whom a row meets is drawn from `generator`, on the CPU.

    >>> first, second = draw_pairs(torch.zeros(4), torch.zeros(4, dtype=torch.int64), None)
    >>> sorted(sorted(pair) for pair in zip(first.tolist(), second.tolist()))
    [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    """
    rows = ScoredSegments(scores.cpu(), segments.cpu())
    shuffle = torch.rand(len(rows.ids), generator=generator, dtype=torch.float64)
    order = rows.order(shuffle)  # by segment, scored rows first, in random order: a round table for each segment
    segment = rows.ids[order]
    start, n = rows.start[segment], rows.count.to(torch.int64)[segment]
    seat = torch.arange(len(order)) - start
    seated = seat < n
    degree = (n - 1).clamp(min=0) if pairs is None else (n - 1).clamp(min=0, max=pairs)

    # Each row meets the `degree // 2` next ones round the table, so is met by as many before it.
    met: list[tuple[Tensor, Tensor]] = []
    for offset in range(1, int(degree.max()) // 2 + 1 if len(degree) else 0):
        chosen = seated & (offset <= degree // 2)
        met.append(((start + seat)[chosen], (start + (seat + offset) % n.clamp(min=1))[chosen]))
    # An odd degree needs one meeting more: with the row opposite, or if there is none (n odd), along the tour in
    # steps of nearly half the table, which passes every seat once: every other step of it is a meeting.
    half = n // 2
    opposite = seated & (degree % 2 == 1) & (n % 2 == 0) & (seat < half)
    met.append(((start + seat)[opposite], (start + seat + half)[opposite]))
    tour = seated & (degree % 2 == 1) & (n % 2 == 1) & (seat % 2 == 0)
    place = [(start + step * half % n.clamp(min=1))[tour] for step in (seat, seat + 1)]
    met.append((place[0], place[1]))
    first, second = (torch.cat(side) for side in zip(*met, strict=True))
    return order[first], order[second]


def win_rates(first: Tensor, second: Tensor, chance: Tensor, rows: int) -> Tensor:
    """Return the `(rows,)` float64 mean chance of each row to win its pairs; NaN for a row in none.

    `chance` is `(P,)`, that the first of the pair is the better one; a NaN pair is left out.

    >>> win_rates(torch.tensor([0, 0]), torch.tensor([1, 2]), torch.tensor([1.0, 0.5]), rows=4).tolist()
    [0.75, 0.0, 0.5, nan]
    """
    chance_P = chance.to(torch.float64)
    judged = chance_P.isfinite()
    row = torch.cat([first[judged], second[judged]])
    won = torch.cat([chance_P[judged], 1 - chance_P[judged]])
    total = won.new_zeros(rows).index_add_(0, row, won)
    count = won.new_zeros(rows).index_add_(0, row, torch.ones_like(won))
    return total / count  # 0 / 0 is NaN
