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
    """Says which weights give the reference log-probs. The trainer calls `prepare` once, before the first step."""

    family: ClassVar[str] = "reference"

    @abstractmethod
    def prepare(self, model: Any) -> None:
        """Bring the policy `model` into the state in which TRL's reference pass measures against this reference.

        Raises `ConfigError` if the model can't have such a reference.
        """


@dataclass(frozen=True, kw_only=True)
class AdapterOff(ReferenceStrategy):
    """The frozen base model: the policy's own backbone with its adapters switched off. No extra weights.

    The natural reference of a fresh LoRA adapter, which starts as the base model. On an adapter that was trained
    before, the KL then measures the distance from the *base*, not from where this run starts, so it has to be asked
    for by name.
    """

    kind: ClassVar[str] = "adapter_off"

    def prepare(self, model: Any) -> None:
        if not hasattr(model, "peft_config"):
            raise ConfigError(
                "reference 'adapter_off' needs a PEFT policy, whose adapters can be switched off; "
                f"got {type(model).__name__}. Pass `peft_config`, or leave `reference` unset to use a second model"
            )
        if REF_ADAPTER in model.peft_config:
            model.delete_adapter(REF_ADAPTER)
