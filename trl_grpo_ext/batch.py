"""The global reward batch: what advantage strategies and shaping see."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from trl_grpo_ext.errors import ShapeError


@dataclass(frozen=True, kw_only=True)
class RewardBatch:
    """Rewards of one generation batch, gathered over all processes, rows in group order.

    Shapes: N completions, F reward functions; N is a multiple of G = `num_generations`, and rows ``g * G`` to
    ``(g + 1) * G - 1`` answer the same prompt. Raises `ShapeError` (a ``ValueError``) if the shapes disagree.
    """

    rewards: Tensor
    """`(N, F)` float; NaN where a function did not score a row. An infinite cell counts as NaN."""
    weights: Tensor
    """`(F,)` weight of each function."""
    lengths: Tensor
    """`(N,)` int64 completion lengths in tokens."""
    truncated: Tensor
    """`(N,)` bool: no end-of-sequence token within `max_completion_length`."""
    num_generations: int
    """G, the group size."""
    names: tuple[str, ...]
    """The reward functions' names."""
    training: bool = True
    prompts: list | None = None
    """Gathered only when a strategy says ``needs_text = True``."""
    completions: list | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        if self.rewards.dim() != 2:
            raise ShapeError(f"`rewards` must be (N, F), got shape {tuple(self.rewards.shape)}")
        n, f = self.rewards.shape
        for field, expected in {"weights": (f,), "lengths": (n,), "truncated": (n,)}.items():
            got = tuple(getattr(self, field).shape)
            if got != expected:
                raise ShapeError(f"`{field}` must have shape {expected} for rewards of shape {(n, f)}, got {got}")
        if len(self.names) != f:
            raise ShapeError(f"`names` must name {f} reward functions, got {len(self.names)}: {self.names}")
        if self.num_generations < 1 or n % self.num_generations:
            raise ShapeError(
                f"the batch must hold whole groups: {n} rows do not divide by num_generations={self.num_generations}"
            )
        for field in ("prompts", "completions"):
            value = getattr(self, field)
            if value is not None and len(value) != n:
                raise ShapeError(f"`{field}` must hold {n} entries, got {len(value)}")

    @cached_property
    def cells(self) -> Tensor:
        """`(N, F)` float64 rewards with infinite cells turned into NaN."""
        device = torch.device("cpu") if self.rewards.device.type == "mps" else self.rewards.device
        rewards = self.rewards.detach().to(device, torch.float64)
        return torch.where(rewards.isinf(), torch.nan, rewards)

    @cached_property
    def scores(self) -> Tensor:
        """`(N,)` weighted sum of each row's finite cells; NaN where no function scored the row."""
        weights = self.weights.to(self.cells.device, torch.float64)
        limit = torch.finfo(torch.float32).max
        scores = (self.cells * weights).nansum(dim=1).clamp(-limit, limit)
        scores = torch.where(self.cells.isnan().all(dim=1), torch.nan, scores)
        return scores.to(self.rewards.device, torch.promote_types(self.rewards.dtype, torch.float32))

    @cached_property
    def groups(self) -> Tensor:
        """`(N,)` int64 group ids ``0 .. N // G - 1``."""
        return torch.arange(len(self.rewards), device=self.rewards.device) // self.num_generations
