"""Length buckets: assignment, edges, the merge rule and both scopes, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tests.advantages.table import batch_of, one_segment
from trl_grpo_ext.advantages import LengthBucketed, MeanCentered, PerReward, Rank, ZScore
from trl_grpo_ext.errors import ShapeError
from trl_grpo_ext.functional.buckets import length_cells, merged_columns


def cells(lengths, values=None, scopes=None, **settings):
    """Return the cells as sets of lengths, by shortest first."""
    lengths = torch.tensor(lengths)
    values = torch.ones(len(lengths)) if values is None else torch.tensor(values)
    split = length_cells(values, one_segment(len(lengths)) if scopes is None else scopes, lengths, **settings)
    rows = [(split.cells == cell) & split.scored for cell in split.cells[split.scored].unique()]
    return sorted(lengths[row].tolist() for row in rows)


class TestAssignment:
    def test_two_quantile_buckets(self):
        # r = 0, 1, 2, 3, 4 and n = 5: floor(2r/5) = 0, 0, 0, 1, 1
        assert cells([50, 10, 40, 20, 30], buckets=2) == [[10, 20, 30], [50, 40]]

    def test_three_quantile_buckets(self):
        # floor(3r/5) = 0, 0, 1, 1, 2
        assert cells([10, 20, 30, 40, 50], buckets=3) == [[10, 20], [30, 40], [50]]

    def test_equal_lengths_share_a_rank(self):
        # r = 0, 1.5, 1.5, 3: floor(2r/4) = 0, 0, 0, 1
        assert cells([10, 20, 20, 30], buckets=2) == [[10, 20, 20], [30]]
        # r = 0.5, 0.5, 2.5, 2.5: floor(4r/4) = 0, 0, 2, 2; bucket 1 and 3 are empty
        assert cells([10, 10, 20, 20], buckets=4) == [[10, 10], [20, 20]]

    def test_all_equal_is_one_bucket(self):
        # r = 1.5: floor(2 * 1.5 / 4) = 0
        assert cells([7, 7, 7, 7], buckets=2) == [[7, 7, 7, 7]]

    def test_a_quotient_that_is_whole_is_exact(self):
        # n = 10, K = 10: floor(10 r / 10) = r, though r / 10 is not exact in binary
        assert cells(list(range(10)), buckets=10) == [[length] for length in range(10)]

    def test_only_scored_rows_count(self):
        # Without the unscored 10: n = 3, r = 0, 1, 2: floor(2r/3) = 0, 0, 1. With it, 20 and 30 would be apart.
        assert cells([10, 20, 30, 40], [math.nan, 1.0, 2.0, 3.0], buckets=2) == [[20, 30], [40]]

    @pytest.mark.parametrize("buckets", [6, 7, 10**9, 10**30])
    def test_more_buckets_than_rows_tell_all_lengths_apart(self, buckets):
        # r = 0, 1.5, 1.5, 3, 4 and n = 5, K >= 5: K/n >= 1, so that different ranks never meet
        assert cells([10, 20, 20, 30, 40], buckets=buckets) == [[10], [20, 20], [30], [40]]

    def test_groups_are_cut_by_themselves(self):
        scopes = torch.tensor([5, 5, -1, -1])
        assert cells([1, 2, 100, 200], scopes=scopes, buckets=2) == [[1], [2], [100], [200]]

    def test_edges_belong_to_the_shorter_bucket(self):
        # len <= 10; 10 < len <= 20; len > 20
        assert cells([0, 10, 11, 20, 21, 900], edges=[10, 20]) == [[0, 10], [11, 20], [21, 900]]

    def test_buckets_without_rows_do_not_matter(self):
        assert cells([1, 2, 300], edges=[10, 20, 30]) == [[1, 2], [300]]


class TestMergeRule:
    edges = (10, 20, 30)

    def merged(self, lengths, min_size=2):
        return cells(lengths, edges=self.edges, min_size=min_size, merge=True)

    def test_joins_the_neighbour_with_the_nearest_mean(self):
        # Means 1.5 | 19 | 21.5: 19 is 17.5 from the shorter, 2.5 from the longer
        assert self.merged([1, 2, 19, 21, 22]) == [[1, 2], [19, 21, 22]]

    def test_equal_distances_go_to_the_shorter(self):
        # Means 6 | 15 | 24: both 9 away
        assert self.merged([5, 7, 15, 23, 25]) == [[5, 7, 15], [23, 25]]

    def test_equal_distances_that_are_no_binary_fractions(self):
        # Means 10/3 (six rows) | 20/3 (three rows) | 10 (four rows): both 10/3 away, though not in floating point
        lengths = [3, 3, 4, 3, 3, 4, 6, 7, 7, 10, 10, 10, 10]
        result = cells(lengths, edges=[5, 8], min_size=4, merge=True)
        assert result == [[3, 3, 4, 3, 3, 4, 6, 7, 7], [10, 10, 10, 10]]

    def test_smallest_cell_goes_first(self):
        # Sizes 2 | 1 | 3, min_size 3. The single 18 goes first: means 9.5, 18, 25: 8.5 to the shorter, 7 to the longer.
        # Then {9, 10} joins what is left. Had {9, 10} gone first, it would have met 18, and {9, 10, 18} been enough.
        assert self.merged([9, 10, 18, 24, 25, 26], min_size=3) == [[9, 10, 18, 24, 25, 26]]

    def test_of_equally_small_cells_the_shorter_goes_first(self):
        # Sizes 2 | 1 | 1 | 2, means 5, 12, 21, 35. 12 goes before 21: 7 to the shorter, 9 to the longer -> {4, 6, 12}.
        # Then 21: mean of {4, 6, 12} is 22/3, 13.67 away; 35 is 14 away -> {4, 6, 12, 21}.
        assert self.merged([4, 6, 12, 21, 34, 36]) == [[4, 6, 12, 21], [34, 36]]

    def test_mean_of_a_merged_cell_is_over_all_its_rows(self):
        # Sizes 3 | 1 | 1 | 2, means 0, 11, 25, 33. 11 goes first: 11 to the shorter, 14 to the longer -> {0, 0, 0, 11}.
        # Then 25: the merged mean is 11/4 = 2.75 (22.25 away); 33 is 8 away.
        assert self.merged([0, 0, 0, 11, 25, 32, 34]) == [[0, 0, 0, 11], [25, 32, 34]]

    def test_one_cell_may_remain_too_small(self):
        split = length_cells(torch.ones(2), one_segment(2), torch.tensor([1, 15]), edges=[10], min_size=5, merge=True)
        assert split.cells.unique().numel() == 1
        assert split.small.all()
        assert split.joined.all()

    def test_scored_rows_count(self):
        # {1, 2} holds one scored row (2) and joins 15; its mean is 2
        assert cells([1, 2, 15, 16], [math.nan, 1.0, 1.0, 1.0], edges=[10], min_size=2, merge=True) == [[2, 15, 16]]

    def test_scopes_do_not_mix(self):
        scopes = torch.tensor([0, 0, 0, 1, 1, 1])
        assert cells([1, 15, 16, 2, 3, 17], scopes=scopes, edges=[10], min_size=2, merge=True) == [
            [1, 15, 16],
            [2, 3, 17],
        ]

    def test_many_rounds(self):
        # Ten cells of one row each, at 0, 1, 3, 6, 10, ...: with min_size 10 nine merges leave one
        count = torch.ones(3, 10, dtype=torch.float64)
        total = torch.arange(10, dtype=torch.float64).cumsum(0).expand(3, 10)
        assert merged_columns(count, total, min_size=10).unique(dim=1).shape == (3, 1)


class TestScopes:
    """Group 0: scores 0, 4, 4, 4 with lengths 1, 2, 101, 102. Group 1: constant, lengths 3, 4, 103, 104."""

    batch = batch_of([0.0, 4.0, 4.0, 4.0, 1.0, 1.0, 1.0, 1.0], 4, lengths=[1, 2, 101, 102, 3, 4, 103, 104])

    def check(self, strategy, expected):
        torch.testing.assert_close(strategy(self.batch).advantages, torch.tensor(expected))

    def test_group(self):
        # Group 0: {0, 4} has mean 2; {4, 4} is constant. Group 1 is constant.
        self.check(LengthBucketed(MeanCentered()), [-2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])

    def test_batch(self):
        # Group 0 minus its mean 3: -3, 1, 1, 1; group 1: zeros. Ranks by length: 1, 2, 3, 4 are 0..3, n = 8, K = 2.
        # Short bucket: -3, 1, 0, 0, mean -0.5. Long bucket: 1, 1, 0, 0, mean 0.5.
        strategy = LengthBucketed(MeanCentered(), scope="batch")
        self.check(strategy, [-2.5, 1.5, 0.5, 0.5, 0.5, 0.5, -0.5, -0.5])

    def test_batch_zeroes_constant_groups_exactly(self):
        # Group 1's scores differ by roundings only: as exact zeros they tie, and share a rank
        rewards = self.batch.rewards.clone()
        rewards[4:, 0] = torch.tensor([0.1, 0.1 + 2**-27, 0.1, 0.1 + 2**-27])
        result = LengthBucketed(Rank(), scope="batch")(batch_of(rewards, 4, lengths=self.batch.lengths)).advantages
        # Short bucket: -3, 1, 0, 0 have ranks 0, 3, 1.5, 1.5; long bucket: 1, 1, 0, 0 have 2.5, 2.5, 0.5, 0.5.
        # Over 3, minus 1/2.
        expected = [-0.5, 0.5, 1 / 3, 1 / 3, 0.0, 0.0, -1 / 3, -1 / 3]
        torch.testing.assert_close(result, torch.tensor(expected))

    def test_batch_ties_across_groups(self):
        """Centred scores that differ by the rounding of two means only are tied."""
        rewards = torch.tensor([0.1, 0.2, 0.6, 0.7, 0.9, 1.1, 0.1, 0.2, 0.6]).double()
        rewards = torch.cat([rewards, rewards.roll(4)])  # the same scores in another order
        strategy = LengthBucketed(Rank(), scope="batch", buckets=1)
        result = strategy(batch_of(rewards, 9)).advantages
        assert torch.equal(result[:9], result[9:].roll(-4))

    def test_zero_small_cells(self):
        # n = 5, K = 2: floor(2r/5) = 0, 0, 0, 1, 1. min_size 3: the long cell is too small.
        strategy = LengthBucketed(MeanCentered(), min_size=3, small="zero")
        output = strategy(batch_of([0.0, 1.0, 2.0, 5.0, 9.0], 5, lengths=[1, 2, 3, 4, 5]))
        assert output.advantages.tolist() == [-1.0, 0.0, 1.0, 0.0, 0.0]
        assert output.metrics["zeroed_fraction"] == pytest.approx(2 / 5)
        assert output.metrics["merged_fraction"] == 0

    def test_merge_small_cells(self):
        strategy = LengthBucketed(MeanCentered(), min_size=3)
        output = strategy(batch_of([0.0, 1.0, 2.0, 5.0, 7.0], 5, lengths=[1, 2, 3, 4, 5]))
        assert output.advantages.tolist() == [-3.0, -2.0, -1.0, 2.0, 4.0]
        assert output.metrics["merged_fraction"] == 1
        assert output.metrics["zeroed_fraction"] == 0

    def test_length_alone_earns_nothing(self):
        lengths = torch.tensor([10, 10, 10, 10, 90, 90, 90, 90])
        rewards = lengths / 90.0
        assert ZScore()(batch_of(rewards, 8, lengths=lengths)).advantages[4:].min() > 0.9
        assert LengthBucketed()(batch_of(rewards, 8, lengths=lengths)).advantages.abs().max() == 0


class TestMetrics:
    def test_are_no_more_than_rows(self):
        output = LengthBucketed(buckets=10**30, min_size=10**30)(batch_of([1.0, 2.0, 5.0], lengths=[1, 2, 3]))
        assert output.metrics["merged_fraction"] == 1.0  # and the smallest cell is never large enough
        assert [name for name in output.metrics if name.startswith("bucket_")] == [f"bucket_{k}_size" for k in range(3)]

    def test_bucket_sizes_are_scored_rows_before_merging(self):
        batch = batch_of([1.0, None, 3.0, 0.0, 1.0, 2.0, 5.0, 0.0], 4, lengths=[1, 1, 50, 60, 2, 70, 80, 90])
        metrics = LengthBucketed(edges=[10, 65])(batch).metrics
        # len <= 10: 1 and 2; 10..65: 50 and 60; beyond: 70, 80, 90
        assert [metrics[f"bucket_{k}_size"] for k in range(3)] == [2.0, 2.0, 3.0]
        # Group 0: {1} joins {50, 60}: all three rows. Group 1: {2} joins {70, 80, 90}: all four.
        assert metrics["merged_fraction"] == 1.0

    def test_constant_cells(self):
        batch = batch_of([1.0, 1.0, 3.0, 0.0], 4, lengths=[1, 2, 50, 60])
        metrics = LengthBucketed()(batch).metrics
        assert metrics["constant_cells"] == 0.5
        assert metrics["constant_groups"] == 0.0


def test_lengths_must_fit():
    with pytest.raises(ShapeError, match=r"`lengths` must be \(4,\) as the values, got \(3,\)"):
        LengthBucketed().normalize(torch.zeros(4), one_segment(4), lengths=torch.ones(3))


def test_without_lengths_all_rows_share_a_bucket():
    values = torch.tensor([1.0, 2.0, 4.0, 2.0])
    assert torch.equal(
        LengthBucketed(Rank()).normalize(values, one_segment(4)), Rank().normalize(values, one_segment(4))
    )


def test_inner_per_reward_sees_columns_within_cells():
    # Short: column a 0, 2 and b 5, 5; long: a 4, 8 and b 1, 3. Centred within cells: a -1, 1, -2, 2 and b 0, 0, -1, 1.
    batch = batch_of([[0.0, 5.0], [2.0, 5.0], [4.0, 1.0], [8.0, 3.0]], 4, lengths=[1, 2, 30, 40])
    result = LengthBucketed(PerReward(MeanCentered(), whiten=False))(batch).advantages
    assert result.tolist() == [-1.0, 1.0, -3.0, 3.0]


def test_inner_per_reward_sees_columns_centred_by_group():
    # One bucket over the batch. Group 0: a 0, 2 -> -1, 1; group 1: a 10, 14 -> -2, 2. Within the bucket: mean 0.
    batch = batch_of([[0.0, 7.0], [2.0, 7.0], [10.0, 8.0], [14.0, 8.0]], 2)
    result = LengthBucketed(PerReward(MeanCentered(), whiten=False), buckets=1, scope="batch")(batch).advantages
    assert result.tolist() == [-1.0, 1.0, -2.0, 2.0]
