"""`Adaptive`: when it switches, what its state is, and what it must not notice."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch

from tests.advantages.table import batch_of, one_segment
from trl_grpo_ext.advantages import (
    Adaptive,
    Chain,
    LengthBucketed,
    MeanCentered,
    Mix,
    PerReward,
    Rank,
    Scale,
    ZScore,
)
from trl_grpo_ext.errors import StateError
from trl_grpo_ext.specs import from_spec, to_spec

WIDE = [0.0, 2.0, 0.0, 2.0]
"""Two groups of two with a std of sqrt(2)."""
NARROW = [0.0, 0.1, 0.0, 0.1]
BEFORE, AFTER = [-0.5, 0.5, -0.5, 0.5], [-1.0, 1.0, -1.0, 1.0]
"""What `Rank` and `MeanCentered` make of the wide groups."""


def adaptive(patience=2, min_std=1.0, **fields):
    return Adaptive(before=Rank(), after=MeanCentered(), min_std=min_std, patience=patience, **fields)


def run(strategy, *batches, training=True):
    """Call the strategy and return the advantages of the last call."""
    for rewards in batches:
        output = strategy(batch_of(rewards, 2, training=training))
    return output.advantages.tolist()


class TestSwitch:
    def test_the_call_that_completes_the_streak_is_still_before(self):
        strategy = adaptive(patience=2)
        assert run(strategy, WIDE) == BEFORE
        assert run(strategy, WIDE) == BEFORE
        assert run(strategy, WIDE) == AFTER

    def test_the_streak_must_be_consecutive(self):
        strategy = adaptive(patience=2)
        run(strategy, WIDE, NARROW, WIDE)
        assert run(strategy, WIDE) == BEFORE
        assert run(strategy, WIDE) == AFTER

    def test_it_is_for_good(self):
        strategy = adaptive(patience=1)
        run(strategy, WIDE, NARROW, NARROW)
        assert run(strategy, WIDE) == AFTER

    def test_reaching_the_threshold_is_enough(self):
        # Sample std of 0, 2 is sqrt(2), of 0, 0 it is 0: the mean is sqrt(2) / 2 = 0.70710678
        strategy = adaptive(patience=1, min_std=0.5 * 2**0.5)
        run(strategy, [0.0, 2.0, 0.0, 0.0])
        assert strategy.active == MeanCentered()

    def test_groups_with_fewer_than_two_scores_are_left_out(self):
        # Counted as 0 the second group would bring the mean down to 0.707
        strategy = adaptive(patience=1, min_std=1.0)
        run(strategy, [0.0, 2.0, 5.0, None])
        assert strategy.active == MeanCentered()

    def test_no_group_with_two_scores_is_no_spread(self):
        strategy = adaptive(patience=1, min_std=0.0)
        run(strategy, [0.0, None, 5.0, None])
        assert strategy.active == Rank()

    def test_a_constant_group_has_no_spread_at_all(self):
        # Float32 neighbours at 1e7 differ by 1, a std of 0.7
        strategy = adaptive(patience=1, min_std=0.5)
        run(strategy, [1e7, 1e7 + 1, 1e7, 1e7 + 1])
        assert strategy.active == Rank()

    def test_metrics(self):
        strategy = adaptive(patience=1)
        metrics = strategy(batch_of(WIDE, 2)).metrics
        assert metrics["adaptive_after"] == 0.0
        assert metrics["group_std"] == pytest.approx(2**0.5)
        assert strategy(batch_of(NARROW, 2)).metrics["adaptive_after"] == 1.0


class TestWhatDoesNotCount:
    def test_evaluation(self):
        strategy = adaptive(patience=2)
        run(strategy, WIDE)
        run(strategy, NARROW, WIDE, WIDE, training=False)
        assert strategy.state_dict() == {"streak": 1, "switched": False}

    def test_normalize(self):
        strategy = adaptive(patience=1)
        strategy.normalize(torch.tensor(WIDE), one_segment(4))
        assert strategy.state_dict() == {"streak": 0, "switched": False}

    def test_equality_spec_and_repr(self):
        strategy = adaptive(patience=1)
        run(strategy, WIDE)
        fresh = adaptive(patience=1)
        assert strategy == fresh
        assert hash(strategy) == hash(fresh)
        assert repr(strategy) == repr(fresh)
        assert to_spec(strategy) == to_spec(fresh)
        assert from_spec(to_spec(strategy), family="advantage").active == Rank()


class TestState:
    def test_resumes_at_the_same_call(self):
        batches = [WIDE, NARROW, WIDE, WIDE, WIDE, NARROW]
        whole, first = adaptive(patience=3), adaptive(patience=3)
        expected = [run(whole, batch) for batch in batches]
        got = [run(first, batch) for batch in batches[:3]]
        resumed = adaptive(patience=3)
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
        got += [run(resumed, batch) for batch in batches[3:]]
        assert got == expected

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
    def test_copies_carry_the_state_and_go_their_own_way(self, duplicate):
        strategy = adaptive(patience=2)
        run(strategy, WIDE)
        twin = duplicate(strategy)
        run(twin, WIDE)
        assert twin.state_dict() == {"streak": 2, "switched": True}
        assert strategy.state_dict() == {"streak": 1, "switched": False}

    def test_composites_collect_the_state_of_what_they_hold(self):
        inner = adaptive(patience=1)
        strategy = Mix(parts=[(1.0, Rank()), (0.5, Chain(LengthBucketed(inner), transforms=[Scale(2.0)]))])
        assert strategy.has_state
        run(strategy, WIDE)
        state = json.loads(json.dumps(strategy.state_dict()))
        assert state == {"parts.1.1": {"strategy": {"inner": {"streak": 1, "switched": True}}}}
        state["parts.1.1"]["strategy"]["inner"] = {"streak": 7, "switched": False}
        strategy.load_state_dict(state)
        assert inner.state_dict() == {"streak": 7, "switched": False}

    def test_nested_adaptive(self):
        late = adaptive(patience=1)
        strategy = Adaptive(before=Rank(), after=late, min_std=1.0, patience=1)
        run(strategy, WIDE)
        assert late.state_dict()["streak"] == 0  # not active yet
        run(strategy, WIDE)
        assert strategy.state_dict() == {"streak": 1, "switched": True, "after": {"streak": 1, "switched": True}}

    def test_stateless_strategies(self):
        assert ZScore().state_dict() == {}
        assert not ZScore().has_state
        ZScore().load_state_dict({})
        with pytest.raises(StateError, match=r"cannot load the state .*streak.* into ZScore"):
            ZScore().load_state_dict(adaptive().state_dict())

    @pytest.mark.parametrize(
        "state",
        [{}, {"streak": 1}, {"streak": -1, "switched": False}, {"streak": 1, "switched": 0}, {"streak": 1.5}, None],
        ids=str,
    )
    def test_foreign_state_is_refused(self, state):
        strategy = adaptive()
        with pytest.raises(StateError, match="state"):
            strategy.load_state_dict(state)
        assert strategy.state_dict() == {"streak": 0, "switched": False}


class TestHeldByOthers:
    @pytest.mark.parametrize(
        "holder",
        [
            lambda inner: Mix(parts=[(0.5, inner), (0.5, inner)]),
            lambda inner: Chain(inner, transforms=[Scale(1.0)]),
            lambda inner: PerReward(inner, whiten=False),
            lambda inner: LengthBucketed(inner, buckets=1),
            lambda inner: Adaptive(before=inner, after=ZScore(), patience=100),
        ],
        ids=["mix twice", "chain", "per_reward", "length_bucketed", "adaptive"],
    )
    def test_one_call_counts_once(self, holder):
        inner = adaptive(patience=2)
        strategy = holder(inner)
        assert run(strategy, WIDE) == BEFORE
        assert inner.state_dict() == {"streak": 1, "switched": False}
        run(strategy, WIDE, training=False)
        assert inner.state_dict() == {"streak": 1, "switched": False}
        assert run(strategy, WIDE) == BEFORE
        assert run(strategy, WIDE) == AFTER

    def test_serving_several_functions_it_follows_their_sum(self):
        inner = adaptive(patience=1)
        rewards = [[1.0, -1.0], [3.0, -3.0], [1.0, -1.0], [3.0, -3.0]]  # wide each, constant in sum
        PerReward(inner)(batch_of(rewards, 2))
        assert inner.state_dict()["streak"] == 0

    def test_serving_one_function_it_follows_that_function(self):
        inner = adaptive(patience=1)
        rewards = [[1.0, -1.0], [3.0, -3.0], [1.0, -1.0], [3.0, -3.0]]
        PerReward(Rank(), strategies={"b": inner})(batch_of(rewards, 2))
        assert inner.state_dict()["streak"] == 1

    def test_within_length_buckets_it_follows_the_cells(self):
        # Each group is wide, but only between its two lengths: the cells 0, 0 and 2, 2 are constant
        inner = adaptive(patience=1)
        batch = batch_of([0.0, 0.0, 2.0, 2.0], 4, lengths=[1, 2, 30, 40])
        LengthBucketed(inner)(batch)
        assert inner.state_dict()["streak"] == 0
        inner(batch)
        assert inner.state_dict()["streak"] == 1
