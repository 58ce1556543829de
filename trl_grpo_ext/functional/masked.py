"""Reductions over masked tokens. Masked-out entries are replaced, never multiplied: ``inf * 0`` is NaN."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of `values` where `mask` (same shape, bool or 0/1) is set; whatever stands elsewhere is ignored."""
    return torch.where(mask.bool(), values, 0.0).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of `values` where `mask` is set; 0 if it is set nowhere."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)
