"""A second view of a model's frozen weights: the same tensors under another tree of modules."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from types import MethodType
from typing import Any

import torch
from torch import nn

from trl_grpo_ext.errors import ConfigError


def frozen_view(module: nn.Module) -> nn.Module:
    """Return a copy of the module tree that shares every parameter and buffer, in eval mode, without hooks or adapters.

    PEFT's layers are replaced by what they wrap, so whatever is done to the adapters of `module` is not seen in the
    view, and modules put into the view (other adapters) are not seen in `module`. Moving `module` to a device moves
    the view.
    """
    module = _unwrapped(module)
    view = module.__class__.__new__(module.__class__)
    # `_parameters` and `_buffers` stay the dicts of `module`: what is put into them there is in the view at once
    view.__dict__ = dict(module.__dict__)
    view.__dict__["_modules"] = {
        name: None if child is None else frozen_view(child) for name, child in module._modules.items()
    }
    for name, value in module.__dict__.items():
        if name.endswith("_hooks") and isinstance(value, dict):
            view.__dict__[name] = OrderedDict()
        elif isinstance(value, MethodType) and value.__self__ is module:  # patched on the object, as kernels do
            view.__dict__[name] = MethodType(value.__func__, view)
        elif isinstance(value, functools.partial) and value.args and value.args[0] is module:
            # As accelerate does for models that a device map places
            view.__dict__[name] = functools.partial(value.func, view, *value.args[1:], **value.keywords)
    view.__dict__["training"] = False
    return view


def _unwrapped(module: nn.Module) -> nn.Module:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    while isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
        module = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module.original_module
    return module


def check_whole(backbone: nn.Module) -> None:
    """Raise `ConfigError` if the weights are not all here (sharded over processes), or not frozen."""
    for module in backbone.modules():
        if type(module).__name__ in ("FullyShardedDataParallel", "FSDPModule"):
            raise ConfigError(_SHARDED)
    for name, parameter in backbone.named_parameters():
        if hasattr(parameter, "ds_id") or type(parameter.data).__name__ == "DTensor" or parameter.is_meta:
            raise ConfigError(_SHARDED)
        if parameter.requires_grad:
            raise ConfigError(
                f"an adapter reward model scores with the policy's frozen backbone, but its {name!r} is being trained"
            )


_SHARDED = (
    "an adapter reward model needs the policy's whole backbone on each process, but it is sharded (FSDP or DeepSpeed "
    "ZeRO-3); use a `RewardModel` of its own instead"
)


def classifier_on(backbone: nn.Module, config: Any, labels: int) -> nn.Module:
    """Return a sequence classifier of `labels` outputs whose backbone is `backbone` and whose head is uninitialised."""
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(config)
    config.num_labels = labels
    with torch.device("meta"):
        classifier = AutoModelForSequenceClassification.from_config(config)
    prefix = classifier.base_model_prefix
    expected = type(getattr(classifier, prefix, None))
    if type(backbone) is not expected:
        raise ConfigError(
            f"{type(classifier).__name__} needs a {expected.__name__} as backbone, got {type(backbone).__name__}"
        )
    setattr(classifier, prefix, backbone)
    weight, *_, last = backbone.parameters()
    dtype = weight.dtype if weight.is_floating_point() else torch.float32
    for name, part in classifier.named_children():
        if name != prefix:  # beside the last layer: a device map may have spread the backbone
            part.to_empty(device=last.device).to(dtype)
    return classifier.requires_grad_(False).eval()
