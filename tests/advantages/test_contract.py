"""The eight rules of the advantage contract, for every strategy of one table."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
import torch

import trl_grpo_ext.advantages
from tests.advantages.table import TABLE, batch_of, one_segment
from trl_grpo_ext._strategy import kinds
from trl_grpo_ext.advantages import Adaptive, Chain, Transform
from trl_grpo_ext.specs import from_spec, to_spec

FLOAT32_MAX = torch.finfo(torch.float32).max

every_strategy = pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)


@pytest.fixture
def strategy(row):
    """A fresh copy, so that no test sees the state of another."""
    return from_spec(to_spec(row.strategy), family="advantage")


def scores(groups: int, size: int, seed: int = 0) -> torch.Tensor:
    """Return scores on a coarse grid, so that there are ties."""
    return torch.randint(-4, 9, (groups * size,), generator=torch.Generator().manual_seed(seed)).float() / 4


def some_lengths(n: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, 65, (n,), generator=torch.Generator().manual_seed(seed))


def test_the_table_covers_every_exported_kind():
    in_table = {type(row.strategy) for row in TABLE.values()}
    assert in_table == set(kinds("advantage").values())
    chained = {type(t) for row in TABLE.values() if isinstance(row.strategy, Chain) for t in row.strategy.transforms}
    assert chained == set(kinds("transform").values())


@every_strategy
class TestMissingScores:
    def test_row_without_score_is_zero_and_touches_nobody(self, row, strategy):
        values, lengths, segments = scores(3, 6), some_lengths(18), torch.arange(18) // 6
        values[[2, 9, 10]] = torch.nan
        there = values.isfinite()
        result = strategy.normalize(values, segments, lengths=lengths)
        alone = strategy.normalize(values[there], segments[there], lengths=lengths[there])
        assert (result[~there] == 0).all()
        torch.testing.assert_close(result[there], alone)

    def test_row_without_score_in_a_batch(self, row, strategy):
        rewards, lengths = torch.stack([scores(2, 4), scores(2, 4, 5)], dim=1), some_lengths(8)
        rewards[1] = torch.nan
        result = strategy(batch_of(rewards, 4, lengths=lengths, training=False)).advantages
        assert result[1] == 0
        changed = lengths.clone()
        changed[1] = 10_000
        torch.testing.assert_close(result, strategy(batch_of(rewards, 4, lengths=changed, training=False)).advantages)

    @pytest.mark.parametrize("infinite", [torch.inf, -torch.inf])
    def test_infinite_cell_counts_as_missing(self, row, strategy, infinite):
        rewards = torch.stack([scores(2, 4), scores(2, 4, 5)], dim=1)
        rewards[0, 0] = rewards[5, 1] = rewards[6] = infinite
        missing = torch.where(rewards.isinf(), torch.nan, rewards)
        result = strategy(batch_of(rewards, 4, lengths=some_lengths(8), training=False)).advantages
        expected = strategy(batch_of(missing, 4, lengths=some_lengths(8), training=False)).advantages
        assert torch.equal(result, expected)
        assert result[6] == 0

    def test_nothing_scored(self, row, strategy):
        result = strategy(batch_of([None] * 8, 4))
        assert torch.equal(result.advantages, torch.zeros(8))


@every_strategy
class TestSegmentsWithoutSignal:
    @pytest.mark.parametrize("level", [0.1, -1e-3, 12_345.678, 3e38])
    def test_constant_up_to_float32_rounding_is_exactly_zero(self, row, strategy, level):
        values = torch.tensor([level] * 4)
        for step in range(4):  # each row one unit in the last place above the one before
            values[step:] = torch.nextafter(values[step:], torch.tensor(torch.inf)) if step else values[step:]
        assert torch.equal(strategy.normalize(values, one_segment(4)), torch.zeros(4))

    def test_constant_group_beside_live_ones(self, row, strategy):
        if row.across_groups:
            pytest.skip("compares rows of different groups: a constant group counts as average")
        rewards = torch.cat([torch.full((8,), 0.3), scores(2, 8)])
        result = strategy(batch_of(rewards, 8, lengths=some_lengths(24))).advantages
        assert torch.equal(result[:8], torch.zeros(8))
        assert (result[8:].view(2, 8) != 0).any(dim=1).all()

    def test_just_beyond_the_tolerance_is_not_constant(self, row, strategy):
        values = torch.tensor([1.0, 1.0, 1.0 + 6 * 2.0**-23, 1.0 + 6 * 2.0**-23])
        assert strategy.normalize(values, one_segment(4)).abs().max() > 0

    def test_fewer_than_two_scored_rows(self, row, strategy):
        values = torch.tensor([1.0, torch.nan, 3.0, torch.nan, torch.nan])
        result = strategy.normalize(values, torch.tensor([0, 0, 1, 2, 2]))
        assert torch.equal(result, torch.zeros(5))

    def test_empty(self, row, strategy):
        output = strategy(batch_of(torch.zeros(0, 2), 4))
        assert output.advantages.shape == (0,)
        assert output.advantages.dtype == torch.float32
        assert strategy.normalize(torch.zeros(0), one_segment(0)).shape == (0,)


@every_strategy
class TestNumbers:
    @pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
    def test_any_integer_segments(self, row, strategy, dtype):
        values, segments = scores(4, 5), torch.arange(20) // 5
        expected = strategy.normalize(values, segments, lengths=some_lengths(20))
        assert torch.equal(strategy.normalize(values, segments.to(dtype), lengths=some_lengths(20)), expected)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_any_float_in_float32_out(self, row, strategy, dtype):
        values, segments = scores(4, 5), torch.arange(20) // 5  # quarters: exact in every dtype
        expected = strategy.normalize(values, segments, lengths=some_lengths(20))
        result = strategy.normalize(values.to(dtype), segments, lengths=some_lengths(20))
        assert result.dtype == torch.float32
        assert torch.equal(result, expected)
        output = strategy(batch_of(values.to(dtype), 5))
        assert output.advantages.dtype == torch.float32

    @pytest.mark.parametrize(
        "values",
        [
            [FLOAT32_MAX, -FLOAT32_MAX, FLOAT32_MAX, 0.0],
            [1e-45, 0.0, 0.0, 1e-38],
            [torch.inf, 1.0, -torch.inf, torch.nan],
            [FLOAT32_MAX, 1.0, 2.0, torch.nan],
        ],
        ids=["largest", "denormal", "not numbers", "one outlier"],
    )
    def test_extremes_stay_finite(self, row, strategy, values):
        rewards = torch.tensor([*values, 0.0, 1.0, 1.0, 0.0])
        assert strategy.normalize(rewards, torch.arange(8) // 4).isfinite().all()
        two = batch_of(torch.stack([rewards, rewards], dim=1), 4, lengths=some_lengths(8))  # the sum overflows float32
        output = strategy(two)
        assert output.advantages.isfinite().all()
        assert all(torch.tensor(value).isfinite() for value in output.metrics.values())

    def test_large_offset_loses_no_digits(self, row, strategy):
        values, segments, lengths = scores(4, 5), torch.arange(20) // 5, some_lengths(20)
        shifted = strategy.normalize(values + 2.0**12, segments, lengths=lengths)  # exact in float32
        torch.testing.assert_close(shifted, strategy.normalize(values, segments, lengths=lengths))


@every_strategy
class TestSymmetry:
    @pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 16, 64])
    def test_any_group_size(self, row, strategy, size):
        values = scores(3, size)
        output = strategy(batch_of(values, size, lengths=some_lengths(3 * size)))
        assert output.advantages.shape == (3 * size,)
        assert output.advantages.isfinite().all()
        if row.sums_to_zero:
            sums = output.advantages.view(3, size).sum(dim=1)
            torch.testing.assert_close(sums, torch.zeros(3), atol=1e-4, rtol=0)

    def test_permuted_rows_permute_the_output(self, row, strategy):
        values, lengths, segments = scores(3, 8), some_lengths(24), torch.arange(24) // 8
        order = torch.randperm(24, generator=torch.Generator().manual_seed(3))  # scatters the segments too
        expected = strategy.normalize(values, segments, lengths=lengths)[order]
        result = strategy.normalize(values[order], segments[order], lengths=lengths[order])
        torch.testing.assert_close(result, expected)

    def test_segment_ids_are_only_names(self, row, strategy):
        values, lengths = scores(3, 4), some_lengths(12)
        expected = strategy.normalize(values, torch.arange(12) // 4, lengths=lengths)
        names = torch.tensor([2**40, -7, 999])
        assert torch.equal(strategy.normalize(values, names[torch.arange(12) // 4], lengths=lengths), expected)

    def test_segments_of_any_size(self, row, strategy):
        sizes = torch.tensor([1, 2, 3, 40, 5, 1])
        segments = torch.repeat_interleave(torch.tensor([9, -3, 4, 0, 77, 2]), sizes)
        values = scores(1, 52)
        result = strategy.normalize(values, segments, lengths=some_lengths(52))
        assert result.isfinite().all()
        if not row.across_groups:
            assert (result[segments == 9] == 0).all()

    def test_adding_a_constant_to_a_segment_changes_nothing(self, row, strategy):
        if not row.shift_invariant:
            pytest.skip("the std over the batch contains the difference between groups")
        values, lengths, segments = scores(3, 6), some_lengths(18), torch.arange(18) // 6
        shifted = values + torch.tensor([10.0, -3.0, 0.0])[segments]
        expected = strategy.normalize(values, segments, lengths=lengths)
        torch.testing.assert_close(strategy.normalize(shifted, segments, lengths=lengths), expected)

    def test_better_never_gets_less(self, row, strategy):
        """All of one length: length-aware strategies promise this within a bucket."""
        values = scores(4, 8, seed=2) - 5  # all negative
        advantages = strategy(batch_of(values, 8)).advantages.view(4, 8)
        for group, result in zip(values.view(4, 8), advantages, strict=True):
            assert (result[group.argsort()].diff() >= 0).all()
            assert result[group.argmax()] == result.max()


@every_strategy
class TestObject:
    def test_frozen_dataclass(self, row, strategy):
        field = dataclasses.fields(strategy)[0].name if dataclasses.fields(strategy) else "anything"
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(strategy, field, 1)

    def test_keyword_only_but_for_the_leading_strategy(self, row, strategy):
        fields = [field for field in dataclasses.fields(strategy) if field.init]
        leading = [field.name for field in fields if not field.kw_only]
        assert leading in ([], ["inner"], ["strategy"])

    def test_pickle(self, row, strategy):
        copy = pickle.loads(pickle.dumps(strategy))
        assert copy == strategy
        assert copy.state_dict() == strategy.state_dict()

    def test_repr_is_readable(self, row, strategy):
        assert eval(repr(strategy), vars(trl_grpo_ext.advantages)) == strategy

    def test_spec_round_trip(self, row, strategy):
        spec = to_spec(row.strategy)
        assert strategy == row.strategy
        assert to_spec(from_spec(json.loads(json.dumps(spec)), family="advantage")) == spec

    def test_hash(self, row, strategy):
        assert hash(strategy) == hash(row.strategy)

    def test_unknown_keywords_are_ignored(self, row, strategy):
        values, segments = scores(2, 4), torch.arange(8) // 4
        expected = strategy.normalize(values, segments)
        assert torch.equal(strategy.normalize(values, segments, unheard_of=1), expected)
        assert strategy(batch_of(values, 4), unheard_of=1).advantages.shape == (8,)

    def test_input_is_not_changed(self, row, strategy):
        rewards = torch.stack([scores(2, 4), scores(2, 4, 5)], dim=1)
        rewards[0, 0], rewards[3, 1] = torch.inf, torch.nan
        before, lengths = rewards.clone(), some_lengths(8)
        strategy(batch_of(rewards, 4, lengths=lengths))
        assert torch.equal(rewards.nan_to_num(), before.nan_to_num())
        assert torch.equal(lengths, some_lengths(8))

    def test_metrics_are_floats(self, row, strategy):
        metrics = strategy(batch_of(scores(2, 4), 4)).metrics
        assert {"constant_groups", "abs_max"} <= set(metrics)
        assert all(type(name) is str and type(value) is float for name, value in metrics.items())

    def test_state_is_there_only_where_it_is_needed(self, row, strategy):
        stateful = "Adaptive" in repr(strategy)
        assert strategy.has_state == stateful
        assert bool(strategy.state_dict()) == stateful


def test_public_names_are_sorted_and_complete():
    names = trl_grpo_ext.advantages.__all__
    assert names == sorted(names)
    classes = {*kinds("advantage").values(), *kinds("transform").values(), Transform, Adaptive}
    assert {cls.__name__ for cls in classes} <= set(names)
