"""The table of `docs/kl.md`: what each estimator's expected gradient is, by full enumeration in float64.

One token is drawn from the sampler mu. Putting the whole vocabulary into the T dimension and summing with the weights
mu(x) gives the exact expectation of a loss term, and autograd its gradient by the policy's logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trl_grpo_ext.kl import K1, K2, K3, WEIGHTINGS, AbsK, ExactKL, K3Plus, KLEstimator

TOLERANCE = 1e-10
DIFFERENT = 1e-3  # on generic distributions a gradient that is not the KL's is further from it than this

GOLDEN = json.loads((Path(__file__).parents[1] / "data/golden/exact_kl.json").read_text())["cases"]
ENUMERATED = [K1(), AbsK(), K2(), K3(), K3Plus(), ExactKL()]
IDS = [estimator.name for estimator in ENUMERATED]
CELLS = [(e, weighting) for e in ENUMERATED for weighting in WEIGHTINGS if e.gradient[weighting] != "unused"]

# Section 5 of the contract, row by row: plain, x ratio, x detached ratio.
TABLE = {
    "k1": ("zero", "exact", "zero"),
    "abs": ("biased", "biased", "biased"),
    "k2": ("exact", "wrong", "exact"),
    "k3": ("forward", "exact", "forward"),
    "k3+": ("exact", "wrong", "exact"),
    "exact": ("exact", "unused", "unused"),
}
UNBIASED_VALUE = {"k1", "k3", "k3+", "exact"}

# Logits of policy, reference and sampler; all differ, none is near another.
GENERIC = [
    ([-1.05, 0.93, 0.68, 1.24, 0.89], [0.26, 0.33, 0.94, -0.88, -0.05], [0.5, -0.25, 1.0, 0.75, -1.0]),
    ([0.7, 0.0, -0.4], [-0.4, 0.1, 0.8], [0.0, 0.9, 0.2]),
    ([3.0, -2.0, 0.0, 2.0, -1.5, 0.25], [-2.0, 1.5, 1.0, -1.0, 0.0, 0.5], [1.0, 0.0, -1.0, 1.5, 0.5, -0.5]),
    ([0.4, -0.2], [-0.9, 0.3], [-0.1, 0.6]),
]


class Expected(NamedTuple):
    """Expectation of a loss term and of its gradient by the policy's logits, `(V,)`."""

    value: Tensor
    grad: Tensor


def log_probs(logits: list[float]) -> Tensor:
    return torch.tensor([logits], dtype=torch.float64).log_softmax(-1)


def expected(estimator: KLEstimator, case: tuple[list[float], ...], *, weighting: str) -> Expected:
    """Enumerate the loss term of a `(policy, reference, sampler)` triple of logits; sampler None is the policy."""
    policy, reference, sampler = case
    logits = torch.tensor([policy], dtype=torch.float64, requires_grad=True)
    logps = logits.log_softmax(-1)
    if isinstance(estimator, ExactKL):
        loss = estimator(logps.unsqueeze(1), log_probs(reference).unsqueeze(1), weighting=weighting).sum()
    else:
        old = logps.detach() if sampler is None else log_probs(sampler)
        loss = (old.exp() * estimator(logps, log_probs(reference), old, weighting=weighting)).sum()
    (grad,) = torch.autograd.grad(loss, logits)
    return Expected(loss.detach(), grad[0])


def true_kl(first: list[float], second: list[float]) -> Tensor:
    p, q = log_probs(first)[0], log_probs(second)[0]
    return (p.exp() * (p - q)).sum()


def true_gradients(case: tuple[list[float], ...]) -> dict[str, Tensor]:
    """Gradients by the policy's logits: of ``KL(pi || ref)``, p (log p - log r - KL); of ``KL(ref || pi)``, p - r."""
    p, r = log_probs(case[0])[0], log_probs(case[1])[0]
    reverse = p.exp() * (p - r - true_kl(case[0], case[1]))
    return {"exact": reverse, "forward": p.exp() - r.exp(), "zero": torch.zeros_like(p)}


def which(grad: Tensor, truths: dict[str, Tensor]) -> str:
    """Name the true gradient that `grad` equals; "other" if it is clearly none of them."""
    for name, truth in truths.items():
        if (grad - truth).abs().max() < TOLERANCE:
            return name
    assert all((grad - truth).abs().max() > DIFFERENT for truth in truths.values()), "neither equal nor different"
    return "other"


def measured(estimator: KLEstimator, weighting: str, *, on_policy: bool) -> str:
    """What the enumerated gradient is, the same on every generic triple."""
    found = set()
    for policy, reference, sampler in GENERIC:
        case = (policy, reference, None if on_policy else sampler)
        found.add(which(expected(estimator, case, weighting=weighting).grad, true_gradients(case)))
    assert len(found) == 1, found
    return found.pop()


def test_the_table_is_section_5():
    assert {estimator.name: tuple(estimator.gradient[w] for w in WEIGHTINGS) for estimator in ENUMERATED} == TABLE


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("estimator", ENUMERATED, ids=IDS)
def test_every_cell_is_what_enumeration_finds(estimator, weighting):
    cell = estimator.gradient[weighting]
    if cell == "unused":
        with pytest.raises(ValueError, match="sums over the vocabulary"):
            expected(estimator, (*GENERIC[0][:2], None), weighting=weighting)
        return
    on_policy = measured(estimator, weighting, on_policy=True)
    off_policy = measured(estimator, weighting, on_policy=False)
    if cell in ("wrong", "biased"):
        # Of an estimator that has an exact weighting the others are wrong; one that has none is biased.
        has_exact = any(measured(estimator, w, on_policy=True) == "exact" for w in WEIGHTINGS)
        assert (on_policy, off_policy) == ("other", "other")
        assert cell == ("wrong" if has_exact else "biased")
        return
    assert on_policy == cell
    if weighting == "none" and not isinstance(estimator, ExactKL):
        assert off_policy == "other", "a plain sampled term has nothing to do with the KL off-policy"
    else:
        assert off_policy == cell


@pytest.mark.parametrize("on_policy", [True, False], ids=["on_policy", "off_policy"])
@pytest.mark.parametrize(("estimator", "weighting"), CELLS, ids=[f"{e.name}-{weighting}" for e, weighting in CELLS])
def test_value_is_unbiased_where_it_says_so(estimator, weighting, on_policy):
    for policy, reference, sampler in GENERIC:
        value = expected(estimator, (policy, reference, None if on_policy else sampler), weighting=weighting).value
        error = (value - true_kl(policy, reference)).abs()
        # Off-policy the mean over the sampler's tokens is the KL only when each is weighted by the ratio.
        corrected = on_policy or weighting != "none" or isinstance(estimator, ExactKL)
        if estimator.name in UNBIASED_VALUE and corrected:
            assert error < TOLERANCE
        else:
            assert error > DIFFERENT / 10


@pytest.mark.parametrize("case", GOLDEN, ids=[case["id"] for case in GOLDEN])
@pytest.mark.parametrize("estimator", ENUMERATED, ids=IDS)
def test_golden_expectations(estimator, case):
    inputs, outputs = case["inputs"], case["outputs"]
    triple = (inputs["logits"], inputs["ref_logits"], inputs["sampler_logits"])
    if isinstance(estimator, ExactKL):
        result = expected(estimator, triple, weighting="none")
        assert_close(result.value, outputs["kl"])
        assert_close(result.grad, outputs["grad_kl_logits"])
        return
    golden = outputs["estimators"][estimator.name]
    for weighting, key in {"none": "none", "ratio": "rho", "detached": "rho_detached"}.items():
        result = expected(estimator, triple, weighting=weighting)
        assert_close(result.value, golden[key]["expected_value"])
        assert_close(result.grad, golden[key]["expected_grad_logits"])


@pytest.mark.parametrize("case", GOLDEN, ids=[case["id"] for case in GOLDEN])
@pytest.mark.parametrize("estimator", ENUMERATED[:-1], ids=IDS[:-1])
def test_golden_tokens(estimator, case):
    golden = case["outputs"]["estimators"][estimator.name]
    logps = torch.tensor([case["outputs"]["logp"]], dtype=torch.float64, requires_grad=True)
    value = estimator(logps, torch.tensor([case["outputs"]["ref_logp"]], dtype=torch.float64))
    value.sum().backward()
    assert_close(value[0].detach(), golden["value_per_token"])
    assert_close(logps.grad[0], golden["dvalue_dlogp_per_token"])


logits_lists = st.integers(2, 6).flatmap(
    lambda size: st.tuples(*[st.lists(st.floats(-4, 4, width=32), min_size=size, max_size=size)] * 3)
)


@settings(max_examples=40, deadline=None)
@given(case=logits_lists)
def test_automatic_choice_is_exact_for_any_distributions(case):
    """On- and off-policy, whatever the policy, the reference and the sampler are."""
    truth = true_gradients(case)["exact"]
    for estimator in (K1(), K2(), K3(), K3Plus(), ExactKL()):
        best = {"k1": "ratio", "k3": "ratio", "exact": "none"}.get(estimator.name, "detached")
        for sampler in (None, case[2]):
            grad = expected(estimator, (*case[:2], sampler), weighting=best).grad
            assert (grad - truth).abs().max() < TOLERANCE


def assert_close(actual: Tensor, golden: float | list[float]) -> None:
    expected_value = torch.tensor(golden, dtype=torch.float64)
    torch.testing.assert_close(actual, expected_value, rtol=TOLERANCE, atol=TOLERANCE)
