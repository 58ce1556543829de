"""The reference over a run: the one that stands in when none is named, its first KL, and what a resumed run finds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trl_grpo_ext.errors import StateError
from trl_grpo_ext.reference.adapters import adapter_parameters
from trl_grpo_ext.reference.base import REF_ADAPTER, ReferenceStrategy
from trl_grpo_ext.reference.frozen import AdapterOff, FrozenAdapter, FullCopy

STOCK_ADAPTER = "default"
"""The only name of a policy adapter of which TRL makes its copy."""

START_TOLERANCE = 1e-4
HALF_TOLERANCE = 1e-2
"""KL per token that rounding alone may give between equal models, in full precision and below."""


def default_reference(model: Any) -> ReferenceStrategy | None:
    """Return the reference for a policy on which TRL's own default fails, None where TRL's is right."""
    active = list(model.active_adapters) if hasattr(model, "peft_config") else []
    return FrozenAdapter() if len(active) == 1 and active != [STOCK_ADAPTER] else None


def stock_reference(model: Any, second_model: Any) -> ReferenceStrategy:
    """Return the strategy that says what TRL itself has set up, and complete it where TRL leaves a hole.

    TRL copies the weights with ``.default.`` in their name, and so leaves the copy of a LoRA on embeddings and of
    trainable tokens, whose names *end* with it, at its initial value.
    """
    if second_model is not None:
        return FullCopy()
    if REF_ADAPTER not in model.peft_config:
        return AdapterOff()
    sources = adapter_parameters(model, STOCK_ADAPTER)
    for key, reference in adapter_parameters(model, REF_ADAPTER).items():
        if key.endswith(".*") and key in sources:
            reference.data.copy_(sources[key].data)
    return FrozenAdapter()


def start_warning(kl: float, reference: ReferenceStrategy, model: Any, *, half: bool) -> str | None:
    """Return what to tell the user if the mean KL per token before the first step is not about zero."""
    half = half or any(parameter.dtype not in (torch.float32, torch.float64) for parameter in model.parameters())
    if abs(kl) <= (HALF_TOLERANCE if half else START_TOLERANCE):
        return None
    dropout = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    cause = (
        "dropout is on, which makes two passes of one model differ; set `disable_dropout=True`"
        if dropout
        else "policy and reference don't start from the same weights (a model passed as an object after its weights "
        "were changed? an adapter initialised from the base weights, such as PiSSA?), or dropout is on"
    )
    return (
        f"the KL against reference {reference.name!r} ({reference.meaning}) is {kl:.3g} per token before the first "
        f"step, where it should be 0: {cause}"
    )


def check_resumed(checkpoint: str, reference: ReferenceStrategy) -> None:
    """Raise `StateError` if the checkpoint was made with a reference of another kind: its weights are there, or not."""
    saved = (Path(checkpoint) / REF_ADAPTER / "adapter_config.json").exists()
    if saved and not reference.keeps_adapter:
        raise StateError(
            f"{checkpoint} holds a reference adapter ({REF_ADAPTER!r}), so it was trained against that, not against "
            f"reference {reference.name!r}; resume with the reference it was trained with, or start a new run from its "
            "weights"
        )
    if reference.keeps_adapter and not saved:
        raise StateError(
            f"{checkpoint} holds no reference adapter ({REF_ADAPTER!r}), which reference {reference.name!r} needs to "
            "go on from where it was; resume with the reference it was trained with, or start a new run from its "
            "weights"
        )


@contextmanager
def kept_dtypes(model: Any) -> Iterator[None]:
    """Bring adapter weights back to their dtype on exit: loading makes PEFT turn half-precision ones into float32."""
    before = {name: {k: p.dtype for k, p in adapter_parameters(model, name).items()} for name in model.peft_config}
    yield
    for name, dtypes in before.items():
        for key, parameter in adapter_parameters(model, name).items():
            parameter.data = parameter.data.to(dtypes.get(key, parameter.dtype))
