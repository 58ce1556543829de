"""The table of all references: what each one must do, whatever it is."""

from __future__ import annotations

import pickle

import pytest

from trl_grpo_ext import reference
from trl_grpo_ext.errors import ConfigError, SpecError
from trl_grpo_ext.reference import AdapterOff, FrozenAdapter, FullCopy, MovingAnchor, ReferenceStrategy
from trl_grpo_ext.specs import from_spec, kinds, to_spec

REFERENCES = {
    "adapter_off": (AdapterOff(), {}, "AdapterOff()"),
    "frozen_adapter": (FrozenAdapter(), {}, "FrozenAdapter()"),
    "moving_anchor": (
        MovingAnchor(every=5, alpha=0.6, rank=2),
        {"every": 5, "alpha": 0.6, "rank": 2},
        "MovingAnchor(every=5, alpha=0.6, rank=2)",
    ),
    "full_copy": (FullCopy(), {}, "FullCopy()"),
}

INVALID = [
    ({"every": 0}, "`every` must be an integer >= 1, got 0"),
    ({"every": 2.5}, "`every` must be an integer >= 1, got 2.5"),
    ({"every": True}, "`every` must be an integer >= 1, got True"),
    ({"every": 1, "alpha": 0.0}, "`alpha` must be > 0 and <= 1, got 0.0"),
    ({"every": 1, "alpha": 1.5}, "`alpha` must be > 0 and <= 1, got 1.5"),
    ({"every": 1, "alpha": float("nan")}, "`alpha` must be > 0 and <= 1, got nan"),
    ({"every": 1, "rank": 0}, "`rank` must be an integer >= 1 or None, got 0"),
]


def test_the_table_is_complete():
    assert set(kinds("reference")) == set(REFERENCES)


@pytest.mark.parametrize("kind", REFERENCES)
def test_spec_pickle_and_repr(kind):
    strategy, fields, text = REFERENCES[kind]
    assert to_spec(strategy) == {"kind": kind, **fields}
    assert from_spec(to_spec(strategy), family="reference") == strategy
    assert to_spec(from_spec(to_spec(strategy), family="reference")) == to_spec(strategy)
    assert pickle.loads(pickle.dumps(strategy)) == strategy
    assert repr(strategy) == text
    assert hash(strategy) == hash(pickle.loads(pickle.dumps(strategy)))


@pytest.mark.parametrize("kind", REFERENCES)
def test_it_says_what_it_is(kind):
    strategy = REFERENCES[kind][0]
    assert isinstance(strategy, ReferenceStrategy)
    assert strategy.name == kind
    assert strategy.meaning
    assert type(strategy).__name__ in reference.__all__
    assert type(strategy).__doc__.count(">>>") >= 1


def test_fields_are_keyword_only():
    with pytest.raises(TypeError):
        MovingAnchor(5)


@pytest.mark.parametrize(("fields", "message"), INVALID)
def test_invalid_fields(fields, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        MovingAnchor(**fields)


def test_misspelt_fields_and_kinds_name_the_nearest():
    with pytest.raises(SpecError, match="every"):
        from_spec({"kind": "moving_anchor", "evry": 3}, family="reference")
    with pytest.raises(SpecError, match="needs `every`"):
        from_spec("moving_anchor", family="reference")
    with pytest.raises(SpecError, match="frozen_adapter"):
        from_spec("frozen_adaptor", family="reference")


def test_yaml_numbers_as_text():
    assert from_spec({"kind": "moving_anchor", "every": 3, "alpha": "6e-1"}, family="reference").alpha == 0.6


def test_all_names_exist():
    assert all(hasattr(reference, name) for name in reference.__all__)
