"""What holds for every KL estimator and every beta control: one table, one row per kind."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any, NamedTuple

import pytest
import torch

import trl_grpo_ext.kl
from trl_grpo_ext.errors import ConfigError, SpecError
from trl_grpo_ext.kl import (
    K1,
    K2,
    K3,
    WEIGHTINGS,
    AbsK,
    AdaptiveBeta,
    BetaControl,
    ConstantBeta,
    ExactKL,
    K3Plus,
    KLEstimator,
    LinearBeta,
)
from trl_grpo_ext.specs import from_spec, kinds, to_spec


class Row(NamedTuple):
    strategy: Any
    spec: dict[str, Any]
    repr: str
    aliases: tuple[str, ...] = ()
    invalid: tuple[tuple[dict[str, Any], str], ...] = ()  # changed fields -> message


ADAPTIVE = {"target": 0.05, "horizon": 800, "min": 0.001, "max": 0.5}
LINEAR = {"start": 0.1, "end": 0.0, "steps": 50}
CLAMPS = (
    ({"max_log_ratio": 0}, "`max_log_ratio` must be > 0 or None, got 0"),
    ({"max_log_ratio": -1.0}, "`max_log_ratio` must be > 0 or None, got -1.0"),
    ({"max_log_ratio": float("inf")}, "`max_log_ratio` must be > 0 or None, got inf"),
    ({"max_log_ratio": "wide"}, "`max_log_ratio` must be > 0 or None, got 'wide'"),
)

ESTIMATORS = [
    Row(K1(), {"kind": "k1"}, "K1()", ("naive",)),
    Row(AbsK(), {"kind": "abs"}, "AbsK()"),
    Row(K2(), {"kind": "k2"}, "K2()", ("mse",)),
    Row(K3(), {"kind": "k3", "max_log_ratio": 20.0}, "K3(max_log_ratio=20.0)", ("low_var_kl",), CLAMPS),
    Row(K3Plus(max_log_ratio=None), {"kind": "k3+", "max_log_ratio": None}, "K3Plus(max_log_ratio=None)", (), CLAMPS),
    Row(ExactKL(), {"kind": "exact"}, "ExactKL()"),
]
CONTROLS = [
    Row(
        ConstantBeta(),
        {"kind": "constant_beta", "value": None},
        "ConstantBeta(value=None)",
        invalid=(({"value": 0.0}, "`value` must be > 0 or None, got 0.0"),),
    ),
    Row(
        LinearBeta(**LINEAR),
        {"kind": "linear_beta", **LINEAR},
        "LinearBeta(start=0.1, end=0.0, steps=50)",
        invalid=(
            ({"start": -0.1}, "`start` must be >= 0, got -0.1"),
            ({"end": float("nan")}, "`end` must be >= 0, got nan"),
            ({"steps": 0}, "`steps` must be an integer >= 1, got 0"),
            ({"steps": 1.5}, "`steps` must be an integer >= 1, got 1.5"),
            ({"start": 0.0}, "`start` and `end` are both 0"),
        ),
    ),
    Row(
        AdaptiveBeta(**ADAPTIVE),
        {"kind": "adaptive_beta", **ADAPTIVE},
        "AdaptiveBeta(target=0.05, horizon=800, min=0.001, max=0.5)",
        invalid=(
            ({"target": 0.0}, "`target` must be > 0, got 0.0"),
            ({"horizon": -1}, "`horizon` must be > 0, got -1"),
            ({"min": -0.1}, "`min` must be >= 0, got -0.1"),
            ({"max": 0.0}, "`max` must be > 0, got 0.0"),
            ({"min": 0.6}, "`min` must be <= `max`, got 0.6 and 0.5"),
        ),
    ),
]
TABLE = ESTIMATORS + CONTROLS
every = pytest.mark.parametrize("row", TABLE, ids=[row.spec["kind"] for row in TABLE])
estimators = pytest.mark.parametrize("row", ESTIMATORS, ids=[row.spec["kind"] for row in ESTIMATORS])
controls = pytest.mark.parametrize("row", CONTROLS, ids=[row.spec["kind"] for row in CONTROLS])


def test_the_table_covers_every_kind():
    for family, rows in (("kl", ESTIMATORS), ("beta", CONTROLS)):
        assert {name for row in rows for name in (row.spec["kind"], *row.aliases)} == set(kinds(family))
    concrete = {
        cls
        for name in trl_grpo_ext.kl.__all__
        if isinstance(cls := getattr(trl_grpo_ext.kl, name), type) and "kind" in vars(cls)
    }
    assert {type(row.strategy) for row in TABLE} == concrete


@every
def test_spec_round_trip(row):
    family = row.strategy.family
    assert to_spec(row.strategy) == row.spec
    rebuilt = from_spec(row.spec, family=family)
    assert rebuilt == row.strategy
    assert type(rebuilt) is type(row.strategy)
    assert to_spec(rebuilt) == row.spec
    for alias in row.aliases:
        assert from_spec({**row.spec, "kind": alias}, family=family) == row.strategy


@every
def test_repr_and_docstring(row):
    assert repr(row.strategy) == row.repr
    assert ">>>" in type(row.strategy).__doc__


@every
def test_pickle_and_copies(row):
    for clone in (pickle.loads(pickle.dumps(row.strategy)), copy.deepcopy(row.strategy)):
        assert clone == row.strategy
        assert repr(clone) == row.repr


@every
def test_frozen_and_keyword_only(row):
    for field in dataclasses.fields(row.strategy):
        if field.init:
            assert field.kw_only
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(row.strategy, field.name, None)


@every
def test_invalid_fields_fail_at_construction(row):
    fields = {name: value for name, value in row.spec.items() if name != "kind"}
    for changed, message in row.invalid:
        with pytest.raises(ConfigError) as direct:
            type(row.strategy)(**{**fields, **changed})
        assert message in str(direct.value)
        with pytest.raises(ConfigError, match=f"kind '{row.spec['kind'].replace('+', '.')}'"):
            from_spec({**row.spec, **changed}, family=row.strategy.family)
    with pytest.raises(SpecError, match="has no field 'max_log_ration'"):
        from_spec({**row.spec, "max_log_ration": 1}, family=row.strategy.family)


@estimators
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_estimator_call(row, dtype):
    """Shape, dtype, extra keywords, an empty batch; and the declared table is complete."""
    estimator = row.strategy
    shape = (2, 3, 5) if estimator.needs_vocabulary else (2, 3)
    logps = (-torch.rand(shape)).to(dtype).requires_grad_()
    value = estimator(logps, logps.detach() - 1, old_logps=logps.detach(), mask=torch.ones(2, 3), step=7, prompts=None)
    value.sum().backward()
    assert isinstance(estimator, KLEstimator)
    assert value.shape == (2, 3)
    assert value.dtype == torch.promote_types(dtype, torch.float32)
    assert logps.grad.dtype == dtype
    assert estimator.name == row.spec["kind"]
    assert tuple(estimator.gradient) == WEIGHTINGS
    empty = torch.zeros((0, *shape[1:]), dtype=dtype, requires_grad=True)
    assert estimator(empty, empty.detach()).shape == (0, 3)


@estimators
def test_no_divergence_no_value(row):
    shape = (1, 2, 4) if row.strategy.needs_vocabulary else (1, 2)
    logps = -torch.rand(shape)
    assert (row.strategy(logps, logps) == 0).all()


@controls
def test_control_begins_updates_and_is_saved_with_its_state(row):
    control = copy.deepcopy(row.strategy)
    assert isinstance(control, BetaControl)
    beta = control.begin(0.1)
    assert beta == control.beta == 0.1
    assert control.update(kl=0.5, n=8) == control.beta
    clone = pickle.loads(pickle.dumps(control))
    assert clone.state_dict() == control.state_dict()
    assert clone.state_dict()["step"] == 1
    assert row.strategy._state.step == 0
    assert "_state" not in to_spec(control)
    assert to_spec(control) == row.spec
