"""Every reward wrapper: its contract over one table, golden values, and TRL's own functions beside it."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trl.rewards import get_cosine_scaled_reward, get_repetition_penalty_reward, get_soft_overlong_punishment

from trl_grpo_ext import rewards
from trl_grpo_ext.errors import ConfigError, RewardError, SpecError
from trl_grpo_ext.rewards import (
    ClipReward,
    CosineLength,
    LengthPenalty,
    RepetitionPenalty,
    RetryReward,
    RewardWrapper,
    ScaleReward,
    SoftOverlong,
    is_async,
)
from trl_grpo_ext.specs import from_spec, kinds, to_spec

GOLDEN = json.loads((Path(__file__).parents[1] / "data/golden/rewards.json").read_text())["cases"]

WRAPPERS = {
    LengthPenalty: {"alpha": 0.01, "target": 2},
    SoftOverlong: {"max_length": 4, "buffer": 2},
    RepetitionPenalty: {"ngram_size": 1},
    CosineLength: {"max_len": 10},
    ClipReward: {"low": 0.0, "high": 1.0},
    ScaleReward: {"scale": 2.0, "shift": -1.0},
    RetryReward: {"retries": 1, "timeout": 30.0},
}
"""Every wrapper with its arguments."""

each_wrapper = pytest.mark.parametrize(("cls", "arguments"), WRAPPERS.items(), ids=lambda x: getattr(x, "kind", ""))


def half(completions, **kwargs):
    """Score every completion 0.5, but leave the first unscored."""
    return [None, *[0.5] * (len(completions) - 1)]


async def async_half(completions, **kwargs):
    await asyncio.sleep(0)
    return half(completions)


class Half:
    def __call__(self, completions, **kwargs):
        return half(completions)


class AsyncHalf:
    async def __call__(self, completions, **kwargs):
        return half(completions)


def one_for_all(completions, **kwargs):
    return [1.0]


def nan_first(completions, **kwargs):
    return [math.nan, *[0.5] * (len(completions) - 1)]


def call(reward, lengths=(1, 2, 3, 4), **columns):
    """Call a reward function as TRL does."""
    ids = [list(range(n)) for n in lengths]
    result = reward(
        prompts=["p"] * len(ids), completions=["c"] * len(ids), completion_ids=ids, answer=["a"] * len(ids), **columns
    )
    return asyncio.run(result) if asyncio.iscoroutine(result) else result


def constant(*scores):
    """Return a reward function with these scores."""
    return lambda completions, **kwargs: list(scores)


# The contract


def test_the_table_holds_every_wrapper():
    exported = {c for c in map(rewards.__dict__.get, rewards.__all__) if isinstance(c, type)}
    assert set(WRAPPERS) == {c for c in exported if issubclass(c, RewardWrapper)} - {RewardWrapper}
    assert set(WRAPPERS) <= set(kinds("reward").values())


@each_wrapper
def test_none_stays_none_and_others_get_numbers(cls, arguments):
    scores = call(cls(half, **arguments))
    assert scores[0] is None
    assert all(isinstance(score, float) for score in scores[1:])


@each_wrapper
def test_nan_counts_as_not_scored(cls, arguments):
    assert call(cls(nan_first, **arguments)) == call(cls(half, **arguments))


@each_wrapper
@pytest.mark.parametrize(
    "inner", [async_half, AsyncHalf(), functools.partial(async_half)], ids=["def", "object", "partial"]
)
def test_async_inner_functions_are_awaited(cls, arguments, inner):
    wrapper = cls(inner, **arguments)
    assert is_async(wrapper)
    assert call(wrapper) == call(cls(half, **arguments))
    assert is_async(cls(wrapper, **arguments))


@each_wrapper
def test_callable_objects_are_reward_functions(cls, arguments):
    wrapper = cls(Half(), **arguments)
    assert not is_async(wrapper)
    assert call(wrapper) == call(cls(half, **arguments))
    assert wrapper.__name__ == f"{cls.kind}(Half)"


@each_wrapper
def test_pickles(cls, arguments):
    wrapper = cls(half, **arguments)
    copy = pickle.loads(pickle.dumps(wrapper))
    assert copy == wrapper
    assert call(copy) == call(wrapper)


@each_wrapper
def test_spec_round_trip(cls, arguments):
    wrapper = cls(half, **arguments)
    spec = to_spec(wrapper)
    assert json.loads(json.dumps(spec)) == spec
    assert spec["kind"] == cls.kind
    assert spec["inner"] == "tests.rewards.test_wrappers:half"
    assert from_spec(spec, family="reward") == wrapper


@each_wrapper
def test_unknown_fields_name_the_nearest(cls, arguments):
    field = next(iter(arguments))
    with pytest.raises(SpecError, match=field):
        from_spec({"kind": cls.kind, "inner": "accuracy_reward", **arguments, field + "x": 1}, family="reward")


@each_wrapper
def test_one_score_for_a_batch_is_an_error_that_names_the_function(cls, arguments):  # CASES 9
    with pytest.raises(RewardError, match=r"'one_for_all' returned 1 scores for 8 completions"):
        call(cls(one_for_all, **arguments), lengths=range(8))


@each_wrapper
def test_a_result_that_is_no_list_of_numbers_names_the_function(cls, arguments):
    no_order = {1.0, 2.0, 3.0, 4.0}
    for bad in (1.0, ["high"] * 4, "1234", b"1234", no_order, dict.fromkeys(no_order, 1.0)):
        with pytest.raises(RewardError, match="'<lambda>' must return a list of numbers or None, got "):
            call(cls(lambda bad=bad, **kwargs: bad, **arguments))


@each_wrapper
def test_an_error_while_scores_are_read_names_the_function(cls, arguments):
    def lazy(completions, **kwargs):
        yield 1.0
        raise ConnectionError("busy")

    if cls is not RetryReward:  # which tries again
        with pytest.raises(RewardError, match="'lazy' raised ConnectionError: busy while its scores were read"):
            call(cls(lazy, **arguments))


def test_numbers_beyond_every_float_are_infinite():
    assert call(ScaleReward(constant(10**400, -(10**400), None, 1))) == [math.inf, -math.inf, None, 1.0]
    assert call(ClipReward(constant(10**400, -(10**400), None, 1), low=-2.0, high=2.0)) == [2.0, -2.0, None, 1.0]


@each_wrapper
def test_extra_columns_reach_the_inner_function(cls, arguments):
    seen = {}

    def inner(**columns):
        seen.update(columns)
        return [1.0] * 4

    call(cls(cls(inner, **arguments), **arguments), trainer_state="state")
    assert set(seen) == {"prompts", "completions", "completion_ids", "answer", "trainer_state"}


@each_wrapper
def test_only_token_counters_need_completion_ids(cls, arguments):
    reward = cls(half, **arguments)
    if cls.needs_completion_ids:
        with pytest.raises(RewardError, match="completion_ids"):
            reward(prompts=["p"] * 2, completions=["c"] * 2)
        with pytest.raises(RewardError, match="1 `completion_ids` for 2 completions"):
            reward(prompts=["p"] * 2, completions=["c"] * 2, completion_ids=[[1]])
    else:
        assert len(reward(prompts=["p"] * 2, completions=["c"] * 2)) == 2


@each_wrapper
def test_empty_batch(cls, arguments):
    assert call(cls(constant(), **arguments), lengths=()) == []


def test_nests_to_any_depth_sync_and_async():
    def nest(inner):
        reward = LengthPenalty(inner, alpha=0.1, target=3)
        reward = ClipReward(RetryReward(reward, retries=0, timeout=30.0), low=0.0, high=1.0)
        return ScaleReward(SoftOverlong(reward, max_length=4, buffer=1), scale=2.0)

    # 4 tokens: 0.5 - 0.1 = 0.4 and -1 of the ramp: 2 * -0.6
    assert call(nest(half)) == call(nest(async_half)) == pytest.approx([None, 1.0, 1.0, -1.2])
    assert nest(half).__name__ == "scale_reward(soft_overlong(clip_reward(retry_reward(length_penalty(half)))))"
    assert call(pickle.loads(pickle.dumps(nest(half)))) == call(nest(half))
    assert to_spec(from_spec(to_spec(nest(half)), family="reward")) == to_spec(nest(half))


def test_strings_and_message_lists_give_the_same_penalty():  # CASES 8
    texts = ["日本語の答え", "ab", "é" * 50]
    ids = [[1] * 9, [1] * 2, [1] * 30]
    reward = LengthPenalty(constant(1.0, 1.0, 1.0), alpha=0.1, target=5)
    plain = reward(prompts=["p"] * 3, completions=texts, completion_ids=ids)
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    chat = reward(prompts=[[{"role": "user", "content": "p"}]] * 3, completions=messages, completion_ids=ids)
    assert plain == chat == pytest.approx([1 - 0.4, 1.0, 1 - 2.5])


def test_gate_keeps_failures_out_of_the_penalty():  # CASES 7
    failures = constant(0.0, 0.0, 0.0, 0.0)
    gated = LengthPenalty(failures, alpha=0.5, target=1, gate=0.5)
    assert call(gated) == [0.0] * 4
    assert call(LengthPenalty(failures, alpha=0.5, target=1)) == [0.0, -0.5, -1.0, -1.5]
    right = LengthPenalty(constant(1.0, 0.4, 0.5, 1.0), alpha=0.5, target=1, gate=0.5, cap=1.2)
    assert call(right) == pytest.approx([1.0, 0.4, -0.5, -0.2])


# Golden values, and TRL's own functions


def golden(kind):
    cases = [case for case in GOLDEN if case["kind"] == kind]
    return pytest.mark.parametrize("case", cases, ids=[case["id"] for case in cases])


@golden("overlong")
def test_golden_overlong(case):
    settings, lengths = case["params"], case["inputs"]["lengths"]
    maximum, buffer = settings["max_completion_len"], settings["soft_punish_cache"]
    reward = SoftOverlong(lambda completions, **k: [0.0] * len(completions), max_length=maximum, buffer=buffer)
    assert call(reward, lengths=lengths) == case["outputs"]["rewards"]
    stock = get_soft_overlong_punishment(maximum, buffer)
    assert call(reward, lengths=lengths) == stock(completion_ids=[[0] * n for n in lengths])


@golden("cosine")
def test_golden_cosine(case):
    right = [float(x) for x in case["inputs"]["correct"]]
    reward = CosineLength(constant(*right), **case["params"])
    assert call(reward, lengths=case["inputs"]["lengths"]) == pytest.approx(case["outputs"]["rewards"], abs=1e-15)


@golden("repetition")
def test_golden_repetition(case):
    ids, expected = case["inputs"]["token_ids"], case["outputs"]["rewards"]
    reward = RepetitionPenalty(constant(*[0.0] * len(ids)), **case["params"])
    scores = reward(prompts=ids, completions=ids, completion_ids=ids)
    assert scores == pytest.approx(expected, abs=1e-15)
    assert scores == pytest.approx(get_repetition_penalty_reward(**case["params"])(completion_ids=ids), abs=1e-15)


def test_cosine_equals_trl_on_real_answers():
    completions = [[{"role": "assistant", "content": rf"\boxed{{{i % 2}}}"}] for i in range(6)]
    columns = {
        "completions": completions,
        "solution": ["$1$"] * 6,
        "completion_ids": [[0] * n for n in range(0, 60, 10)],
    }
    ours = CosineLength("accuracy_reward", max_len=40)(prompts=completions, **columns)
    assert ours == get_cosine_scaled_reward(max_len=40)(**columns)


@given(
    raw=st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=6),
    lengths=st.lists(st.integers(0, 40), min_size=6, max_size=6),
)
def test_penalties_never_raise_a_score(raw, lengths):
    lengths = lengths[: len(raw)]
    for reward in (
        LengthPenalty(constant(*raw), alpha=0.1, target=10, cap=1.0),
        SoftOverlong(constant(*raw), max_length=30, buffer=10),
        RepetitionPenalty(constant(*raw)),
    ):
        for before, after in zip(raw, call(reward, lengths=lengths), strict=True):
            assert (after is None) == (before is None)
            assert before is None or before - 1 - 1e-9 <= after <= before


@given(raw=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6))
def test_clip_and_scale(raw):
    n = range(len(raw))
    assert all(-1 <= score <= 1 for score in call(ClipReward(constant(*raw), low=-1, high=1), lengths=n))
    assert call(ClipReward(constant(*raw), low=None, high=None), lengths=n) == raw
    assert call(ScaleReward(constant(*raw), scale=0.5, shift=1.0), lengths=n) == [0.5 * score + 1.0 for score in raw]


# Bad values


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SoftOverlong(half, max_length=0, buffer=1), "`max_length` must be"),
        (lambda: SoftOverlong(half, max_length=9, buffer=-1), "`buffer` must be an integer >= 0, got -1"),
        (lambda: RepetitionPenalty(half, ngram_size=0), "`ngram_size` must be an integer >= 1, got 0"),
        (lambda: RepetitionPenalty(half, max_penalty=1.0), "`max_penalty` must be"),
        (lambda: CosineLength(half, max_len=0), "`max_len` must be"),
        (lambda: CosineLength(half, max_len=9, threshold=math.nan), "`threshold` must be"),
        (lambda: ClipReward(half, low=1.0, high=0.0), "`low` must be <= `high`"),
        (lambda: ScaleReward(half, scale=math.inf), "`scale` must be"),
        (lambda: RetryReward(half, retries=-1), "`retries` must be"),
        (lambda: RetryReward(half, timeout=0), "`timeout` must be > 0, got 0"),
        (lambda: ClipReward(3, low=0, high=1), "got 3"),
    ],
)
def test_bad_values_fail_at_construction(build, message):
    with pytest.raises(ConfigError) as error:
        build()
    assert message in str(error.value)
