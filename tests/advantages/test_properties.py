"""Properties of every strategy on generated scores, and agreement with the plain-Python reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.advantages import reference
from tests.advantages.table import TABLE, batch_of
from trl_grpo_ext.functional.buckets import length_cells

fast = settings(max_examples=10, deadline=None, derandomize=True)
every_strategy = pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)

# Quarters are exact in float32, tie often, and survive being shifted; anything goes where only finiteness is promised.
quarters = st.integers(-20, 20).map(lambda k: k / 4)
anything = st.one_of(
    quarters,
    st.floats(width=32, allow_nan=True, allow_infinity=True),
    st.sampled_from([math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e-45, 0.1, 0.1 + 2**-27]),
)


@st.composite
def partitions(draw, values=quarters, missing=True, max_rows=24):
    """Draw scores, segment ids (few, unsorted, with gaps) and lengths of like length."""
    n = draw(st.integers(1, max_rows))
    cell = st.one_of(values, st.just(math.nan)) if missing else values
    rows = draw(
        st.lists(st.tuples(cell, st.sampled_from([-3, 0, 7, 1000]), st.integers(0, 12)), min_size=n, max_size=n)
    )
    scores, segments, lengths = zip(*rows, strict=True)
    return torch.tensor(scores), torch.tensor(segments), torch.tensor(lengths)


@every_strategy
class TestProperties:
    @fast
    @given(data=partitions(anything))
    def test_finite_and_monotone_for_any_input(self, row, data):
        values, segments, lengths = data
        result = row.strategy.normalize(values, segments, lengths=lengths)
        assert result.isfinite().all()
        assert (result[~values.isfinite()] == 0).all()

        result = row.strategy.normalize(values, segments, lengths=torch.ones_like(segments))
        for segment in segments.unique():
            rows = (segments == segment) & values.isfinite()
            assert (result[rows][values[rows].argsort()].diff() >= 0).all()

    @fast
    @given(data=partitions(), shift=st.integers(-30, 30), order=st.randoms(use_true_random=False))
    def test_sum_shift_and_permutation(self, row, data, shift, order):
        values, segments, lengths = data
        result = row.strategy.normalize(values, segments, lengths=lengths)
        if row.sums_to_zero:
            for segment in segments.unique():
                assert abs(result[segments == segment].double().sum()) < 1e-4

        moved = values + shift * (segments == 0) if row.shift_invariant else values + shift
        torch.testing.assert_close(row.strategy.normalize(moved, segments, lengths=lengths), result)

        shuffled = list(range(len(values)))
        order.shuffle(shuffled)
        permuted = row.strategy.normalize(values[shuffled], segments[shuffled], lengths=lengths[shuffled])
        torch.testing.assert_close(permuted, result[shuffled])

    @fast
    @given(scores=st.lists(st.lists(st.one_of(anything, st.none()), min_size=2, max_size=2), min_size=8, max_size=8))
    def test_finite_for_any_batch(self, row, scores):
        output = row.strategy(batch_of(scores, 4, weights=[1.0, 0.5], training=False))
        assert output.advantages.isfinite().all()
        assert all(math.isfinite(value) for value in output.metrics.values())


FORMULAS = {
    "zscore": reference.zscore,
    "zscore_batch": reference.zscore_batch,
    "mean_centered": reference.mean_centered,
    "leave_one_out": reference.leave_one_out,
    "rank": reference.rank,
    "robust_zscore": reference.robust_zscore,
    "optimal_baseline": reference.optimal_baseline,
}


@pytest.mark.parametrize("name", FORMULAS)
@settings(fast, max_examples=15)
@given(data=partitions(st.one_of(quarters, st.floats(-1e3, 1e3, width=32))))
def test_agrees_with_the_reference(name, data):
    values, segments, lengths = data
    result = TABLE[name].strategy.normalize(values, segments, lengths=lengths)
    expected = FORMULAS[name](values.tolist(), segments.tolist(), lengths.tolist())
    torch.testing.assert_close(result, torch.tensor(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("edges", [None, [3], [2, 5, 9]], ids=str)
@settings(fast, max_examples=30)
@given(data=partitions(max_rows=40), buckets=st.integers(1, 7), min_size=st.integers(1, 6), merge=st.booleans())
def test_cells_agree_with_the_reference(edges, data, buckets, min_size, merge):
    values, scopes, lengths = data
    settings = {"buckets": buckets, "edges": edges, "min_size": min_size, "merge": merge}
    result = length_cells(values, scopes, lengths, **settings)
    expected = reference.length_cells(values.tolist(), scopes.tolist(), lengths.tolist(), **settings)
    cells = [[row for row in rows.tolist() if values[row].isfinite()] for rows in _rows_of_cells(result.cells)]
    assert sorted(cell for cell in cells if cell) == sorted(expected)
    small = sorted(row for cell in expected if len(cell) < min_size for row in cell)
    assert result.small.nonzero().flatten().tolist() == small


def _rows_of_cells(cells):
    return [(cells == cell).nonzero().flatten() for cell in cells.unique()]
