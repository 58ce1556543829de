"""The formulas once more, in plain Python over lists, one group at a time: slow, but close to the words."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction

FLOAT32_EPS = 2.0**-23
Values = Sequence[float]


def by_segment(values: Values, segments: Sequence[int]) -> list[list[int]]:
    """Return the scored rows of each segment."""
    rows = defaultdict(list)
    for row, (value, segment) in enumerate(zip(values, segments, strict=True)):
        if math.isfinite(value):
            rows[segment].append(row)
    return list(rows.values())


def is_constant(r: Values) -> bool:
    return len(r) < 2 or max(r) - min(r) <= 4 * FLOAT32_EPS * max(map(abs, r))


def segmentwise(formula: Callable) -> Callable:
    """Turn ``formula(scores, lengths) -> advantages`` of one segment into one of a partition."""

    def of_partition(values: Values, segments: Sequence[int], lengths: Sequence[int]) -> list[float]:
        result = [0.0] * len(values)
        for rows in by_segment(values, segments):
            r = [values[row] for row in rows]
            if not is_constant(r):
                for row, advantage in zip(rows, formula(r, [lengths[row] for row in rows]), strict=True):
                    result[row] = advantage
        return result

    return of_partition


@segmentwise
def zscore(r, lengths):
    mean, std = statistics.fmean(r), statistics.stdev(r)
    return [(x - mean) / (std + 1e-4) for x in r]


@segmentwise
def mean_centered(r, lengths):
    mean = statistics.fmean(r)
    return [x - mean for x in r]


@segmentwise
def leave_one_out(r, lengths):
    return [x - statistics.fmean(r[:i] + r[i + 1 :]) for i, x in enumerate(r)]


@segmentwise
def rank(r, lengths):
    positions = [1 + sum(y < x for y in r) + (sum(y == x for y in r) - 1) / 2 for x in r]
    return [(k - 1) / (len(r) - 1) - 0.5 for k in positions]


@segmentwise
def robust_zscore(r, lengths):
    median = statistics.median(r)
    distances = [abs(x - median) for x in r]
    mad = statistics.median(distances)
    scale = 1.4826 * mad if mad > 0 else 1.2533 * statistics.fmean(distances)
    return [(x - median) / (scale + 1e-4) for x in r]


@segmentwise
def optimal_baseline(r, lengths):
    weights = lengths if sum(lengths) else [1] * len(r)
    baseline = sum(w * x for w, x in zip(weights, r, strict=True)) / sum(weights)
    return [x - baseline for x in r]


def zscore_batch(values: Values, segments: Sequence[int], lengths: Sequence[int]) -> list[float]:
    """``scale="batch"`` with ddof 0 and eps 1e-6."""
    scored = [x for x in values if math.isfinite(x)]
    std = statistics.pstdev(scored) if scored else 0.0
    return [x / (std + 1e-6) for x in mean_centered(values, segments, lengths)]


def length_cells(values, scopes, lengths, *, buckets=2, edges=None, min_size=1, merge=False) -> list[list[int]]:
    """Return the cells, each a list of scored rows, by the words of the rule."""
    cells = []
    for rows in by_segment(values, scopes):
        table = defaultdict(list)
        for row in rows:
            if edges is not None:
                bucket = sum(lengths[row] > edge for edge in edges)
            else:
                below = sum(lengths[other] < lengths[row] for other in rows)
                equal = sum(lengths[other] == lengths[row] for other in rows)
                bucket = math.floor(buckets * (below + Fraction(equal - 1, 2)) / len(rows))
            table[bucket].append(row)
        ordered = [table[bucket] for bucket in sorted(table)]
        cells += merge_small(ordered, lengths, min_size) if merge else ordered
    return cells


def merge_small(cells: list[list[int]], lengths: Sequence[int], min_size: int) -> list[list[int]]:
    """Merge one cell at a time, with exact fractions."""
    cells = [list(cell) for cell in cells]

    def mean(cell):
        return Fraction(sum(lengths[row] for row in cell), len(cell))

    while len(cells) > 1 and min(map(len, cells)) < min_size:
        smallest = min(range(len(cells)), key=lambda i: (len(cells[i]), i))
        neighbours = [i for i in (smallest - 1, smallest + 1) if 0 <= i < len(cells)]
        nearest = min(neighbours, key=lambda i: (abs(mean(cells[i]) - mean(cells[smallest])), i))
        cells[nearest] = sorted(cells[nearest] + cells[smallest])
        del cells[smallest]
    return cells
