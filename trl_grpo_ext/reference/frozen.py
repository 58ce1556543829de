"""The references that never move."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

from trl_grpo_ext.reference.adapters import add_reference, copy_adapter, differs_from_base, policy_adapter
from trl_grpo_ext.reference.base import ReferenceStrategy
from trl_grpo_ext.reference.checks import check_adapter_policy, check_not_partitioned

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AdapterOff(ReferenceStrategy):
    """The frozen base model: the policy's own backbone with its adapters switched off. No extra weights.

    The natural reference of a fresh LoRA adapter, which starts as the base model (and TRL's own choice there). On an
    adapter that was trained before, the KL then measures the distance from the *base*, not from where this run starts:
    it is large from the first step, and beta pulls the policy back over what the adapter had learnt. So there it has
    to be asked for by name, and says so in the log.

    >>> AdapterOff()
    AdapterOff()
    """

    kind: ClassVar[str] = "adapter_off"
    meaning: ClassVar[str] = "the frozen base model, the policy's adapters switched off"
    needs_adapter: ClassVar[bool | None] = True

    def prepare(self, model: Any) -> None:
        self.check_adapter(hasattr(model, "peft_config"))
        check_adapter_policy(model, self.kind)
        if not self.starts_at_policy(model):
            logger.warning(
                "Reference %r on an adapter that already changes the model: the KL measures the distance from the base "
                "model, not from where this run starts, so it is not zero at the first step and pulls the policy "
                "back over what the adapter has learnt. For the distance from the start, use 'frozen_adapter'.",
                self.kind,
            )

    def starts_at_policy(self, model: Any) -> bool:
        return not any(differs_from_base(model, adapter) for adapter in model.active_adapters)


@dataclass(frozen=True, kw_only=True)
class FrozenAdapter(ReferenceStrategy):
    """A frozen copy of the adapter the policy starts from. Extra weights: the adapter, once more.

    What the KL should be measured against when training goes on from an adapter (supervised fine-tuning, an earlier
    run), and TRL's own choice for a trained `PeftModel`. Any PEFT type whose weights are kept by adapter name. The copy
    has no LoRA dropout, and is part of each checkpoint (folder ``ref``), so that a resumed run has the same reference.

    >>> FrozenAdapter()
    FrozenAdapter()
    """

    kind: ClassVar[str] = "frozen_adapter"
    meaning: ClassVar[str] = "a frozen copy of the adapter the policy started from"
    needs_adapter: ClassVar[bool | None] = True
    keeps_adapter: ClassVar[bool] = True

    def prepare(self, model: Any) -> None:
        self.check_adapter(hasattr(model, "peft_config"))
        check_adapter_policy(model, self.kind)
        check_not_partitioned(model, self.kind)
        source = policy_adapter(model)
        add_reference(model, source)
        copy_adapter(model, source)


@dataclass(frozen=True, kw_only=True)
class FullCopy(ReferenceStrategy):
    """A second model, loaded by TRL from where the policy was loaded from. Extra weights: a whole model.

    The reference of full fine-tuning (and TRL's own choice there). Not for a PEFT policy: its base is the same model
    already, at no cost.

    >>> FullCopy()
    FullCopy()
    """

    kind: ClassVar[str] = "full_copy"
    meaning: ClassVar[str] = "a second, frozen model"
    needs_adapter: ClassVar[bool | None] = False

    def prepare(self, model: Any) -> None:
        self.check_adapter(hasattr(model, "peft_config"))
