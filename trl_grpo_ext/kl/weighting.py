"""Which weighting an estimator needs for a right gradient, and which it must not be given."""

from __future__ import annotations

import warnings

from trl_grpo_ext._validate import check_choice
from trl_grpo_ext.errors import ConfigError, GRPOExtWarning
from trl_grpo_ext.kl.base import WEIGHTINGS, KLEstimator

_REFUSED = {
    "zero": "its expected gradient is zero, so it would regularise nothing",
    "wrong": "its expected gradient is not that of the KL",
    "unused": "it sums over the vocabulary instead of sampling, so there is no ratio to correct for",
}


def exact_weighting(estimator: KLEstimator) -> str | None:
    """Return the weighting under which the estimator's expected gradient is exact on- and off-policy, else None.

    Of two exact ones the weighted: a plain term is exact on-policy only.

    >>> from trl_grpo_ext.kl import K2, K3
    >>> exact_weighting(K3()), exact_weighting(K2())
    ('ratio', 'detached')
    """
    exact = [weighting for weighting in ("ratio", "detached", "none") if estimator.gradient[weighting] == "exact"]
    return exact[0] if exact else None


def resolve_weighting(
    estimator: KLEstimator | None, kl_weighting: str = "auto", use_bias_correction_kl: bool | None = None
) -> str | None:
    """Return "none", "ratio" or "detached" for an estimator and the two settings that may choose it.

    Without an estimator there is nothing to weight: None, and an explicit `kl_weighting` is an error.

    `use_bias_correction_kl` is TRL's name for "ratio" (True) or "none" (False); None leaves the choice to
    `kl_weighting`. Raises `ConfigError` if both are set and differ, or if the choice makes the expected gradient zero
    or wrong; warns if it makes it the forward KL's or biased.

    >>> from trl_grpo_ext.kl import K2
    >>> resolve_weighting(K2())
    'detached'
    """
    check_choice("kl_weighting", kl_weighting, ("auto", *WEIGHTINGS))
    if estimator is None:
        if kl_weighting != "auto":
            raise ConfigError(f"`kl_weighting={kl_weighting!r}` has no effect without `kl`; set `kl`, e.g. `kl='k3'`")
        return None
    explicit, setting = _explicit(kl_weighting, use_bias_correction_kl)
    best = exact_weighting(estimator)
    if explicit is None:
        if best is None:
            _warn(f"KL estimator {estimator!r} has no weighting with an exact gradient; it is left plain and biased")
        return best or "none"
    quality = estimator.gradient[explicit]
    if quality in _REFUSED:
        raise ConfigError(
            f"KL estimator {estimator!r} with {setting}: {_REFUSED[quality]}. "
            f"Use `kl_weighting='auto'` (here: {best or 'none'!r}) and leave `use_bias_correction_kl` unset"
        )
    if quality != "exact":
        meaning = "that of the forward KL(reference || policy)" if quality == "forward" else "biased"
        _warn(f"KL estimator {estimator!r} with {setting}: its expected gradient is {meaning}")
    return explicit


def _explicit(kl_weighting: str, use_bias_correction_kl: bool | None) -> tuple[str | None, str]:
    """Return the weighting that was asked for (None: none was) and the setting that did, for messages."""
    ours = None if kl_weighting == "auto" else kl_weighting
    if use_bias_correction_kl is None:
        return ours, f"kl_weighting={kl_weighting!r}"
    from_trl = "ratio" if use_bias_correction_kl else "none"
    if ours not in (None, from_trl):
        raise ConfigError(
            f"`kl_weighting={kl_weighting!r}` and `use_bias_correction_kl={use_bias_correction_kl}` "
            f"(which means {from_trl!r}) contradict each other; set one of them"
        )
    if ours is None:
        return from_trl, f"use_bias_correction_kl={use_bias_correction_kl} (weighting {from_trl!r})"
    return ours, f"kl_weighting={kl_weighting!r}"


def _warn(message: str) -> None:
    warnings.warn(message, GRPOExtWarning, stacklevel=3)
