"""Beta control: the numbers by hand, the borders, and continuing from a checkpoint."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_ext.errors import ConfigError, StateError
from trl_grpo_ext.kl import AdaptiveBeta, ConstantBeta, LinearBeta


def adaptive(**fields):
    return AdaptiveBeta(**{"target": 0.1, "horizon": 100, "min": 0.001, "max": 0.5, **fields})


def test_adaptive_by_hand():
    control = adaptive()
    assert control.begin(0.01) == control.beta == 0.01
    # kl/target - 1 = 0.1, within the clip: 0.01 * (1 + 0.1 * 16/100) = 0.01016
    assert control.update(kl=0.11, n=16) == pytest.approx(0.01016, rel=1e-12)
    # 4 - 1 = 3, clipped to 0.2: 0.01016 * (1 + 0.2 * 0.16) = 0.01048512
    assert control.update(kl=0.4, n=16) == pytest.approx(0.01048512, rel=1e-12)
    # -1, clipped to -0.2: 0.01048512 * (1 - 0.032) = 0.01014959616
    assert control.update(kl=0.0, n=16) == pytest.approx(0.01014959616, rel=1e-12)
    # On target nothing moves; n weighs the step: 0.01014959616 * (1 + 0.1 * 50/100)
    assert control.update(kl=0.1, n=16) == pytest.approx(0.01014959616, rel=1e-12)
    assert control.update(kl=0.11, n=50) == pytest.approx(0.010657075968, rel=1e-12)


def test_adaptive_stays_within_its_borders():
    control = adaptive(min=0.009, max=0.011)
    control.begin(0.01)
    assert [control.update(kl=9.0, n=100) for _ in range(3)] == [0.011] * 3
    assert [control.update(kl=0.0, n=100) for _ in range(3)] == [0.009] * 3
    # 1 - 0.2 * 1000/100 = -1 would turn the sign.
    assert control.update(kl=0.0, n=1000) == 0.009


def test_adaptive_with_kls_that_are_no_number():
    control = adaptive()
    control.begin(0.01)
    assert control.update(kl=math.nan, n=10) == 0.01
    assert control.update(kl=math.inf, n=10) == pytest.approx(0.01 * 1.02)
    assert control.update(kl=-0.5, n=0) == pytest.approx(0.01 * 1.02)


@settings(max_examples=60, deadline=None)
@given(
    kls=st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=20),
    n=st.integers(0, 10_000),
    low=st.floats(0, 1),
    high=st.floats(1, 10),
)
def test_adaptive_is_within_its_borders_for_any_kl(kls, n, low, high):
    control = adaptive(min=low, max=high)
    control.begin(1.0)
    for kl in kls:
        assert low <= control.update(kl=kl, n=n) <= high


def test_adaptive_finds_the_beta_that_holds_its_target():
    """A policy whose KL is 0.01/beta: the target 0.1 is held at beta 0.1."""
    control = adaptive(horizon=200)
    beta = control.begin(0.01)
    for _ in range(200):
        beta = control.update(kl=0.01 / beta, n=32)
    assert beta == pytest.approx(0.1, rel=0.01)


def test_linear_by_hand():
    control = LinearBeta(start=0.08, end=0.02, steps=3)
    assert control.begin() == 0.08
    betas = [control.update(kl=math.nan, n=8) for _ in range(5)]
    assert betas == pytest.approx([0.06, 0.04, 0.02, 0.02, 0.02])
    assert betas[2:] == [0.02] * 3  # exactly the end
    assert LinearBeta(start=0.0, end=0.1, steps=1).begin() == 0.0


@pytest.mark.parametrize("control", [ConstantBeta(value=0.02), LinearBeta(start=0.02, end=0.1, steps=9)], ids=repr)
def test_a_start_of_its_own_comes_before_the_trainers_beta(control):
    assert control.beta == control.begin() == control.begin(0.5) == 0.02


def test_constant():
    control = ConstantBeta()
    assert control.begin(0.04) == 0.04
    assert [control.update(kl=9.0, n=8) for _ in range(3)] == [0.04] * 3
    assert ConstantBeta(value=0.02).begin() == 0.02


@pytest.mark.parametrize(
    "make", [lambda: adaptive(), lambda: LinearBeta(start=0.02, end=0.1, steps=9), ConstantBeta], ids=["a", "l", "c"]
)
@pytest.mark.parametrize("at", [0, 1, 7])
def test_continues_exactly_from_a_checkpoint(make, at):
    kls = [0.3, 0.01, 0.12, 0.0, 1.0, 0.1, 0.09, 0.2, 0.05, 0.11]
    through = make()
    betas = [through.begin(0.02), *(through.update(kl=kl, n=16) for kl in kls)]
    first = make()
    first.begin(0.02)
    for kl in kls[:at]:
        first.update(kl=kl, n=16)
    saved = json.dumps(first.state_dict())
    second = make()
    second.begin(0.02)
    second.load_state_dict(json.loads(saved))
    assert second.beta == betas[at]
    assert [second.update(kl=kl, n=16) for kl in kls[at:]] == betas[at + 1 :]
    assert second.state_dict() == through.state_dict()


def test_a_constant_changed_by_hand_takes_effect_when_resuming():
    saved = ConstantBeta(value=0.01).state_dict()
    control = ConstantBeta(value=0.02)
    control.begin()
    control.load_state_dict(saved)
    assert control.beta == 0.02


def test_objects_do_not_share_their_state_and_begin_starts_over():
    one, two = adaptive(), adaptive()
    for control in (one, two):
        control.begin(0.01)
    one.update(kl=1.0, n=16)
    assert two.beta == 0.01
    assert one == two  # equality is about the settings
    assert one.begin(0.02) == 0.02
    assert one.state_dict() == {"beta": 0.02, "step": 0}


@pytest.mark.parametrize(
    ("control", "beta", "message"),
    [
        (ConstantBeta(), 0.0, r"`beta` is 0, so ConstantBeta\(value=None\) has nothing to start from"),
        (adaptive(), 0.0, "`beta` is 0, so AdaptiveBeta"),
        (adaptive(), 0.9, r"`beta` must start within \[min, max\] of AdaptiveBeta.*, got 0.9"),
        (ConstantBeta(), -1.0, "`beta` must be >= 0, got -1.0"),
    ],
)
def test_what_cannot_begin(control, beta, message):
    with pytest.raises(ConfigError, match=message):
        control.begin(beta)


@pytest.mark.parametrize("make", [lambda: adaptive(), ConstantBeta, lambda: LinearBeta(start=0.1, end=0.2, steps=4)])
def test_the_state_before_the_start_can_be_loaded(make):
    fresh = make().state_dict()
    assert fresh == {"beta": None, "step": 0}
    control = make()
    control.load_state_dict(fresh)
    assert control.begin(0.1) == pytest.approx(0.1)


def test_adaptive_must_be_begun():
    with pytest.raises(ConfigError, match="nothing to start from"):
        adaptive().update(kl=0.1, n=8)


@pytest.mark.parametrize("state", [{}, {"beta": 0.1}, {"beta": None, "step": 1}, {"beta": 0.1, "step": -1}, None])
def test_a_state_that_does_not_fit(state):
    with pytest.raises(StateError, match="cannot continue AdaptiveBeta"):
        adaptive().load_state_dict(state)
