"""Length buckets: a partition refined so that rows are compared with rows of like length only.

Suffixes: N rows, S scopes (groups, or the whole batch), C cells: one for each bucket of a scope that holds scored rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trl_grpo_ext.functional.advantages import row_lengths
from trl_grpo_ext.functional.segments import ScoredSegments, dense_ids

_TIE = 1e-12
"""Two distances between mean lengths are equal if they differ by no more than this times the larger mean length."""


class LengthCells(NamedTuple):
    """How rows were sorted into cells."""

    cells: Tensor
    """`(N,)` int64 cell of each row, after merging; rows without a score lie in some cell of their scope."""
    buckets: Tensor
    """`(N,)` int64 bucket of each row, before merging: 0 holds the shortest. Means nothing for rows without a score."""
    scored: Tensor
    """`(N,)` bool: the row has a score."""
    joined: Tensor
    """`(N,)` bool: a scored row whose cell was joined with another."""
    small: Tensor
    """`(N,)` bool: a scored row whose cell holds fewer than `min_size` scored rows."""
    size: int
    """The number of buckets; of more quantiles than rows, N are kept, which tell the same lengths apart."""


def length_cells(
    values: Tensor,
    scopes: Tensor,
    lengths: Tensor | None,
    *,
    buckets: int = 2,
    edges: Sequence[float] | None = None,
    min_size: int = 1,
    merge: bool = False,
    rows: ScoredSegments | None = None,
) -> LengthCells:
    """Sort the scored rows of each scope into cells by length: at `edges`, or else in `buckets` quantiles.

    `merge`: cells of fewer than `min_size` scored rows are joined to a neighbour, by the rule of `merged_columns`.
    `rows` may be the `ScoredSegments` of values and scopes, if there are any already.
    """
    rows = ScoredSegments.of(values, scopes, rows)
    length_N = row_lengths(rows, lengths)
    # With as many quantiles as rows, different lengths are in different ones already: beyond that only numbers grow.
    most = max(1, len(length_N))
    buckets, min_size = min(buckets, most), min(min_size, most + 1)
    if edges is None:
        bucket_N = quantile_buckets(rows, length_N, buckets)
    else:
        bucket_N, buckets = edge_buckets(length_N, edges), len(edges) + 1

    # Cells are numbered by scope, then by bucket. A row without a score goes to the first of its scope.
    bucket_N = torch.where(rows.scored, bucket_N, 0)
    key_N = rows.ids * buckets + bucket_N
    cell_N, size = dense_ids(key_N)
    table = ScoredSegments(torch.where(rows.scored, length_N, torch.nan), cell_N)
    count_C, total_C = table.count, table.sum()
    scope_C = cell_N.new_zeros(size).index_copy_(0, cell_N, rows.ids)
    if merge:
        target_C = merged_cells(count_C, total_C, scope_C, min_size)
        cell_N = target_C[cell_N]
        parts_C = torch.bincount(target_C[count_C > 0], minlength=size)
        count_C = count_C.new_zeros(size).index_add_(0, target_C, count_C)
        joined_N = rows.scored & (parts_C > 1)[cell_N]
    else:
        joined_N = torch.zeros_like(rows.scored)
    small_N = rows.scored & (count_C < min_size)[cell_N]
    return LengthCells(cell_N, bucket_N, rows.scored, joined_N, small_N, buckets)


def edge_buckets(lengths: Tensor, edges: Sequence[float]) -> Tensor:
    """`(N,)` int64: ``len <= edges[0]`` is bucket 0, ``edges[0] < len <= edges[1]`` is 1, and so on."""
    return torch.bucketize(lengths, torch.tensor(list(edges), dtype=lengths.dtype, device=lengths.device))


def quantile_buckets(rows: ScoredSegments, lengths: Tensor, buckets: int) -> Tensor:
    """`(N,)` int64 ``floor(buckets * r / n)`` for the average 0-based rank r of the length among n scored rows.

    Equal lengths share their mean rank, hence their bucket.
    """
    twice_rank = (2 * rows.rank(lengths)).to(torch.int64)  # an average rank is a multiple of 1/2: integers are exact
    return buckets * twice_rank // (2 * rows.spread(rows.count).to(torch.int64)).clamp(min=1)


def merged_cells(count: Tensor, total: Tensor, scope: Tensor, min_size: int) -> Tensor:
    """`(C,)` int64: the cell that each cell ends up in, by the rule of `merged_columns` within each scope.

    `count` and `total` are `(C,)` scored rows and the sum of their lengths; cells without scored rows stay as they are.
    `scope` is `(C,)`; within a scope cells are in order of length.
    """
    target_C = torch.arange(len(count), device=count.device)
    held = (count > 0).nonzero().squeeze(1)
    if not len(held):
        return target_C
    scope_of_held = scope[held]
    cells_S = torch.bincount(scope_of_held)
    small_S = torch.bincount(scope_of_held[count[held] < min_size], minlength=len(cells_S))
    busy_S = (small_S > 0) & (cells_S > 1)

    # Lay the busy scopes out as the rows of a table, each scope's cells in its first columns.
    column = torch.arange(len(held), device=held.device) - (cells_S.cumsum(0) - cells_S)[scope_of_held]
    chosen = busy_S[scope_of_held]
    cell, column, row = held[chosen], column[chosen], (busy_S.cumsum(0) - 1)[scope_of_held[chosen]]
    shape = (int(busy_S.sum()), int(cells_S.max()))
    cell_SM = cell.new_zeros(shape).index_put_((row, column), cell)
    count_SM = count.new_zeros(shape).index_put_((row, column), count[cell])
    total_SM = total.new_zeros(shape).index_put_((row, column), total[cell])
    owner_SM = merged_columns(count_SM, total_SM, min_size)
    target_C[cell] = cell_SM[row, owner_SM[row, column]]
    return target_C


def merged_columns(count: Tensor, total: Tensor, min_size: int) -> Tensor:
    """`(S, M)` int64: the column that each column ends up in, for M cells in order of length in each of S scopes.

    While a scope has a cell of fewer than `min_size` rows and another cell, its smallest cell (ties: the shorter) joins
    the neighbour whose mean length is nearest (ties: the shorter). A column with count 0 holds no cell.

    One pass of the loop makes one merge in every scope at once, so there are at most M - 1 passes.
    """
    count_SM, total_SM = count.clone(), total.clone()
    column_M = torch.arange(count.shape[1], device=count.device)
    owner_SM = column_M.expand(count.shape).clone()
    while True:
        held = count_SM > 0
        todo = ((held & (count_SM < min_size)).any(dim=1) & (held.sum(dim=1) > 1)).nonzero().squeeze(1)
        if not len(todo):
            return owner_SM
        count_TM, total_TM, held = count_SM[todo], total_SM[todo], held[todo]
        smallest = torch.where(held, count_TM, torch.inf).argmin(dim=1, keepdim=True)
        target = _nearest_neighbour(total_TM / count_TM, held, smallest)

        for table, values_TM in ((count_SM, count_TM), (total_SM, total_TM)):
            values_TM.scatter_add_(1, target, values_TM.gather(1, smallest))
            table[todo] = values_TM.scatter_(1, smallest, 0.0)
        owner_TM = owner_SM[todo]
        owner_SM[todo] = torch.where(owner_TM == smallest, target, owner_TM)


def _nearest_neighbour(mean: Tensor, held: Tensor, cell: Tensor) -> Tensor:
    """`(T, 1)` column of the neighbour of `cell` `(T, 1)` with the nearest mean; there is one on at least one side."""
    width = mean.shape[1]
    column_M = torch.arange(width, device=mean.device)
    left = torch.where(held & (column_M < cell), column_M, -1).amax(dim=1, keepdim=True)
    right = torch.where(held & (column_M > cell), column_M, width).amin(dim=1, keepdim=True)
    own_mean = mean.gather(1, cell)
    to_left = own_mean - mean.gather(1, left.clamp(min=0))
    right_mean = mean.gather(1, right.clamp(max=width - 1))
    to_right = right_mean - own_mean
    goes_left = (right == width) | ((left >= 0) & (to_left <= to_right + _TIE * right_mean))
    return torch.where(goes_left, left, right)
