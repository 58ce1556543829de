"""Per-token values and gradients of verl's and TRL's KL terms, and why some of them are not ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trl_grpo_ext.kl import K1, K2, K3, AbsK, K3Plus

CASES = json.loads((Path(__file__).parents[1] / "data/golden/kl.json").read_text())["cases"]

# The peer's name of a variant -> ours. verl's "+" takes the gradient of k2 and keeps the value.
OURS = {
    "kl": K1(),
    "k1": K1(),
    "abs": AbsK(),
    "mse": K2(),
    "k2": K2(),
    "mse+": K2(),
    "k2+": K2(),
    "low_var_kl": K3(),
    "k3": K3(),
    "low_var_kl+": K3Plus(),
    "k3+": K3Plus(),
}

SKIPPED = {
    "kl+": "no such estimator: the value of k1 with the gradient of k2 is K3Plus with a noisier value",
    "k1+": "no such estimator: the value of k1 with the gradient of k2 is K3Plus with a noisier value",
    "abs+": "no such estimator: |d| estimates no KL",
}


def agreed(case, d):
    """Where a peer's number is comparable, and the relative error it carries, `(T,)` each."""
    exact = torch.full_like(d, 1e-12 if case["dtype"] == "float64" else 1e-6)
    if case["peer"] == "trl":
        # TRL's autograd subtracts terms of size exp(-d), and has no clamp; ours begins at 20.
        eps = torch.finfo(getattr(torch, case["dtype"])).eps
        return d.abs() < 20, exact + 4 * eps * torch.exp(-d)
    if "k3" in case["params"]["kl_penalty"] or "low_var" in case["params"]["kl_penalty"]:
        # verl also clamps the *value* of k3 at 10, and loses the gradient there: DESIGN section 5 says otherwise.
        return torch.exp(-d) - 1 + d < 10, exact
    return torch.ones_like(d, dtype=torch.bool), exact


@pytest.mark.parametrize("case", CASES, ids=[f"{case['id']}-{case['dtype']}" for case in CASES])
def test_golden(case):
    variant = case["params"].get("kl_penalty", "k3")
    if variant in SKIPPED:
        pytest.skip(SKIPPED[variant])
    dtype = getattr(torch, case["dtype"])
    inputs = {name: torch.tensor([values], dtype=torch.float64) for name, values in case["inputs"].items()}
    golden = {
        name: torch.tensor([[float(x) for x in values]], dtype=torch.float64)
        for name, values in case["outputs"].items()
    }
    logps = inputs["logp"].to(dtype).requires_grad_()
    weighting = "ratio" if case["params"].get("use_bias_correction_kl") else "none"
    value = OURS[variant](logps, inputs["ref_logp"].to(dtype), weighting=weighting)
    value.sum().backward()

    kept, rtol = agreed(case, inputs["log_ratio"])
    assert kept.sum() >= 30
    if case["peer"] == "trl":
        assert torch.equal(value.detach().double()[kept], golden["value"][kept])
    for ours, theirs in ((value.detach(), golden["value"]), (logps.grad, golden["grad_logp"])):
        error = (ours.double() - theirs).abs()
        assert (error <= rtol * (1 + theirs.abs()))[kept].all(), error[kept].max()
