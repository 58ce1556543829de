"""What strategies returned, checked before it trains: one that is not of this package may return anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trl_grpo_ext.advantages import AdvantageOutput
from trl_grpo_ext.batch import RewardBatch
from trl_grpo_ext.errors import ShapeError, StateError


def checked_advantages(strategy: Any, output: Any, rows: int) -> AdvantageOutput:
    """Return `(rows,)` float32 advantages and their metrics.

    Raises `ShapeError` for anything else than a tensor of that shape and a mapping, `StateError` for advantages that
    are not finite: one would make every weight NaN.
    """
    if not (isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], Mapping)):
        raise ShapeError(
            f"advantage {strategy!r} must return `AdvantageOutput(advantages, metrics)`, got {_told(output)}"
        )
    advantages, metrics = output
    if not isinstance(advantages, Tensor) or advantages.shape != (rows,):
        raise ShapeError(
            f"advantage {strategy!r} must return a tensor of one advantage per row, ({rows},), got {_told(advantages)}"
        )
    bad = int((~advantages.isfinite()).sum())
    if bad:
        raise StateError(
            f"advantage {strategy!r} returned {bad} of {rows} advantages that are not finite, which would make every "
            "weight NaN; a row without a score gets 0"
        )
    return AdvantageOutput(advantages.detach().to(torch.float32), dict(metrics))


def checked_batch(shaping: Any, shaped: Any, before: RewardBatch) -> RewardBatch:
    """Return the batch that `shaping` made of `before`. Raises `ShapeError` unless it is one of the same groups."""
    if not isinstance(shaped, RewardBatch):
        raise ShapeError(f"shaping {shaping!r} must return a RewardBatch, got {_told(shaped)}")
    got, expected = ((len(b.rewards), b.num_generations) for b in (shaped, before))
    if got != expected:
        raise ShapeError(
            f"shaping {shaping!r} must keep the rows and groups of its batch: expected {expected[0]} rows in groups of "
            f"{expected[1]}, got {got[0]} in groups of {got[1]}"
        )
    return shaped


def checked_terms(estimator: Any, terms: Any, logps: Tensor) -> Tensor:
    """Return the KL terms. Raises `ShapeError` unless they have the shape of `logps`, and a gradient where it has."""
    if not isinstance(terms, Tensor) or terms.shape != logps.shape:
        raise ShapeError(
            f"kl {estimator!r} must return a term per token, {tuple(logps.shape)} as the log-probs, got {_told(terms)}"
        )
    if logps.requires_grad and not terms.requires_grad:
        raise ShapeError(
            f"kl {estimator!r} returned terms without a gradient, which would regularise nothing; they must be "
            "differentiable by the policy's log-probs"
        )
    return terms


def check_finite_kl(estimator: Any, total: float) -> None:
    """Raise `StateError` if the KL of a batch is not finite: its gradient would make every weight NaN."""
    if not math.isfinite(total):
        raise StateError(
            f"kl {estimator!r} is {total} on this batch, which would make every weight NaN. Log-probs of policy and "
            "reference are then infinitely far apart or not finite themselves: try 'k3', whose log-ratio is clamped, "
            "smaller steps, or bf16 instead of fp16"
        )


def _told(value: Any) -> str:
    """Return a value's type, and its shape if it has one, for a message."""
    shape = getattr(value, "shape", None)
    return type(value).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")
