"""Group-aware shaping on plain batches: hand values, golden values, and the contract over one table."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_ext import rewards
from trl_grpo_ext.batch import RewardBatch
from trl_grpo_ext.errors import ConfigError, RewardError, ShapeError
from trl_grpo_ext.functional.pairs import draw_pairs
from trl_grpo_ext.rewards import GroupLengthReward, PairwiseWinRate, PassRateLengthPenalty, ShapingStrategy
from trl_grpo_ext.specs import from_spec, kinds, to_spec

GOLDEN = json.loads((Path(__file__).parents[1] / "data/golden/rewards.json").read_text())["cases"]
NAN = float("nan")


def longer(prompts, firsts, seconds):
    """Judge: the longer text wins; equal lengths are a draw."""
    return [0.5 + 0.5 * ((len(a) > len(b)) - (len(a) < len(b))) for a, b in zip(firsts, seconds, strict=True)]


async def async_longer(prompts, firsts, seconds):
    await asyncio.sleep(0)
    return longer(prompts, firsts, seconds)


SHAPINGS = [
    GroupLengthReward(weight=0.5),
    PassRateLengthPenalty(weight=0.5, max_length=10),
    PairwiseWinRate(longer),
    PairwiseWinRate(longer, pairs=1),
]
each_shaping = pytest.mark.parametrize(
    "shaping", SHAPINGS, ids=lambda s: re.sub(r"<function (\w+) at \w+>", r"\1", repr(s))
)


def batch(scores, lengths=None, g=None, dtype=torch.float32, weights=None) -> RewardBatch:
    """Return a batch of one or more columns; completions are texts of the given lengths."""
    rewards_NF = torch.tensor(scores, dtype=dtype)
    rewards_NF = rewards_NF[:, None] if rewards_NF.dim() == 1 else rewards_NF
    n, f = rewards_NF.shape
    lengths = list(range(1, n + 1)) if lengths is None else lengths
    return RewardBatch(
        rewards=rewards_NF,
        weights=torch.tensor(weights or [1.0] * f),
        lengths=torch.tensor(lengths),
        truncated=torch.zeros(n, dtype=torch.bool),
        num_generations=g or n,
        names=tuple(f"f{i}" for i in range(f)),
        prompts=["p"] * n,
        completions=["x" * length for length in lengths],
    )


def approx(*values):
    return pytest.approx(values, abs=1e-6, nan_ok=True)


# Values


@pytest.mark.parametrize("case", [c for c in GOLDEN if c["kind"] == "kimi_len"], ids=lambda c: c["id"])
def test_golden_kimi_length(case):
    scores = [float(x) for x in case["inputs"]["correct"]]
    shaped = GroupLengthReward()(batch(scores, case["inputs"]["lengths"]))
    assert shaped.rewards[:, 1].tolist() == approx(*case["outputs"]["rewards"])


def test_group_length_is_relative_to_the_group():
    # Group 0, lengths 10 20 30: lambda = .5 0 -.5; the failure at 10 gets min(0, .5). Group 1, all equal: 0.
    shaped = GroupLengthReward(weight=2.0)(batch([0.0, 1.0, 1.0, 1.0, 1.0, 0.0], [10, 20, 30, 7, 7, 7], g=3))
    assert shaped.scores.tolist() == approx(0.0, 1.0, 0.0, 1.0, 1.0, 0.0)
    assert shaped.names == ("f0", "group_length")
    assert shaped.weights.tolist() == [1.0, 2.0]
    assert shaped.rewards[:, 1].tolist() == approx(0.0, 0.0, -0.5, 0.0, 0.0, 0.0)


def test_group_length_leaves_unscored_rows_out_of_the_range():
    shaped = GroupLengthReward()(batch([1.0, 1.0, NAN, 1.0], [10, 20, 1000, 30]))
    assert shaped.scores.tolist() == approx(1.5, 1.0, NAN, 0.5)


def test_group_length_threshold():
    shaped = GroupLengthReward(threshold=0.5)(batch([0.5, 0.6, 0.4], [10, 20, 30]))
    assert shaped.rewards[:, 1].tolist() == approx(0.0, 0.0, -0.5)


def test_group_length_threshold_is_read_in_the_scores_own_precision():
    assert GroupLengthReward(threshold=0.3)(batch([0.3, 0.3], [1, 2])).rewards[:, 1].tolist() == [0.0, -0.5]


def test_pass_rate_penalty_follows_the_group_mean():
    # Group 0: mean 1/2 over scored rows, penalty 0.2 * 1/2 * len / 100. Group 1: mean -1 counts as 0.
    shaped = PassRateLengthPenalty(weight=0.2, max_length=100)(
        batch([1.0, 0.0, NAN, -1.0, -1.0, -1.0], [50, 100, 10, 10, 50, 100], g=3)
    )
    assert shaped.scores.tolist() == approx(0.95, -0.1, NAN, -1.0, -1.0, -1.0)


def test_pairwise_scores_are_mean_wins_over_the_group():
    # Lengths 1 2 3 and 5 5 1: wins 0/2 1/2 2/2, and (draw + win)/2 = .75 .75 0. The old columns are gone.
    shaped = PairwiseWinRate(longer)(batch([[9.0, 9.0]] * 6, [1, 2, 3, 5, 5, 1], g=3))
    assert shaped.scores.tolist() == approx(0.0, 0.5, 1.0, 0.75, 0.75, 0.0)
    assert shaped.names == ("pairwise_win_rate",)


def test_pairwise_judges_both_orders_so_position_bias_cancels():
    calls = []

    def first_wins(prompts, firsts, seconds):
        calls.append(list(zip(firsts, seconds, strict=True)))
        return [1.0] * len(firsts)

    assert PairwiseWinRate(first_wins)(batch([0.0] * 4)).scores.tolist() == [0.5] * 4
    (pairs,) = calls  # one call
    assert len(pairs) == len(set(pairs)) == 4 * 3
    assert {(b, a) for a, b in pairs} == set(pairs)


def test_pairwise_with_a_number_of_pairs_is_bounded_and_seeded():
    judged = []
    PairwiseWinRate(longer, seed=2**63 - 1)(batch([0.0] * 4))

    def judge(prompts, firsts, seconds):
        judged.append(len(firsts))
        return longer(prompts, firsts, seconds)

    rows = batch([0.0] * 16, g=8)
    one = PairwiseWinRate(judge, pairs=3, seed=5)
    assert torch.equal(one(rows).scores, one(rows).scores)
    assert judged == [2 * 16 * 3 // 2] * 2
    assert not torch.equal(one(rows).scores, PairwiseWinRate(judge, pairs=3, seed=6)(rows).scores)
    assert torch.equal(PairwiseWinRate(judge, pairs=99)(rows).scores, PairwiseWinRate(judge)(rows).scores)


def test_pairwise_leaves_unscored_rows_out():
    shaped = PairwiseWinRate(longer)(batch([0.0, NAN, 0.0], [1, 99, 2]))
    assert shaped.scores.tolist() == approx(0.0, NAN, 1.0)


def test_pairwise_a_pair_that_is_not_judged_does_not_count():
    def no_answer_on_longest(prompts, firsts, seconds):
        answers = zip(firsts, seconds, longer(prompts, firsts, seconds), strict=True)
        return [None if "xxx" in (a, b) else chance for a, b, chance in answers]

    shaped = PairwiseWinRate(no_answer_on_longest)(batch([0.0] * 3, [1, 2, 3]))
    assert shaped.scores.tolist() == approx(0.0, 1.0, NAN)


def test_pairwise_awaits_an_async_judge():
    rows = batch([0.0] * 4)

    async def notebook():
        return PairwiseWinRate(async_longer)(rows).scores

    expected = PairwiseWinRate(longer)(rows).scores
    assert torch.equal(PairwiseWinRate(async_longer)(rows).scores, expected)
    assert torch.equal(asyncio.run(notebook()), expected)


def test_pairwise_a_bad_judge_is_named():
    for answer, message in [
        ([1.0], "judge 'judge' returned 1 answers for 12 pairs"),
        ([2.0] * 12, r"judge 'judge' must return chances in \[0, 1\], got 2.0"),
        (["a"] * 12, "judge 'judge' must return a list of numbers"),
        ("0" * 12, "judge 'judge' must return a list of numbers"),
        ([10**400] * 12, r"judge 'judge' must return chances in \[0, 1\], got inf"),
    ]:

        def judge(prompts, firsts, seconds, answer=answer):
            return answer

        with pytest.raises(RewardError, match=message):
            PairwiseWinRate(judge)(batch([0.0] * 4))


def test_pairwise_needs_texts():
    rows = batch([0.0] * 4)
    object.__setattr__(rows, "completions", None)
    with pytest.raises(RewardError, match="prompts"):
        PairwiseWinRate(longer)(rows)


@given(n=st.integers(1, 11), pairs=st.none() | st.integers(1, 12), groups=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_every_row_is_in_its_number_of_pairs(n, pairs, groups, seed):
    segments = torch.arange(groups).repeat_interleave(n)
    first, second = draw_pairs(torch.zeros(groups * n), segments, pairs, torch.Generator().manual_seed(seed))
    assert torch.equal(segments[first], segments[second])
    assert len({frozenset(pair) for pair in zip(first.tolist(), second.tolist(), strict=True)}) == len(first)
    degree = torch.bincount(torch.cat([first, second]), minlength=groups * n)
    wanted = n - 1 if pairs is None else min(pairs, n - 1)
    one_more = n * wanted % 2  # an odd number of odd degrees does not exist
    for group in degree.view(groups, n).sort(dim=1).values.tolist():
        assert group == [wanted] * (n - one_more) + [wanted + 1] * one_more


# The contract


def test_the_table_holds_every_shaping():
    assert {type(s) for s in SHAPINGS} == set(kinds("shaping").values())
    exported = [c for c in map(rewards.__dict__.get, rewards.__all__) if isinstance(c, type)]
    assert {c for c in exported if issubclass(c, ShapingStrategy)} - {ShapingStrategy} == set(kinds("shaping").values())


@each_shaping
def test_unscored_rows_stay_unscored_and_others_are_finite(shaping):
    scores = shaping(batch([1.0, NAN, 0.0, 0.0, NAN, NAN, NAN, NAN], g=4)).scores
    assert scores.isnan().tolist() == [False, True, False, False, True, True, True, True]


@each_shaping
def test_infinite_cells_count_as_unscored(shaping):
    scores = shaping(batch([1.0, float("inf"), 0.0, 0.0])).scores
    assert scores.isnan().tolist() == [False, True, False, False]


@each_shaping
def test_groups_do_not_see_each_other(shaping):
    if getattr(shaping, "pairs", None) is None:
        both = shaping(batch([1.0, 0.0, 1.0, 0.0], [1, 2, 30, 40], g=2)).scores
        alone = [shaping(batch([1.0, 0.0], lengths)).scores for lengths in ([1, 2], [30, 40])]
        assert torch.equal(both, torch.cat(alone))


@each_shaping
def test_the_input_is_not_changed(shaping):
    rows = batch([1.0, 0.0, 1.0, 0.0])
    before = rows.rewards.clone()
    shaping(rows)
    assert torch.equal(rows.rewards, before)
    assert rows.names == ("f0",)
    assert rows.weights.tolist() == [1.0]


@each_shaping
def test_twice_gives_two_names(shaping):
    twice = shaping(shaping(batch([1.0, 0.0, 1.0, 0.0])))
    assert len(set(twice.names)) == len(twice.names)


@each_shaping
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(shaping, dtype):
    shaped = shaping(batch([1.0, 0.0, 1.0, 0.0], dtype=dtype))
    assert shaped.rewards.dtype == torch.promote_types(dtype, torch.float32)
    assert shaped.scores.tolist() == approx(*shaping(batch([1.0, 0.0, 1.0, 0.0])).scores.tolist())


@each_shaping
def test_one_generation_and_empty_batches(shaping):  # CASES 16: evaluation with one completion per prompt
    scores = shaping(batch([1.0, 0.0], g=1)).scores
    assert isinstance(shaping, PairwiseWinRate) or scores.isfinite().all()
    empty = RewardBatch(
        rewards=torch.zeros(0, 1),
        weights=torch.ones(1),
        lengths=torch.zeros(0, dtype=torch.int64),
        truncated=torch.zeros(0, dtype=torch.bool),
        num_generations=4,
        names=("f",),
        prompts=[],
        completions=[],
    )
    assert shaping(empty).scores.shape == (0,)


@each_shaping
def test_pickle_repr_spec_and_extra_keywords(shaping):
    assert pickle.loads(pickle.dumps(shaping)) == shaping
    assert repr(shaping).startswith(type(shaping).__name__ + "(")
    spec = json.loads(json.dumps(to_spec(shaping)))
    assert from_spec(spec, family="shaping") == shaping
    assert torch.equal(shaping(batch([1.0, 0.0]), unknown=1).scores, shaping(batch([1.0, 0.0])).scores)


def test_specs_of_judges():
    spec = {"kind": "pairwise_win_rate", "judge": "tests.rewards.test_shaping:longer", "pairs": 2}
    assert from_spec(spec, family="shaping") == PairwiseWinRate(longer, pairs=2)
    with pytest.raises(ConfigError, match="trust_remote_code"):
        from_spec(spec, family="shaping", remote=True)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GroupLengthReward(weight=-1.0), "`weight` must be >= 0, got -1.0"),
        (lambda: GroupLengthReward(threshold=NAN), "`threshold` must be"),
        (lambda: PassRateLengthPenalty(weight=1.0, max_length=0), "`max_length` must be >= 1, got 0"),
        (lambda: PairwiseWinRate(longer, pairs=0), "`pairs` must be"),
        (lambda: PairwiseWinRate(3), "`judge` must be a function"),
        (lambda: PairwiseWinRate(longer, seed=2**63), r"`seed` must be an integer >= 0 and <= 9.22337e\+18, got 9223"),
    ],
)
def test_bad_values_fail_at_construction(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_a_batch_that_does_not_divide_is_an_error():  # CASES 15
    with pytest.raises(ShapeError, match="6 rows do not divide by num_generations=4"):
        batch([0.0] * 6, g=4)
