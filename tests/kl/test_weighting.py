"""Which choices of `kl_weighting` and TRL's `use_bias_correction_kl` are taken, warned about or refused, and why."""

from __future__ import annotations

import warnings

import pytest

from trl_grpo_ext.errors import ConfigError, GRPOExtWarning
from trl_grpo_ext.kl import K1, K2, K3, AbsK, ExactKL, K3Plus, exact_weighting, resolve_weighting

ZERO = "its expected gradient is zero, so it would regularise nothing"
WRONG = "its expected gradient is not that of the KL"
UNUSED = "it sums over the vocabulary instead of sampling, so there is no ratio to correct for"
FORWARD = r"its expected gradient is that of the forward KL\(reference \|\| policy\)"
BIASED = "its expected gradient is biased"
NO_EXACT = "has no weighting with an exact gradient; it is left plain and biased"

# estimator -> (automatic choice, explicit choice -> outcome). An outcome is "ok", or a warning or refusal with reason.
TABLE = [
    (K1(), "ratio", {"none": ("refused", ZERO), "ratio": "ok", "detached": ("refused", ZERO)}),
    (K2(), "detached", {"none": "ok", "ratio": ("refused", WRONG), "detached": "ok"}),
    (K3(), "ratio", {"none": ("warned", FORWARD), "ratio": "ok", "detached": ("warned", FORWARD)}),
    (K3Plus(), "detached", {"none": "ok", "ratio": ("refused", WRONG), "detached": "ok"}),
    (ExactKL(), "none", {"none": "ok", "ratio": ("refused", UNUSED), "detached": ("refused", UNUSED)}),
    (AbsK(), None, dict.fromkeys(("none", "ratio", "detached"), ("warned", BIASED))),
]
EXPLICIT = [(estimator, weighting, row[weighting]) for estimator, _, row in TABLE for weighting in row]


def check(outcome, setting, resolve, expected):
    """Run `resolve` and hold it against a cell of the table; messages name the setting and the reason."""
    if outcome == "ok":
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert resolve() == expected
        return
    verdict, reason = outcome
    if verdict == "refused":
        with pytest.raises(ConfigError, match=rf"{setting}.*: {reason}\. Use `kl_weighting='auto'`"):
            resolve()
    else:
        with pytest.warns(GRPOExtWarning, match=rf"{setting}.*: {reason}"):
            assert resolve() == expected


@pytest.mark.parametrize(("estimator", "best", "row"), TABLE, ids=[row[0].name for row in TABLE])
def test_automatic(estimator, best, row):
    assert exact_weighting(estimator) == best
    if best is None:
        with pytest.warns(GRPOExtWarning, match=NO_EXACT):
            assert resolve_weighting(estimator) == "none"
    else:
        check("ok", "", lambda: resolve_weighting(estimator), best)


@pytest.mark.parametrize(("estimator", "weighting", "outcome"), EXPLICIT, ids=[f"{e.name}-{w}" for e, w, _ in EXPLICIT])
def test_explicit(estimator, weighting, outcome):
    check(outcome, f"kl_weighting='{weighting}'", lambda: resolve_weighting(estimator, weighting), weighting)


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize(("estimator", "best", "row"), TABLE, ids=[row[0].name for row in TABLE])
def test_trls_flag_is_the_same_choice_and_is_named(estimator, best, row, flag):
    weighting = "ratio" if flag else "none"
    setting = rf"use_bias_correction_kl={flag} \(weighting '{weighting}'\)"
    resolve = lambda: resolve_weighting(estimator, use_bias_correction_kl=flag)  # noqa: E731
    check(row[weighting], setting, resolve, weighting)


@pytest.mark.parametrize(
    ("weighting", "flag"), [("none", True), ("detached", True), ("ratio", False), ("detached", False)]
)
def test_contradicting_settings(weighting, flag):
    with pytest.raises(ConfigError, match=f"`kl_weighting='{weighting}'` and `use_bias_correction_kl={flag}`.*contra"):
        resolve_weighting(K3(), weighting, flag)


def test_agreeing_settings():
    assert resolve_weighting(K3(), "ratio", True) == "ratio"
    assert resolve_weighting(K2(), "none", False) == "none"


def test_unknown_weighting_names_the_nearest():
    with pytest.raises(ConfigError, match=r"`kl_weighting` must be one of .*got 'detach'; did you mean 'detached'\?"):
        resolve_weighting(K3(), "detach")
