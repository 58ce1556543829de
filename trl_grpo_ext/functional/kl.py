"""Per-token estimators of ``KL(policy || reference)``: the value by one expression, the gradient by another.

With ``d = log pi - log ref`` on sampled tokens and ``rho = pi / pi_old``, automatic differentiation of
``rho * k3(d)`` subtracts two huge numbers and, once a value is clamped, even points away from the reference. The
derivatives are short, so they are written down instead:

    k          value            dk/dlogp        d(rho k)/dlogp / rho
    k1         d                1               d + 1
    abs        |d|              sign d          |d| + sign d
    k2         d^2 / 2          d               d^2 / 2 + d
    k3         exp(-d) - 1 + d  1 - exp(-d)     d
    k3+        that of k3       that of k2      k3 + d

Suffix: B rows, T tokens. Reference: Schulman, http://joschu.net/blog/kl-approx.html; on gradients,
https://arxiv.org/abs/2506.09477.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO_FP16 = 11.0
"""``exp(11)`` is the largest round power that fits float16, so a float16 leaf's gradient stays finite."""

MAX_LOG_RHO = 20.0
"""The log of the importance ratio is clamped here: beyond ``e^20`` only overflow is left."""


class Estimate(NamedTuple):
    """`(B, T)` value of an estimator and its derivatives by ``log pi``: plain, and of ``rho * k`` divided by rho."""

    value: Tensor
    slope: Tensor
    ratio_slope: Tensor


def k1(d: Tensor) -> Estimate:
    """``d``: unbiased, high variance."""
    return Estimate(d, torch.ones_like(d), d + 1)


def absolute(d: Tensor) -> Estimate:
    """``|d|``: biased in value and gradient."""
    return Estimate(d.abs(), d.sign(), d.abs() + d.sign())


def k2(d: Tensor) -> Estimate:
    """``d^2 / 2``: biased value, exact on-policy gradient."""
    value = d.square() / 2
    return Estimate(value, d, value + d)


def k3(d: Tensor, max_log_ratio: float | None) -> Estimate:
    """``exp(-d) - 1 + d``: unbiased, low variance, non-negative. `d` is clamped before exp and in the linear term."""
    c = -d if max_log_ratio is None else (-d).clamp(-max_log_ratio, max_log_ratio)
    # The order of the operations is TRL's, so that the value is bit for bit its per-token KL.
    return Estimate(torch.exp(c) - c - 1, -torch.expm1(c), d)


def k3_plus(d: Tensor, max_log_ratio: float | None) -> Estimate:
    """Value of k3 with the gradient of k2."""
    value = k3(d, max_log_ratio).value
    return Estimate(value, d, value + d)


def log_ratio(logps: Tensor, other: Tensor) -> Tensor:
    """``logps - other`` without gradient, in float32 at least."""
    dtype = torch.promote_types(logps.dtype, torch.float32)
    return logps.detach().to(dtype) - other.detach().to(dtype)


def weighted(estimate: Estimate, log_rho: Tensor | None, weighting: str) -> tuple[Tensor, Tensor]:
    """Return `(B, T)` value and derivative by ``log pi`` of the loss term under `weighting`.

    `weighting`: "none" leaves k plain, "ratio" multiplies by the differentiable ``rho``, "detached" by ``rho`` held
    fixed. `log_rho` is ``log pi - log pi_old``; None means on-policy, ``rho = 1``.
    """
    slope = estimate.ratio_slope if weighting == "ratio" else estimate.slope
    if weighting == "none" or log_rho is None:
        return estimate.value, slope
    rho = log_rho.clamp(-MAX_LOG_RHO, MAX_LOG_RHO).exp()
    return rho * estimate.value, rho * slope


class ValueWithSlope(torch.autograd.Function):
    """`value` forward, `slope` as its derivative by `logps` backward.

    A token whose incoming gradient is zero (it is masked out) gets gradient zero, whatever its slope: NaN included.
    A float16 gradient saturates at the largest float16 rather than overflow.
    """

    @staticmethod
    def forward(ctx: Any, logps: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        ctx.dtype = logps.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        grad_logps = torch.where(grad == 0, 0.0, grad * slope)
        if ctx.dtype == torch.float16:
            limit = torch.finfo(torch.float16).max
            grad_logps = grad_logps.clamp(-limit, limit)
        return grad_logps.to(ctx.dtype), None, None
