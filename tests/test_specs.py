"""Specs: object to data and back, nesting, third-party kinds, and what may not be imported."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest

from tests.tiny import digits
from trl_grpo_ext import AdvantageStrategy, LengthPenalty, Rank, SpecError, ZScore, from_spec, to_spec
from trl_grpo_ext.specs import FAMILIES, kinds


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
