"""Specs: object to data and back, nesting, third-party kinds, and what may not be imported."""

from __future__ import annotations

import dataclasses
import enum
import functools
from decimal import Decimal
from fractions import Fraction
from typing import ClassVar

import numpy as np
import pytest
import torch
import yaml

from tests.tiny import digits
from trl_grpo_ext import (
    AdvantageStrategy,
    Chain,
    ConfigError,
    LengthBucketed,
    LengthPenalty,
    LinearBeta,
    Mix,
    MovingAnchor,
    PairwiseWinRate,
    PerReward,
    Rank,
    RepetitionPenalty,
    RetryReward,
    RewardModel,
    SpecError,
    ZScore,
    from_spec,
    to_spec,
)
from trl_grpo_ext.specs import FAMILIES, build_field, kinds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halved(AdvantageStrategy):
    """A strategy from outside the package."""

    factor: float = 0.5

    def normalize(self, values, segments, **context):
        return Rank().normalize(values, segments) * self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Named(Halved):
    """A strategy from outside that calls itself something, even something of ours."""

    kind: ClassVar[str] = "rank"


class NotAStrategy:
    pass


class Scores:
    """A reward function that is an object."""

    def __call__(self, completions, **columns):
        return [0.0] * len(completions)

    def method(self, completions, **columns):
        return [0.0] * len(completions)


class Word(str, enum.Enum):
    GROUP = "group"


class Text(str):
    __slots__ = ()


an_object, a_lambda, a_partial = Scores(), lambda completions, **columns: [0.0], functools.partial(digits)


def test_kinds_and_aliases_name_classes_of_their_family():
    for family in FAMILIES:
        for kind, cls in kinds(family).items():
            assert cls.family == family
            assert kind in (cls.kind, *cls.aliases)


def test_an_object_is_returned_as_it_is():
    strategy = ZScore(ddof=0)
    assert from_spec(strategy, family="advantage") is strategy


def test_third_party_kinds_by_import_path():
    spec = {"kind": "tests.test_specs:Halved", "factor": 0.25}
    strategy = from_spec(spec, family="advantage")
    assert strategy == Halved(factor=0.25)
    assert to_spec(strategy) == spec


def test_a_third_party_kind_is_written_by_its_path_whatever_it_calls_itself():
    assert to_spec(Named()) == {"kind": "tests.test_specs:Named", "factor": 0.5}
    assert from_spec(to_spec(Named()), family="advantage") == Named()


@pytest.mark.parametrize(
    ("spec", "family"),
    [
        ("tests.test_specs:Halved", "advantage"),
        ({"kind": "length_penalty", "alpha": 1.0, "target": 2, "inner": "tests.tiny:digits"}, "reward"),
        ({"kind": "length_penalty", "alpha": 1.0, "target": 2, "inner": {"kind": "tests.tiny:digits"}}, "reward"),
    ],
)
def test_import_paths_from_elsewhere_are_refused_at_any_depth(spec, family):
    with pytest.raises(SpecError, match="trust_remote_code=True"):
        from_spec(spec, family=family, remote=True)
    assert from_spec(spec, family=family, remote=True, trust_remote_code=True) is not None
    assert from_spec(spec, family=family) is not None  # the refusal does not outlive the call


def test_names_of_this_package_and_trl_are_not_imports():
    spec = {"kind": "length_penalty", "alpha": 1.0, "target": 2, "inner": "think_format_reward"}
    reward = from_spec(spec, family="reward", remote=True)
    assert to_spec(reward) == {**spec, "cap": None, "gate": None}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tests.test_specs:NotAStrategy", "must be a strategy class of family 'advantage'"),
        ("trl_grpo_ext.kl:K3", "must be a strategy class of family 'advantage'"),
        ("tests.test_specs:Missing", "cannot import"),
        (":Rank", "cannot import"),
        ("os:", "cannot import"),
        ({"kind": ["rank"]}, "needs a `kind`"),
        ({"kind": "rank", "eps": 1}, "has no field 'eps'; it has no fields"),
        ({"kind": "rank", 3: 1}, "has no field 3"),
        (None, "must be a kind"),
        (Rank, "must be a kind"),
    ],
)
def test_bad_specs(spec, message):
    with pytest.raises(SpecError, match=message):
        from_spec(spec, family="advantage")


def test_unknown_family_names_the_nearest():
    with pytest.raises(SpecError, match="did you mean 'advantage'"):
        from_spec("rank", family="advantages")


def test_a_strategy_of_another_family_is_refused():
    from trl_grpo_ext import K3

    with pytest.raises(SpecError, match="expected a strategy of family 'advantage'"):
        from_spec(K3(), family="advantage")


def test_to_spec_refuses_what_has_no_path():
    with pytest.raises(SpecError, match="only classes and functions at the top of a module"):
        to_spec(LengthPenalty(lambda completions, **kwargs: [0.0], alpha=1.0, target=1))


def test_nested_specs_are_built_and_written():
    spec = {
        "kind": "length_penalty",
        "alpha": 0.5,
        "target": 10,
        "inner": {"kind": "length_penalty", "alpha": 1.0, "target": 20, "inner": "tests.tiny:digits"},
    }
    reward = from_spec(spec, family="reward")
    assert reward == LengthPenalty(LengthPenalty(digits, alpha=1.0, target=20), alpha=0.5, target=10)
    assert from_spec(to_spec(reward), family="reward") == reward
    assert to_spec(from_spec(to_spec(reward), family="reward")) == to_spec(reward)


class TestPlainValues:
    """What passes for a number or a word becomes Python's own: YAML and JSON can write no other."""

    @pytest.mark.parametrize(
        ("cls", "fields", "expected"),
        [
            (ZScore, {"eps": np.float64(0.5)}, 0.5),
            (ZScore, {"eps": np.float32(0.5)}, 0.5),
            (ZScore, {"eps": Fraction(1, 4)}, 0.25),
            (ZScore, {"eps": torch.tensor(0.5)}, 0.5),
            (ZScore, {"ddof": np.int64(0)}, 0),
            (ZScore, {"scale": Word.GROUP}, "group"),
            (ZScore, {"scale": Text("batch")}, "batch"),
            (PerReward, {"whiten": np.False_}, False),
            (LengthPenalty, {"target": 3, "alpha": 1.0, "inner": digits}, 3),  # integers stay
            (
                LengthPenalty,
                {"alpha": 10**30, "target": 3, "inner": digits},
                1e30,
            ),  # but for those that torch can't take
            (LengthBucketed, {"edges": [np.int32(3), np.float32(5.5)]}, [3, 5.5]),
            (Mix, {"parts": [(np.float32(0.5), "rank")]}, [[0.5, {"kind": "rank"}]]),
            (RepetitionPenalty, {"ngram_size": 3.0, "inner": digits}, 3),
            (RetryReward, {"retries": 2.0, "inner": digits}, 2),
            (RewardModel, {"label": 0.0, "model": "m"}, 0),
            (RewardModel, {"max_length": 3.0, "model": "m"}, 3),
            (RewardModel, {"bits": 8.0, "model": "m"}, 8),
            (RewardModel, {"model": Text("m")}, "m"),
            (MovingAnchor, {"rank": 4.0, "every": np.float64(5)}, 4),
            (PairwiseWinRate, {"seed": 1.0, "judge": digits}, 1),
            (LinearBeta, {"steps": 5e2, "start": 1, "end": 0}, 500),
        ],
    )
    def test_are_what_the_strategy_holds_and_writes(self, cls, fields, expected):
        strategy, name = cls(**fields), next(iter(fields))
        spec = to_spec(strategy)
        assert repr(spec[name]) == repr(expected)  # 3.0 == 3, but is no index
        assert yaml.safe_load(yaml.safe_dump(spec)) == spec
        assert type(getattr(strategy, name)) in (int, float, str, bool, tuple)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"eps": True}, "`eps` must be >= 0, got True"),
            ({"eps": np.True_}, "`eps` must be >= 0, got True"),
            ({"eps": Decimal("0.1")}, r"`eps` must be >= 0, got Decimal\('0.1'\)"),
            ({"eps": 10**400}, r"`eps` must be >= 0, got 10{199}\.\.\. of type int"),
            ({"eps": 10**5000}, "`eps` must be >= 0, got an int too large to show"),
            ({"eps": np.ones(2)}, r"`eps` must be >= 0, got array\(\[1., 1.\]\)"),
            ({"ddof": np.False_}, "`ddof` must be one of 0, 1, got False"),
            ({"ddof": "1"}, "`ddof` must be one of 0, 1, got '1' as text"),
            ({"ddof": np.ones(2)}, "`ddof` must be one of 0, 1, got array"),
            ({"scale": "grop"}, "got 'grop'; did you mean 'group'?"),
        ],
    )
    def test_others_are_refused(self, fields, message):
        with pytest.raises(ConfigError, match=message):
            ZScore(**fields)

    @pytest.mark.parametrize(
        ("bits", "message"),
        [("none", "must be one of 4, 8, None, got 'none'; None is written null in YAML"), ("4", "got '4' as text")],
    )
    def test_text_where_words_and_numbers_are_chosen_from(self, bits, message):
        with pytest.raises(ConfigError, match=message):
            RewardModel("m", bits=bits)

    def test_numbers_that_yaml_takes_for_text(self):
        spec = yaml.safe_load("{kind: mix, parts: [[1e-1, {kind: length_bucketed, edges: [1e1, 2e2], min_size: 1e1}]]}")
        ((weight, bucketed),) = from_spec(spec, family="advantage").parts
        assert (weight, bucketed.edges, bucketed.min_size) == (0.1, (10.0, 200.0), 10)


@pytest.mark.parametrize("spec", [' {"kind": "zscore", "ddof": 0}', {"kind": "chain", "strategy": '{"kind": "rank"}'}])
def test_a_spec_may_be_json_text(spec):
    assert from_spec(spec, family="advantage") in (ZScore(ddof=0), Chain(Rank()))
    with pytest.raises(SpecError, match="not valid JSON"):
        from_spec("{oops", family="advantage")


def test_a_list_field_may_be_json_text():
    assert build_field("rewards", '["tests.tiny:digits"]') == [digits]
    with pytest.raises(SpecError, match=r"`advantage`: a spec .* got \['rank'\] of type list"):
        build_field("advantage", '["rank"]')


def nested(depth):
    spec = "rank"
    for _ in range(depth):
        spec = {"kind": "chain", "strategy": spec}
    return spec


def test_specs_nest_as_deep_as_anybody_means():
    assert to_spec(from_spec(nested(40), family="advantage"))["strategy"]["kind"] == "chain"
    itself = {"kind": "chain"}
    itself["strategy"] = itself
    laughs = ["rank"] * 9
    for _ in range(9):
        laughs = [laughs] * 9
    for spec in (nested(300), itself, {"kind": "mix", "parts": laughs}, '{"kind": ' + "[" * 5000):
        with pytest.raises(SpecError, match=r"must nest at most 50 deep|not valid JSON"):
            from_spec(spec, family="advantage")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise SystemExit(5)", "SystemExit: 5"),
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
        ("def (", "SyntaxError: "),
        (None, "TypeError: the 'package' argument is required"),
    ],
)
def test_a_module_that_raises_when_it_is_imported(tmp_path, monkeypatch, source, reason):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"raises_{reason[:4]}"
    (tmp_path / f"{name}.py").write_text(source or "")
    path = f"{name if source else '.x'}:Name"
    with pytest.raises(SpecError, match=f"cannot import '{path}': {reason}") as caught:
        from_spec(path, family="advantage")
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("name", ["an_object", "a_lambda", "a_partial", "an_object.method"])
def test_what_has_no_path_of_its_own_keeps_the_one_it_was_given_by(name):
    path = f"tests.test_specs:{name}"
    assert to_spec(from_spec(path, family="reward")) == path
    wrapped = from_spec({"kind": "clip_reward", "low": 0, "high": 1, "inner": path}, family="reward")
    assert to_spec(wrapped)["inner"] == path
    with pytest.raises(SpecError, match="cannot write"):
        to_spec(Scores())


def test_a_models_own_code_is_refused_however_it_is_written():
    for spec in ({"kind": "reward_model", "model": "m", "trust_remote_code": True},
                 '{"kind": "reward_model", "model": "m", "trust_remote_code": true}'):  # fmt: skip
        with pytest.raises(SpecError, match="sets `trust_remote_code`"):
            from_spec(spec, family="reward", remote=True)
        assert from_spec(spec, family="reward").trust_remote_code is True


@pytest.mark.parametrize("family", [["a"], None, "advantages"])
def test_a_family_that_is_none(family):
    with pytest.raises(SpecError, match="unknown strategy family"):
        from_spec("rank", family=family)
