"""Leaves a model exactly as it was found: what is trainable, which adapters are active, train or eval mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Where PEFT keeps "which adapters are active, and are they on": on its tuner layers, on the wrappers of modules that
# are saved whole, and on the model. Its own `disable_adapter()` sets `requires_grad` on exit by adapter name, which
# leaves frozen adapters trainable (PEFT 0.21), hence this snapshot. Below them, where transformers keeps gradient
# checkpointing, which TRL switches off around the passes without gradient.
_STATE = (
    "_active_adapter",
    "_disable_adapters",
    "active_adapter",
    "_adapters_disabled",
    "gradient_checkpointing",
    "_gradient_checkpointing_func",
)


@contextmanager
def preserved(model: Any) -> Iterator[None]:
    """Restore what a reference pass may change in every submodule on exit, exceptions included.

    That is `requires_grad`, the active adapters and whether they are on, train or eval mode, and gradient
    checkpointing.

    >>> from torch import nn
    >>> layer = nn.Linear(1, 1)
    >>> with preserved(layer):
    ...     layer = layer.eval().requires_grad_(False)
    >>> layer.training, layer.weight.requires_grad
    (True, True)
    """
    requires_grad = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    modules = [(module, module.training, _state(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, training, state in modules:
            module.training = training
            for name in _STATE:
                vars(module).pop(name, None)
            vars(module).update(state)
        for parameter, flag in requires_grad:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)


def _state(module: Any) -> dict[str, Any]:
    attributes = vars(module)
    return {
        name: list(value) if isinstance(value := attributes[name], list) else value
        for name in _STATE
        if name in attributes
    }
