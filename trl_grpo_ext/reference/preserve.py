"""Leaves a model exactly as it was found: what is trainable, which adapters are active, train or eval mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Where PEFT keeps "which adapters are active, and are they on": on its tuner layers, on the wrappers of modules that
# are saved whole, and on the model. Its own `disable_adapter()` sets `requires_grad` on exit by adapter name, which
# leaves frozen adapters trainable (PEFT 0.21), hence this snapshot.
_ADAPTER_STATE = ("_active_adapter", "_disable_adapters", "active_adapter", "_adapters_disabled")


@contextmanager
def preserved(model: Any) -> Iterator[None]:
    """Restore `requires_grad`, active adapters and train/eval mode of every submodule on exit, exceptions included."""
    requires_grad = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    modules = [(module, module.training, _adapter_state(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, training, state in modules:
            module.training = training
            vars(module).update(state)
        for parameter, flag in requires_grad:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)


def _adapter_state(module: Any) -> dict[str, Any]:
    attributes = vars(module)
    return {
        name: list(value) if isinstance(value := attributes[name], list) else value
        for name in _ADAPTER_STATE
        if name in attributes
    }
