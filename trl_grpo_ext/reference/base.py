"""The contract of a reference: what the KL is measured against."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from trl_grpo_ext._strategy import Strategy
from trl_grpo_ext.errors import ConfigError

REF_ADAPTER = "ref"
"""The adapter that TRL activates for the reference pass if the policy has it; without it, adapters are switched off."""


@dataclass(frozen=True, kw_only=True)
class ReferenceStrategy(Strategy, ABC):
    """Says which weights give the reference log-probs.

    TRL's reference pass runs its second model if there is one, else the policy with the adapter `REF_ADAPTER` active if
    there is one, else the policy with its adapters off. A strategy only has to bring the policy into that state: the
    trainer calls `prepare` once, before the first step, and `after_step` at the end of each.
    """

    family: ClassVar[str] = "reference"
    meaning: ClassVar[str] = ""
    """What the KL is measured against, as the log says it."""
    keeps_adapter: ClassVar[bool] = False
    """Whether the reference's weights are the adapter `REF_ADAPTER`, which is then part of each checkpoint."""
    moves: ClassVar[bool] = False
    """Whether `after_step` changes the reference."""

    needs_adapter: ClassVar[bool | None] = None
    """True: only for a PEFT policy. False: only for one without an adapter. None: for both."""

    @property
    def name(self) -> str:
        """The kind, as the log shows it."""
        return vars(type(self)).get("kind", type(self).__name__)

    def check_adapter(self, present: bool) -> None:
        """Raise `ConfigError` if this reference is not for a policy that has (`present`), or has not, an adapter."""
        if self.needs_adapter and not present:
            raise ConfigError(
                f"reference {self.name!r} needs a PEFT policy, whose adapters can be switched. Pass `peft_config`, or "
                "leave `reference` unset (or 'full_copy') to use a second model"
            )
        if self.needs_adapter is False and present:
            raise ConfigError(
                f"reference {self.name!r} is for full fine-tuning; a PEFT policy holds its base model already. Use "
                "'adapter_off' (the base) or 'frozen_adapter' (the adapter it started from)"
            )

    @abstractmethod
    def prepare(self, model: Any) -> None:
        """Bring the policy `model` into the state in which TRL's reference pass measures against this reference.

        Raises `ConfigError` if the model can't have such a reference.
        """

    def starts_at_policy(self, model: Any) -> bool:
        """Whether the KL should be about zero before the first step."""
        return True

    def after_step(self, model: Any, step: int) -> dict[str, float]:
        """Move the reference if it is due at the end of optimiser step `step` (1, 2, ...); return values to log."""
        return {}
