"""Segment reductions on small inputs, and on the layouts that take different paths."""

from __future__ import annotations

import pytest
import torch

from trl_grpo_ext.errors import ShapeError
from trl_grpo_ext.functional.segments import ScoredSegments, dense_ids, saturated

NAN = float("nan")

# Segments 30 (rows 0, 2, 5), -1 (rows 1, 4) and 7 (row 3, not scored); in order of id: -1, 7, 30.
VALUES = torch.tensor([5.0, 2.0, 1.0, NAN, 4.0, 3.0])
IDS = torch.tensor([30, -1, 30, 7, -1, 30])


@pytest.fixture
def rows():
    return ScoredSegments(VALUES, IDS)


class TestReductions:
    def test_ids_become_dense_in_order(self, rows):
        assert rows.size == 3
        assert rows.ids.tolist() == [2, 0, 2, 1, 0, 2]

    def test_over_scored_rows(self, rows):
        assert rows.count.tolist() == [2, 0, 3]
        assert rows.sum().tolist() == [6, 0, 9]
        assert rows.mean().tolist() == [3, 0, 3]
        assert rows.min().tolist() == [2, 0, 1]
        assert rows.max().tolist() == [4, 0, 5]
        assert rows.magnitude.tolist() == [4, 0, 5]
        assert rows.median().tolist() == [3, 0, 3]

    def test_std(self, rows):
        # Deviations -1, 1 | 2, -2, 0: squares 2 and 8
        torch.testing.assert_close(rows.std(1), torch.tensor([2.0, 0.0, 8 / 2]).sqrt().double())
        torch.testing.assert_close(rows.std(0), torch.tensor([2 / 2, 0.0, 8 / 3]).sqrt().double())

    def test_of_other_values_over_the_same_rows(self, rows):
        x = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0]).double()
        assert rows.sum(x).tolist() == [18, 0, 37]
        assert rows.mean(x).tolist() == [9, 0, 37 / 3]
        assert rows.min(x).tolist() == [2, 0, 1]
        assert rows.max(x).tolist() == [16, 0, 32]
        assert rows.median(x).tolist() == [9, 0, 4]

    def test_spread_and_centred(self, rows):
        assert rows.spread(torch.tensor([10.0, 20.0, 30.0])).tolist() == [30, 10, 30, 20, 10, 30]
        assert rows.centred[rows.scored].tolist() == [2, -1, -2, 1, 0]

    def test_order_and_start(self, rows):
        assert rows.order().tolist() == [1, 4, 3, 2, 5, 0]
        assert rows.start.tolist() == [0, 2, 3]

    def test_rank(self, rows):
        assert rows.rank()[rows.scored].tolist() == [2, 0, 0, 1, 1]

    def test_ties_share_their_mean_rank(self):
        rows = ScoredSegments(torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0]), torch.zeros(5, dtype=torch.int64))
        # Zeros at positions 0, 1; ones at 2, 3, 4
        assert rows.rank().tolist() == [3, 0.5, 3, 3, 0.5]

    def test_unscored_rows_come_last_and_tie_with_nobody(self):
        rows = ScoredSegments(torch.tensor([NAN, 3e38, NAN, -1.0]), torch.zeros(4, dtype=torch.int64))
        assert rows.order()[:2].tolist() == [3, 1]
        assert rows.rank()[[1, 3]].tolist() == [1, 0]

    def test_empty(self):
        rows = ScoredSegments(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
        for result in (rows.count, rows.sum(), rows.max(), rows.median(), rows.std(1), rows.rank(), rows.order()):
            assert result.shape == (0,)
        assert rows.constant_share == 0


class TestConstant:
    def test_within_four_roundings_of_the_largest_magnitude(self):
        ulp = 2.0**-23
        pairs = torch.tensor([[1.0, 1.0 + 4 * ulp], [1.0, 1.0 + 5 * ulp], [-8.0, -8.0 + 32 * ulp], [0.0, 1e-40]])
        rows = ScoredSegments(pairs.flatten(), torch.arange(8) // 2)
        # 4 ulp <= 4 ulp * (1 + 4 ulp); 5 ulp is more; 32 ulp <= 4 ulp * 8; 1e-40 > 4 ulp * 1e-40
        assert rows.constant.tolist() == [True, False, True, False]
        assert rows.constant_share == 0.5

    def test_fewer_than_two_scored_rows(self, rows):
        assert rows.constant.tolist() == [False, True, False]
        assert rows.live.tolist() == [True, True, True, False, True, True]

    def test_centred_scores(self):
        values = torch.tensor([1.0, 3.0, NAN, 0.1, 0.1 + 2**-27, NAN])
        result = ScoredSegments(values, torch.tensor([0, 0, 0, 1, 1, 1])).centred_scores()
        assert result.nan_to_num(9).tolist() == [-1, 1, 9, 0, 0, 9]

    def test_centred_scores_forget_the_rounding_of_the_mean(self):
        a = torch.tensor([0.1, 0.7, 0.2, 0.4]).double()
        one, other = (ScoredSegments(x, torch.zeros(4, dtype=torch.int64)).centred_scores() for x in (a, a.flip(0)))
        assert torch.equal(one, other.flip(0))
        torch.testing.assert_close(one, a - a.mean(), rtol=1e-11, atol=0)


class TestNumbers:
    def test_not_scored(self):
        rows = ScoredSegments(torch.tensor([1.0, torch.inf, -torch.inf, NAN]), torch.zeros(4, dtype=torch.int64))
        assert rows.scored.tolist() == [True, False, False, False]
        assert rows.mean().tolist() == [1]

    def test_doubles_beyond_float32_saturate(self):
        rows = ScoredSegments(torch.tensor([1e300, -1e300], dtype=torch.float64), torch.zeros(2, dtype=torch.int64))
        assert rows.max().item() == torch.finfo(torch.float32).max
        assert rows.std(1).isfinite().all()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
    def test_reduces_in_float64(self, dtype):
        rows = ScoredSegments(torch.tensor([1, 2, 4], dtype=dtype), torch.zeros(3, dtype=torch.int32))
        assert rows.mean().dtype == torch.float64
        assert rows.mean().item() == 7 / 3

    def test_saturated(self):
        largest = torch.finfo(torch.float32).max
        result = saturated(torch.tensor([1e300, -torch.inf, NAN, 0.5], dtype=torch.float64))
        assert result.dtype == torch.float32
        assert result.tolist() == [largest, -largest, 0.0, 0.5]

    def test_the_input_is_not_changed(self):
        values = torch.tensor([1e300, 1.0], dtype=torch.float64)
        saturated(values)
        ScoredSegments(values, torch.zeros(2, dtype=torch.int64)).centred_scores()
        assert values.tolist() == [1e300, 1.0]


class TestLayouts:
    """Groups in order and of one size, any other partition, and very uneven ones take different paths."""

    @staticmethod
    def everything(rows, back=None):
        """Return all reductions; of a shuffled partition (`back` sorts it again) in the order of the sorted one."""
        back = torch.arange(len(rows.values)) if back is None else back
        per_row = [rows.rank()[back], rows.centred[back], rows.spread(rows.max())[back]]
        return [rows.count, rows.sum(), rows.mean(), rows.min(), rows.max(), rows.std(1), rows.median(), *per_row]

    @pytest.mark.parametrize("missing", [False, True])
    @pytest.mark.parametrize(
        "sizes",
        [[6] * 5, [1, 2, 3, 4, 20], [1] * 40 + [60], [1] * 7, [12]],
        ids=["even", "uneven", "skewed", "ones", "one"],
    )
    def test_agree(self, sizes, missing):
        generator = torch.Generator().manual_seed(0)
        segments = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        values = torch.randint(0, 5, segments.shape, generator=generator).double()
        if missing:
            values[torch.rand(values.shape, generator=generator) < 0.3] = NAN
        shuffle = torch.randperm(len(values), generator=generator)
        rows, shuffled = ScoredSegments(values, segments), ScoredSegments(values[shuffle], segments[shuffle])
        for one, other in zip(self.everything(rows), self.everything(shuffled, shuffle.argsort()), strict=True):
            torch.testing.assert_close(
                torch.where(rows.scored, one, 0) if one.shape == values.shape else one,
                torch.where(rows.scored, other, 0) if one.shape == values.shape else other,
            )

    def test_ranks_of_skewed_segments_equal_a_slow_count(self):
        segments = torch.cat([torch.arange(50), torch.full((70,), 50)])[torch.randperm(120)]
        values = torch.randint(0, 9, (120,)).float()
        same = segments[:, None] == segments
        below = (same & (values < values[:, None])).sum(dim=1)
        ties = (same & (values == values[:, None])).sum(dim=1)
        expected = below + (ties - 1) / 2
        assert ScoredSegments(values, segments).rank().tolist() == expected.tolist()


class TestDenseIds:
    @pytest.mark.parametrize(
        ("ids", "dense", "size"),
        [
            ([0, 1, 1, 2], [0, 1, 1, 2], 3),
            ([5, 0, 5, 3], [2, 0, 2, 1], 3),
            ([-1, 10**15, -1], [0, 1, 0], 2),
            ([], [], 0),
        ],
        ids=str,
    )
    def test_renumbered_in_order(self, ids, dense, size):
        result, count = dense_ids(torch.tensor(ids, dtype=torch.int64))
        assert (result.tolist(), count) == (dense, size)


class TestShapes:
    def test_values_and_segments_must_fit(self):
        with pytest.raises(ShapeError, match=r"must both be \(N,\), got \(3,\) and \(4,\)"):
            ScoredSegments(torch.zeros(3), torch.zeros(4, dtype=torch.int64))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
    def test_segments_must_hold_integers(self, dtype):
        with pytest.raises(ShapeError, match="segments must hold integers"):
            ScoredSegments(torch.zeros(3), torch.zeros(3, dtype=dtype))
