"""The trainer's reference: set up at the start, kept apart from the policy, moved, and the same after resuming."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from trl_grpo_ext import _trl
from trl_grpo_ext._trl import GRPOTrainer
from trl_grpo_ext.errors import ConfigError, GRPOExtWarning
from trl_grpo_ext.kl import BetaControl
from trl_grpo_ext.reference import (
    ReferenceStrategy,
    check_resumed,
    check_trainable,
    default_reference,
    kept_dtypes,
    preserved,
    start_warning,
    stock_reference,
)


class ReferenceMixin(GRPOTrainer):
    """Puts a `ReferenceStrategy` behind TRL's reference pass, which it leaves as it is."""

    reference: ReferenceStrategy | None = None
    beta_control: BetaControl | None = None
    _reference: ReferenceStrategy | None = None
    """What the KL is measured against: `reference`, or what stands in for it; None without a KL."""
    _own_reference: bool = False
    _check_start: bool = False

    @contextmanager
    def _reference_chosen(self, reference: ReferenceStrategy | None, model: Any, args: Any) -> Iterator[Any]:
        """Around TRL's construction: give the reference to set up, and see that TRL makes none of its own beside it."""
        if reference is None and args.beta != 0:
            reference = default_reference(model)
        if reference is None or not hasattr(model, "peft_config"):  # TRL makes none, or the right one
            yield reference
            return
        _trl.refuse_liger(args)  # which would keep the 0 for good
        with _trl.overridden(args, beta=0.0):
            yield reference
        self.beta = args.beta

    def _set_up_reference(self, reference: ReferenceStrategy | None) -> str:
        """Bring the policy into the state that gives `reference`, or see which one TRL gave it; say so for the log."""
        policy = self.accelerator.unwrap_model(self.model)
        check_trainable(policy)
        if self.args.beta == 0:
            return ""
        self._own_reference = reference is not None
        if reference is None:
            self._reference = stock_reference(policy, self.ref_model)
            self._check_start = True
        else:
            if reference.moves and (how := _trl.sharding(self)):
                raise ConfigError(
                    f"reference {reference!r} moves whole adapter weights, which {how} splits over processes; use DDP "
                    "or ZeRO stage 2, or a reference that stays"
                )
            reference.prepare(policy)
            self._reference = reference
            self._check_start = reference.starts_at_policy(policy)
        chosen = "" if self.reference is not None else ", TRL's default here"
        return f"; the KL is measured against {self._reference.meaning} ({self._reference.name}{chosen})"

    def _reference_step(self, step: int) -> None:
        """At the end of optimiser step `step`: look at the first KL, and move a reference that moves."""
        if self._reference is None:
            return
        policy = self.accelerator.unwrap_model(self.model)
        if self._check_start and step == 1 and (kl := _trl.first_metric(self, "kl")) is not None:
            message = start_warning(kl, self._reference, policy, half=self.args.bf16 or self.args.fp16)
            if message and self.accelerator.is_main_process:
                warnings.warn(message, GRPOExtWarning, stacklevel=2)
        _trl.log_metrics(self, self._reference.after_step(policy, step))

    @contextmanager
    def _reference_kept_apart(self) -> Iterator[None]:
        """See to it that TRL makes its reference pass whenever a KL is wanted, and that the pass changes nothing."""
        policy = _trl.policy_of(self) if self.beta != 0 or self.beta_control is not None else None
        # A beta that a control has taken to 0 still has a KL to watch; TRL would skip the pass.
        with (
            _trl.overridden(self, beta=self.beta or 1.0) if self.beta_control is not None else nullcontext(),
            preserved(policy) if policy is not None else nullcontext(),
        ):
            yield

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        policy = _trl.policy_of(self) if self._own_reference else None
        with kept_dtypes(policy) if policy is not None else nullcontext():
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        ours = self._reference if self._own_reference else None
        if checkpoint is not None and ours is not None and _trl.sharding(self) != "FSDP":  # which loads no folders
            check_resumed(checkpoint, ours)
