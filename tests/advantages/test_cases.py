"""What users of GRPO trainers have run into, for every strategy."""

from __future__ import annotations

import pytest
import torch

from tests.advantages.table import TABLE, batch_of, one_segment
from trl_grpo_ext.advantages import LeaveOneOut, MeanCentered, PerReward, Rank, ZScore
from trl_grpo_ext.errors import ShapeError

every_strategy = pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)


@every_strategy
def test_a_reward_function_that_is_silent_for_the_whole_batch(row):
    """Two functions, one returns None for everything: finite, and the other one's signal is kept."""
    lengths = [5, 5, 40, 40] * 4
    first = [1.0, 0.0, 3.0, 2.0, 0.0, 1.0, 2.0, 3.0] * 2
    output = row.strategy(batch_of([[score, None] for score in first], 16, lengths=lengths, training=False))
    assert output.advantages.isfinite().all()
    assert output.advantages.abs().sum() > 0


@every_strategy
def test_a_row_that_no_function_scored(row):
    """`[1, None, 0, 0]`: the baseline is over three values, and that row is exactly 0."""
    result = row.strategy.normalize(torch.tensor([1.0, torch.nan, 0.0, 0.0]), one_segment(4))
    alone = row.strategy.normalize(torch.tensor([1.0, 0.0, 0.0]), one_segment(3))
    assert result[1] == 0
    torch.testing.assert_close(result[[0, 2, 3]], alone)


def test_a_row_that_no_function_scored_by_hand():
    # Mean of 1, 0, 0 is 1/3
    result = MeanCentered()(batch_of([1.0, None, 0.0, 0.0])).advantages
    torch.testing.assert_close(result, torch.tensor([2 / 3, 0.0, -1 / 3, -1 / 3]))


def test_group_and_batch_scale_differ_on_two_spreads():
    # Groups 0, 2 and 0, 10: sample stds sqrt(2) and sqrt(50); over the batch sqrt(68 / 3) = 4.7609523
    batch = batch_of([0.0, 2.0, 0.0, 10.0], 2)
    group = torch.tensor([-1.0, 1.0, -5.0, 5.0]) / torch.tensor([2.0, 2.0, 50.0, 50.0]).sqrt()
    torch.testing.assert_close(ZScore(eps=0.0)(batch).advantages, group)
    torch.testing.assert_close(
        ZScore(eps=0.0, scale="batch")(batch).advantages, torch.tensor([-1.0, 1.0, -5.0, 5.0]) / 4.7609523
    )


@every_strategy
def test_all_negative_rewards_keep_the_best_on_top(row):
    rewards = torch.tensor([-9.0, -1.0, -4.0, -25.0, -2.0, -30.0, -7.0, -8.0])
    result = row.strategy(batch_of(rewards, 4, training=False)).advantages.view(2, 4)
    assert (result.argmax(dim=1) == rewards.view(2, 4).argmax(dim=1)).all()
    assert (result.amax(dim=1) > 0).all()


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0, 0.0, 0.0], [1.0, -1 / 3, -1 / 3, -1 / 3]),
        # 0 - 0.95;  0.95 - 6 * 0.95 / 7 = 0.95 / 7
        ([0.0] + [0.95] * 7, [-0.95] + [0.95 / 7] * 7),
    ],
    ids=["one right", "one wrong"],
)
def test_leave_one_out_has_no_float32_residue(rewards, expected):
    result = LeaveOneOut()(batch_of(rewards)).advantages
    torch.testing.assert_close(result, torch.tensor(expected), rtol=1e-6, atol=0)


@every_strategy
@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.0, 0.0], [0.0] + [0.95] * 7])
def test_near_constant_groups_stay_bounded(row, rewards):
    assert row.strategy.normalize(torch.tensor(rewards), one_segment(len(rewards))).abs().max() < 10


@every_strategy
def test_minus_infinity_is_no_score(row):
    """`[-inf, 0, 0, 1]`: no 3.4e38 anywhere."""
    result = row.strategy(batch_of([-torch.inf, 0.0, 0.0, 1.0], training=False)).advantages
    assert result[0] == 0
    assert result.abs().max() < 10


def test_minus_infinity_by_hand():
    # Ranks of 0, 0, 1: 0.5, 0.5, 2 over 2
    assert Rank()(batch_of([-torch.inf, 0.0, 0.0, 1.0])).advantages.tolist() == [0.0, -0.25, -0.25, 0.5]


def test_a_partition_that_does_not_divide_is_an_error():
    with pytest.raises(ShapeError, match="6 rows do not divide by num_generations=4"):
        batch_of([0.0] * 6, 4)
    assert issubclass(ShapeError, ValueError)


@every_strategy
def test_evaluation_with_groups_of_one(row):
    """Training with G=8, evaluation with `num_generations_eval=1`."""
    output = row.strategy(batch_of([0.0, 1.0, 5.0, -2.0], 1, lengths=[1, 2, 3, 4], training=False))
    assert output.advantages.tolist() == [0.0] * 4
    assert all(torch.tensor(value).isfinite() for value in output.metrics.values())


@every_strategy
@pytest.mark.parametrize("spread", [1e-2, 1e-3, 1e-5])
def test_a_narrow_spread_does_not_explode(row, spread):
    """Scores within a hair of each other: at most a few standard deviations."""
    rewards = torch.linspace(0.5, 0.5 + spread, 8)
    assert row.strategy.normalize(rewards, one_segment(8)).abs().max() < 5


def test_functions_of_different_scale_count_alike_per_reward():
    # The large function hides the small one in a sum; normalised on their own, both count alike.
    rewards = [[0.0, 100.0], [1.0, 0.0], [1.0, 0.0], [0.0, 100.0]]
    assert ZScore()(batch_of(rewards)).advantages[0] > 0
    torch.testing.assert_close(PerReward("rank")(batch_of(rewards)).advantages, torch.zeros(4))
