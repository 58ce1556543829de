"""The reference that follows the policy: what TRL's `sync_ref_model` does, for LoRA."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

from trl_grpo_ext._validate import check_number
from trl_grpo_ext.reference.adapters import (
    add_reference,
    differs_from_base,
    lora_pairs,
    mix_into_reference,
    policy_adapter,
)
from trl_grpo_ext.reference.base import ReferenceStrategy
from trl_grpo_ext.reference.checks import check_adapter_policy, check_lora, check_not_partitioned

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MovingAnchor(ReferenceStrategy):
    """A reference adapter that moves towards the policy at the end of every `every`-th optimiser step.

    ``anchor <- alpha * policy + (1 - alpha) * anchor``, in the products ``scaling * B @ A`` that the adapters add to
    the weights, module by module; A and B apart would mix into something else. A mixture has the rank of both together
    and is truncated back, by an SVD of the small factors that never forms the full matrix, to the policy's rank, or to
    `rank` if given. The relative error of that is logged as ``reference/move_error`` (all modules together) and
    ``reference/move_error_max`` (the worst module). ``alpha=1`` copies the adapter bit for bit.

    It starts where the policy's adapter starts. Extra weights: the adapter. Weights that are no LoRA factors
    (`modules_to_save`, trainable tokens) are mixed as they are. Its state is the adapter ``ref`` in each checkpoint.

    Use it in long runs, where the KL to a fixed reference grows until it stops the learning; with a reference that
    moves, beta bounds the speed of the policy, not how far it gets. Completions that were generated before a move
    (`num_iterations` or `steps_per_generation` above 1) keep the log-probs of the anchor they were generated under.
    Plain LoRA and rsLoRA, on quantized bases too (nothing is merged); DoRA, other PEFT types and sharded weights
    (ZeRO-3, FSDP) are refused.

    Raises `ConfigError` unless ``every >= 1``, ``0 < alpha <= 1`` and ``rank`` is None or >= 1.

    >>> MovingAnchor(every=50, alpha=0.6)
    MovingAnchor(every=50, alpha=0.6, rank=None)

    Reference: https://arxiv.org/abs/2404.09656 (the same for full fine-tuning).
    """

    every: int
    alpha: float = 1.0
    rank: int | None = None

    kind: ClassVar[str] = "moving_anchor"
    meaning: ClassVar[str] = "an adapter that follows the policy"
    needs_adapter: ClassVar[bool | None] = True
    keeps_adapter: ClassVar[bool] = True
    moves: ClassVar[bool] = True

    def validate(self) -> None:
        check_number("every", self.every, at_least=1, integer=True)
        check_number("alpha", self.alpha, above=0, at_most=1)
        check_number("rank", self.rank, at_least=1, integer=True, optional=True)

    def prepare(self, model: Any) -> None:
        self.check_adapter(hasattr(model, "peft_config"))
        check_adapter_policy(model, self.kind)
        check_not_partitioned(model, self.kind)
        source = policy_adapter(model)
        check_lora(model, source, self.kind)
        add_reference(model, source, rank=self.rank)
        error, _ = mix_into_reference(model, source, alpha=1.0)
        if not self.starts_at_policy(model):
            logger.warning(
                "Reference %r with rank=%s cuts the policy's adapter, of a larger rank, when it starts: relative error "
                "%.3g. The KL is not zero at the first step.",
                self.kind, self.rank, error,
            )  # fmt: skip

    def starts_at_policy(self, model: Any) -> bool:
        source = policy_adapter(model)
        ranks = [pair.A.size(0) for pair in lora_pairs(model, source).values()]
        return self.rank is None or max(ranks, default=0) <= self.rank or not differs_from_base(model, source)

    def after_step(self, model: Any, step: int) -> dict[str, float]:
        if step % self.every != 0:
            return {}
        error, worst = mix_into_reference(model, policy_adapter(model), self.alpha)
        return {"reference/move_error": error, "reference/move_error_max": worst}
