"""Strategies inside strategies: what they see, what they report, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tests.advantages.table import batch_of, one_segment
from trl_grpo_ext.advantages import (
    Adaptive,
    AdvantageOutput,
    AdvantageStrategy,
    BatchWhiten,
    Chain,
    Clip,
    LeaveOneOut,
    LengthBucketed,
    MeanCentered,
    Mix,
    OptimalBaseline,
    PerReward,
    Rank,
    RobustZScore,
    Scale,
    ZScore,
)
from trl_grpo_ext.errors import ConfigError, SpecError
from trl_grpo_ext.specs import from_spec, to_spec

REWARDS = [[0.0, 3.0], [1.0, 1.0], [0.0, 2.0], [1.0, 4.0], [0.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 2.0]]
LENGTHS = [5, 9, 40, 44, 7, 8, 50, 60]


@dataclass(frozen=True, kw_only=True)
class CallsOnly(AdvantageStrategy):
    """A strategy from elsewhere that overrides the call, and reads the texts."""

    kind = "calls_only"
    needs_text = True

    def normalize(self, values, segments, **context):
        return torch.zeros_like(values)

    def __call__(self, batch, **context):
        return AdvantageOutput(torch.ones(len(batch.scores)), {"called": 1.0})


def batch(**kwargs):
    return batch_of(REWARDS, 4, lengths=LENGTHS, names=["correct", "style"], **kwargs)


class TestSpecsOfNestedStrategies:
    def test_kinds_and_mappings_from_python(self):
        assert LengthBucketed("rank", buckets=3) == LengthBucketed(inner=Rank(), buckets=3)
        assert LengthBucketed(inner={"kind": "zscore", "ddof": 0}).inner == ZScore(ddof=0)
        assert Mix(parts=[(1.0, "rank"), [0.5, {"kind": "opo"}]]).parts == ((1.0, Rank()), (0.5, OptimalBaseline()))
        assert Chain("rloo", transforms=["batch_whiten", {"kind": "clip", "limit": 2}]) == Chain(
            LeaveOneOut(), transforms=[BatchWhiten(), Clip(2)]
        )
        assert PerReward(strategies={"correct": "dr_grpo"}).strategies == {"correct": MeanCentered()}
        assert Adaptive(after="robust_zscore").after == RobustZScore()

    @pytest.mark.parametrize(
        ("alias", "cls"),
        [
            ("dr_grpo", MeanCentered),
            ("rloo", LeaveOneOut),
            ("opo", OptimalBaseline),
            ("gdpo", PerReward),
        ],
    )
    def test_aliases(self, alias, cls):
        assert from_spec(alias, family="advantage") == cls()

    def test_specs_write_every_field(self):
        assert to_spec(LengthBucketed(Rank(), edges=[10, 20])) == {
            "kind": "length_bucketed",
            "inner": {"kind": "rank"},
            "buckets": None,
            "edges": [10, 20],
            "min_size": 2,
            "small": "merge",
            "scope": "group",
        }
        assert to_spec(Chain(Rank(), transforms=[Clip(1.0), Scale(2.0), BatchWhiten()])) == {
            "kind": "chain",
            "strategy": {"kind": "rank"},
            "transforms": [
                {"kind": "clip", "limit": 1.0},
                {"kind": "scale", "factor": 2.0},
                {"kind": "batch_whiten", "eps": 1e-4},
            ],
        }
        assert to_spec(Mix(parts=[(1, Rank())])) == {"kind": "mix", "parts": [[1, {"kind": "rank"}]]}
        assert to_spec(Adaptive()) == {
            "kind": "adaptive",
            "before": {"kind": "rank"},
            "after": {"kind": "zscore", "eps": 1e-4, "ddof": 1, "scale": "group"},
            "min_std": 0.1,
            "patience": 10,
        }
        assert to_spec(PerReward(Rank(), strategies={"a": MeanCentered()})) == {
            "kind": "per_reward",
            "inner": {"kind": "rank"},
            "strategies": {"a": {"kind": "mean_centered"}},
            "whiten": True,
            "eps": 1e-4,
        }

    def test_the_callers_lists_and_dicts_are_not_kept(self):
        parts, strategies, edges = [(1.0, Rank())], {"correct": Rank()}, [1, 2]
        mix, per_reward, bucketed = Mix(parts=parts), PerReward(strategies=strategies), LengthBucketed(edges=edges)
        parts.clear(), strategies.clear(), edges.clear()
        assert len(mix.parts) == len(per_reward.strategies) == 1
        assert bucketed.edges == (1, 2)


class TestWhatIsSeen:
    def test_lengths_reach_every_depth(self):
        deep = Mix(parts=[(1.0, Chain(Adaptive(before=LengthBucketed("rank")), transforms=[Scale(1.0)]))])
        shallow = LengthBucketed("rank")
        torch.testing.assert_close(deep(batch()).advantages, shallow(batch()).advantages)
        values, segments, lengths = torch.arange(8.0), torch.arange(8) // 4, torch.tensor(LENGTHS)
        expected = shallow.normalize(values, segments, lengths=lengths)
        torch.testing.assert_close(deep.normalize(values, segments, lengths=lengths), expected)

    def test_per_reward_by_name(self):
        strategy = PerReward(Rank(), strategies={"style": MeanCentered()}, whiten=False)
        correct, style = (batch_of([row[i] for row in REWARDS], 4) for i in range(2))
        expected = Rank()(correct).advantages + MeanCentered()(style).advantages
        torch.testing.assert_close(strategy(batch()).advantages, expected)

    def test_per_reward_with_a_name_that_is_no_function(self):
        with pytest.raises(ConfigError, match=r"names 'styl', which is no reward function.*did you mean 'style'"):
            PerReward(strategies={"styl": Rank()})(batch())

    def test_per_reward_within_length_buckets_and_around_them(self):
        for strategy in (LengthBucketed(PerReward()), PerReward(LengthBucketed()), LengthBucketed(LengthBucketed())):
            advantages = strategy(batch()).advantages
            assert advantages.isfinite().all()
            assert advantages.abs().max() > 0

    def test_calls_and_normalize_agree(self):
        one = batch_of([row[1] for row in REWARDS], 4, lengths=LENGTHS)
        for strategy in (
            PerReward(LengthBucketed()),
            LengthBucketed(PerReward(), scope="batch"),
            Chain(Mix(parts=[(1.0, Rank()), (1.0, OptimalBaseline())]), transforms=[BatchWhiten()]),
        ):
            called = strategy(one).advantages
            normalized = strategy.normalize(one.scores, one.groups, lengths=one.lengths)
            torch.testing.assert_close(called, normalized)

    def test_a_strategy_that_overrides_the_call(self):
        inner = CallsOnly()
        assert Mix(parts=[(2.0, inner)])(batch()).advantages.tolist() == [2.0] * 8
        assert Chain(inner, transforms=[Clip(0.5)])(batch()).metrics["called"] == 1.0
        assert LengthBucketed(inner)(batch()).advantages.tolist() == [1.0] * 8

    def test_needs_text_of_a_nested_strategy(self):
        assert Mix(parts=[(1.0, Rank()), (1.0, Chain(CallsOnly()))]).needs_text
        assert PerReward(strategies={"style": CallsOnly()}).needs_text
        assert not Mix(parts=[(1.0, Rank())]).needs_text
        assert not Rank().needs_text


class TestMetrics:
    def test_of_parts_under_their_names(self):
        mix = Mix(parts=[(1.0, LengthBucketed()), (1.0, Rank())])
        metrics = mix(batch()).metrics
        assert {"part_0/bucket_0_size", "part_0/merged_fraction", "part_1/abs_max", "abs_max"} <= set(metrics)

    def test_of_functions_under_their_names(self):
        metrics = PerReward(Rank(), strategies={"correct": Adaptive()})(batch()).metrics
        assert {"correct/adaptive_after", "correct/constant_groups", "style/constant_groups"} <= set(metrics)

    def test_of_a_single_inner_strategy_as_they_are(self):
        strategy = Chain(LengthBucketed(Adaptive(patience=5)), transforms=[Clip(1.0)])
        metrics = strategy(batch()).metrics
        assert {"bucket_1_size", "adaptive_after", "group_std", "constant_cells"} <= set(metrics)
        assert metrics["abs_max"] <= 1.0

    def test_share_of_constant_groups(self):
        for strategy in (Rank(), PerReward(), Chain(Rank(), transforms=[Clip(0.1)])):
            assert strategy(batch_of([1.0, 1.0, 0.0, 2.0], 2)).metrics["constant_groups"] == 0.5


INVALID = [
    (ZScore, {"eps": -1.0}, "`eps` must be >= 0, got -1.0"),
    (ZScore, {"eps": float("inf")}, "`eps` must be >= 0, got inf"),
    (ZScore, {"ddof": 2}, "`ddof` must be one of 0, 1, got 2"),
    (ZScore, {"scale": "none"}, "`scale` must be one of 'group', 'batch', got 'none'"),
    (RobustZScore, {"eps": float("nan")}, "`eps` must be >= 0, got nan"),
    (LengthBucketed, {"buckets": 0}, "`buckets` must be an integer >= 1 or None, got 0"),
    (LengthBucketed, {"buckets": 2.5}, "`buckets` must be an integer >= 1 or None, got 2.5"),
    (LengthBucketed, {"edges": [10, 10]}, "`edges` must be strictly increasing, got [10, 10]"),
    (LengthBucketed, {"edges": [20, 10]}, "`edges` must be strictly increasing, got [20, 10]"),
    (LengthBucketed, {"edges": ["a"]}, "`edges[0]` must be a finite number, got 'a'"),
    (LengthBucketed, {"edges": 5}, "`edges` must be a list of numbers, got 5"),
    (LengthBucketed, {"edges": [10], "buckets": 2}, "`edges` and `buckets` exclude each other"),
    (LengthBucketed, {"min_size": 0}, "`min_size` must be an integer >= 1, got 0"),
    (LengthBucketed, {"small": "drop"}, "`small` must be one of 'merge', 'zero', got 'drop'"),
    (LengthBucketed, {"scope": "world"}, "`scope` must be one of 'group', 'batch', got 'world'"),
    (LengthBucketed, {"inner": None}, "`inner` must be an advantage strategy, got None"),
    (LengthBucketed, {"inner": [Rank()]}, "`inner` must be an advantage strategy"),
    (PerReward, {"eps": -1e-9}, "`eps` must be >= 0, got -1e-09"),
    (PerReward, {"whiten": 1}, "`whiten` must be True or False, got 1"),
    (PerReward, {"strategies": [Rank()]}, "`strategies` must map reward names to strategies"),
    (PerReward, {"strategies": {"a": 3}}, "`strategies['a']` must be an advantage strategy, got 3"),
    (Mix, {"parts": []}, "`parts` must be a list of (weight, strategy), got ()"),
    (Mix, {"parts": [Rank()]}, "`parts[0]` must be (weight, strategy), got Rank()"),
    (Mix, {"parts": [(Rank(), 1.0)]}, "`parts[0]` must be (weight, strategy)"),
    (Mix, {"parts": [(-1.0, Rank())]}, "`parts[0][0]` must be >= 0, got -1.0"),
    (Mix, {"parts": [(0, Rank()), (0.0, ZScore())]}, "one of the weights of `parts` must be > 0"),
    (Chain, {"strategy": 1}, "`strategy` must be an advantage strategy, got 1"),
    (Chain, {"strategy": Rank(), "transforms": Clip(1.0)}, "`transforms` must be a list of transforms"),
    (Clip, {"limit": 0}, "`limit` must be > 0, got 0"),
    (Scale, {"factor": float("nan")}, "`factor` must be >= 0, got nan"),
    (BatchWhiten, {"eps": -1}, "`eps` must be >= 0, got -1"),
    (Adaptive, {"min_std": -0.1}, "`min_std` must be >= 0, got -0.1"),
    (Adaptive, {"patience": 0}, "`patience` must be an integer >= 1, got 0"),
    (Adaptive, {"patience": True}, "`patience` must be an integer >= 1, got True"),
]


class TestValidation:
    @pytest.mark.parametrize(("cls", "fields", "message"), INVALID, ids=lambda x: getattr(x, "__name__", None))
    def test_at_construction(self, cls, fields, message):
        with pytest.raises(ConfigError) as error:
            cls(**fields)
        assert message in str(error.value)

    def test_wrong_family(self):
        with pytest.raises(SpecError, match="expected a strategy of family 'transform', got Rank"):
            Chain(Rank(), transforms=[Rank()])
        with pytest.raises(SpecError, match="unknown advantage kind 'clip'"):
            Mix(parts=[(1.0, {"kind": "clip", "limit": 1})])

    def test_unknown_nested_field_names_the_nearest(self):
        with pytest.raises(SpecError, match="has no field 'bukets'; did you mean 'buckets'"):
            from_spec({"kind": "chain", "strategy": {"kind": "length_bucketed", "bukets": 3}}, family="advantage")

    @pytest.mark.parametrize("cls", [ZScore, Rank, Adaptive, Mix])
    def test_keyword_only(self, cls):
        with pytest.raises(TypeError):
            cls(1.0)

    def test_numbers_that_arrived_as_text(self):
        assert from_spec({"kind": "robust_zscore", "eps": "1e-6"}, family="advantage").eps == 1e-6

    def test_plain_tensors_of_the_wrong_shape(self):
        with pytest.raises(ValueError, match=r"values and segments must both be \(N,\), got \(2, 2\) and \(4,\)"):
            Rank().normalize(torch.zeros(2, 2), one_segment(4))
        with pytest.raises(ValueError, match=r"segments must hold integers, got torch\.float32"):
            Rank().normalize(torch.zeros(4), torch.zeros(4))
