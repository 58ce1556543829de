"""Each strategy on small inputs, with the arithmetic that gives the expected values."""

from __future__ import annotations

import pytest
import torch

from tests.advantages.table import batch_of, one_segment
from trl_grpo_ext.advantages import (
    BatchWhiten,
    Chain,
    Clip,
    LeaveOneOut,
    MeanCentered,
    Mix,
    OptimalBaseline,
    PerReward,
    Rank,
    RobustZScore,
    Scale,
    ZScore,
)

NAN = float("nan")
WORKED = [1.0, 2.0, 4.0, 2.0]
"""Mean 9/4; deviations -1.25, -0.25, 1.75, -0.25; their squares sum to 1.5625 + 0.0625 + 3.0625 + 0.0625 = 4.75."""


def check(strategy, values, expected, lengths=None):
    lengths = None if lengths is None else torch.tensor(lengths)
    result = strategy.normalize(torch.tensor(values), one_segment(len(values)), lengths=lengths)
    torch.testing.assert_close(result, torch.tensor(expected), atol=1e-6, rtol=1e-5)


class TestZScore:
    def test_population_std(self):
        # std = sqrt(4.75 / 4) = 1.0897247; -1.25 / 1.0897247 = -1.1470787, and so on
        check(ZScore(ddof=0, eps=0.0), WORKED, [-1.1470787, -0.2294157, 1.6059101, -0.2294157])

    def test_defaults_are_sample_std_and_eps_1e_4(self):
        # std = sqrt(4.75 / 3) = 1.2583057; + 1e-4 = 1.2584057
        check(ZScore(), WORKED, [-0.9933204, -0.1986641, 1.3906486, -0.1986641])

    def test_eps_bounds_a_narrow_group(self):
        # mean 0.005, sample std sqrt(2 * 0.005**2) = 0.00707107: 0.005 / (0.00707107 + 0.1) = 0.0466980
        check(ZScore(eps=0.1), [0.0, 0.01], [-0.0466980, 0.0466980])

    def test_batch_scale(self):
        # Scores 0, 2 | 0, 10. All: mean 3, squares 9 + 1 + 9 + 49 = 68, std = sqrt(68 / 3) = 4.7609523.
        # Centred per group: -1, 1 | -5, 5.
        result = ZScore(scale="batch", eps=0.0)(batch_of([0.0, 2.0, 0.0, 10.0], 2)).advantages
        expected = torch.tensor([-1.0, 1.0, -5.0, 5.0]) / 4.7609523
        torch.testing.assert_close(result, expected)

    def test_batch_scale_takes_all_scored_rows(self):
        # The row alone in its segment gets 0, but its score counts in the std: scores 0, 2, 7, mean 3,
        # squares 9 + 1 + 16 = 26, std = sqrt(13) = 3.6055513.
        result = ZScore(scale="batch", eps=0.0).normalize(torch.tensor([0.0, 2.0, 7.0]), torch.tensor([4, 4, 5]))
        torch.testing.assert_close(result, torch.tensor([-1 / 3.6055513, 1 / 3.6055513, 0.0]))


class TestBaselines:
    def test_mean_centered(self):
        check(MeanCentered(), WORKED, [-1.25, -0.25, 1.75, -0.25])

    def test_leave_one_out(self):
        # 1 - (2 + 4 + 2)/3 = -5/3;  2 - (1 + 4 + 2)/3 = -1/3;  4 - (1 + 2 + 2)/3 = 7/3
        check(LeaveOneOut(), WORKED, [-5 / 3, -1 / 3, 7 / 3, -1 / 3])

    def test_optimal_baseline(self):
        # (10*1 + 30*0 + 60*2) / (10 + 30 + 60) = 130 / 100 = 1.3
        check(OptimalBaseline(), [1.0, 0.0, 2.0], [-0.3, -1.3, 0.7], lengths=[10, 30, 60])

    def test_optimal_baseline_leaves_out_unscored_rows(self):
        # (10*1 + 60*2) / 70 = 13/7
        check(OptimalBaseline(), [1.0, NAN, 2.0], [-6 / 7, 0.0, 1 / 7], lengths=[10, 30, 60])

    @pytest.mark.parametrize("lengths", [[0, 0, 0], None])
    def test_optimal_baseline_without_lengths_is_the_mean(self, lengths):
        check(OptimalBaseline(), [1.0, 0.0, 2.0], [0.0, -1.0, 1.0], lengths=lengths)


class TestRank:
    def test_ties_share_the_mean_rank(self):
        # 0-based ranks 0, (1 + 2)/2, 3, (1 + 2)/2; over 3; minus 1/2
        check(Rank(), WORKED, [-0.5, 0.0, 0.5, 0.0])

    def test_binary(self):
        # Three zeros share rank (0 + 1 + 2)/3 = 1, two ones (3 + 4)/2 = 3.5: 1/4 - 1/2 and 3.5/4 - 1/2
        check(Rank(), [0.0, 1.0, 0.0, 1.0, 0.0], [-0.25, 0.375, -0.25, 0.375, -0.25])

    def test_scale_does_not_matter(self):
        check(Rank(), [1e-6, 0.0, 1e30], [0.0, -0.5, 0.5])


class TestRobustZScore:
    def test_even_count(self):
        # Median (2 + 3)/2 = 2.5; distances 1.5, 0.5, 0.5, 97.5: MAD (0.5 + 1.5)/2 = 1; scale 1.4826
        values = [-1.5 / 1.4826, -0.5 / 1.4826, 0.5 / 1.4826, 97.5 / 1.4826]
        check(RobustZScore(eps=0.0), [1.0, 2.0, 3.0, 100.0], values)

    def test_odd_count_and_eps(self):
        # Median 1; distances 1, 0, 4: MAD 1; scale 1.4826 + 1e-4
        check(RobustZScore(), [0.0, 1.0, 5.0], [-1 / 1.4827, 0.0, 4 / 1.4827])

    def test_more_than_half_equal(self):
        # Median 0; distances 0, 0, 0, 4: MAD 0, mean 1, so the scale is 1.2533 * 1
        check(RobustZScore(eps=0.0), [0.0, 0.0, 4.0, 0.0], [0.0, 0.0, 4 / 1.2533, 0.0])

    def test_unscored_rows_are_no_values(self):
        check(RobustZScore(eps=0.0), [NAN, 0.0, 1.0, 5.0], [0.0, -1 / 1.4826, 0.0, 4 / 1.4826])


class TestPerReward:
    """Function a: 0, 2, 0, 2, mean 1, centred -1, 1, -1, 1. Function b: -, 5, 1, 3, mean 3, centred -, 2, -2, 0."""

    rewards = ((0.0, None), (2.0, 5.0), (0.0, 1.0), (2.0, 3.0))

    def check(self, strategy, expected, weights=(1.0, 1.0)):
        result = strategy(batch_of(list(self.rewards), 4, weights=list(weights))).advantages
        torch.testing.assert_close(result, torch.tensor(expected))

    def test_weighted_sum_of_columns(self):
        # -1 + 0, 1 + 0.5*2, -1 - 0.5*2, 1 + 0
        self.check(PerReward(MeanCentered(), whiten=False), [-1.0, 2.0, -2.0, 1.0], weights=(1.0, 0.5))

    def test_whitened(self):
        # As above: mean 0, squares 1 + 4 + 4 + 1 = 10, std = sqrt(10 / 3) = 1.8257419
        expected = [-1 / 1.8257419, 2 / 1.8257419, -2 / 1.8257419, 1 / 1.8257419]
        self.check(PerReward(MeanCentered(), eps=0.0), expected, weights=(1.0, 0.5))

    def test_one_strategy_by_name(self):
        # b by rank: 5, 1, 3 get 0.5, -0.5, 0
        strategy = PerReward(MeanCentered(), strategies={"b": Rank()}, whiten=False)
        self.check(strategy, [-1.0, 1.5, -1.5, 1.0])

    def test_zscore_defaults(self):
        # a: std = sqrt(4/3) = 1.1547005, z = +-0.8660 (1 / 1.1548005 = 0.8659504);
        # b: std = sqrt((4 + 4 + 0)/2) = 2, z = 2 / 2.0001 = 0.9999500
        self.check(PerReward(whiten=False), [-0.8659504, 1.8659004, -1.8659004, 0.8659504])


class TestCombinations:
    def test_mix(self):
        # 1.0 * rank + 0.5 * centred: -0.5 - 0.625, 0 - 0.125, 0.5 + 0.875, 0 - 0.125
        mix = Mix(parts=[(1.0, Rank()), (0.5, MeanCentered())])
        check(mix, WORKED, [-1.125, -0.125, 1.375, -0.125])

    def test_clip(self):
        check(Chain(MeanCentered(), transforms=[Clip(1.0)]), WORKED, [-1.0, -0.25, 1.0, -0.25])

    def test_order_of_transforms(self):
        check(Chain(MeanCentered(), transforms=[Clip(1.0), Scale(2.0)]), WORKED, [-2.0, -0.5, 2.0, -0.5])
        check(Chain(MeanCentered(), transforms=[Scale(2.0), Clip(1.0)]), WORKED, [-1.0, -0.5, 1.0, -0.5])

    def test_batch_whiten(self):
        # Clipped and doubled: -2, -0.5, 2, -0.5; mean -1/4; deviations -1.75, -0.25, 2.25, -0.25;
        # squares 3.0625 + 0.0625 + 5.0625 + 0.0625 = 8.25; std = sqrt(8.25 / 3) = 1.6583124
        chain = Chain(MeanCentered(), transforms=[Clip(1.0), Scale(2.0), BatchWhiten(eps=0.0)])
        check(chain, WORKED, [-1.0552896, -0.1507557, 1.3568010, -0.1507557])

    def test_whitening_makes_no_signal(self):
        # Segment 0 is -2, 1, 1, clipped -1, 1, 1. Segment 1 is constant and stays exactly 0, though its zeros count:
        # -1, 1, 1, 0, 0 have mean 0.2, squares 1.44 + 2 * 0.64 + 2 * 0.04 = 2.8, std sqrt(2.8 / 4) = sqrt(0.7)
        chain = Chain(MeanCentered(), transforms=[Clip(1.0), BatchWhiten(eps=0.0)])
        values, segments = torch.tensor([0.0, 3.0, 3.0, 7.0, 7.0, NAN]), torch.tensor([0, 0, 0, 1, 1, 1])
        expected = torch.tensor([-1.2 / 0.7**0.5, 0.8 / 0.7**0.5, 0.8 / 0.7**0.5, 0.0, 0.0, 0.0])
        torch.testing.assert_close(chain.normalize(values, segments), expected)

    def test_whitening_equal_advantages_gives_zeros(self):
        check(Chain(MeanCentered(), transforms=[Scale(0.0), BatchWhiten(eps=0.0)]), WORKED, [0.0, 0.0, 0.0, 0.0])
