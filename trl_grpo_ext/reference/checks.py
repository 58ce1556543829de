"""Checks of the policy that a reference stands on, and the proof that the frozen base never moved."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trl_grpo_ext.errors import ConfigError, StateError
from trl_grpo_ext.reference.adapters import adapter_parameters, lora_pairs
from trl_grpo_ext.reference.base import REF_ADAPTER

_VARIANTS = ("use_dora", "use_qalora", "target_parameters", "arrow_config", "alora_invocation_tokens")


def check_trainable(model: Any) -> None:
    """Raise `ConfigError` if nothing in `model` would be trained."""
    if any(parameter.requires_grad for parameter in model.parameters()):
        return
    raise ConfigError(
        f"no parameter of the policy ({type(model).__name__}) is trainable, so the run would train nothing; load a "
        "saved adapter with `PeftModel.from_pretrained(base, path, is_trainable=True)`"
    )


def check_adapter_policy(model: Any, kind: str) -> None:
    """Raise `ConfigError` unless the adapters of the PEFT policy can be switched without changing the base."""
    if REF_ADAPTER in model.peft_config:
        raise ConfigError(
            f"the policy already has an adapter called {REF_ADAPTER!r}, the name TRL keeps for its reference; remove "
            f"it with `model.delete_adapter({REF_ADAPTER!r})`, or load the policy's adapter under another name"
        )
    if any(getattr(module, "merged_adapters", None) for module in model.modules()):
        raise ConfigError(
            f"reference {kind!r} needs the base weights as they are, but adapters are merged into them (on a quantized "
            "base even unmerging can't bring them back); load the policy without merging"
        )
    trained = base_parameters_trained(model)
    if trained:
        raise ConfigError(
            f"reference {kind!r} shares the policy's base model, of which {trained[0]!r} "
            f"({len(trained)} in all) is trainable: the reference would move with the policy. Freeze it "
            "(LoRA: `bias='none'`), or train a copy of it through `modules_to_save`"
        )


def check_lora(model: Any, adapter: str, kind: str) -> None:
    """Raise `ConfigError` unless the adapter is plain LoRA, whose effect on a weight is ``scaling * B @ A``."""
    config = model.peft_config[adapter]
    peft_type = str(getattr(config.peft_type, "value", config.peft_type))
    if peft_type != "LORA":
        raise ConfigError(
            f"reference {kind!r} mixes LoRA products, so it needs a LoRA adapter; {adapter!r} is {peft_type}"
        )
    used = [name for name in _VARIANTS if getattr(config, name, None)]
    used += sorted({type(v[adapter]).__name__ for v in _lora_variants(model) if adapter in v} if not used else ())
    if used:
        raise ConfigError(
            f"reference {kind!r} supports plain LoRA and rsLoRA; adapter {adapter!r} uses {', '.join(used)}, whose "
            "effect is more than the product B A. Use 'frozen_adapter', or train without it"
        )
    for path, pair in lora_pairs(model, adapter).items():
        if pair.B.flatten(1).size(1) != pair.A.flatten(1).size(0):
            raise ConfigError(f"reference {kind!r} can't mix the LoRA of the grouped convolution {path!r}")


def check_not_partitioned(model: Any, kind: str) -> None:
    """Raise `ConfigError` if DeepSpeed ZeRO-3 has split the weights, of which a process sees only a part."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ConfigError(
            f"reference {kind!r} reads whole adapter weights, which DeepSpeed ZeRO-3 splits over processes; use ZeRO "
            "stage 2 or below, or 'adapter_off'"
        )


def base_parameters_trained(model: Any) -> list[str]:
    """Return the names of trainable parameters that belong to no adapter."""
    adapters = {id(p) for name in model.peft_config for p in adapter_parameters(model, name).values()}
    return [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in adapters]


def base_digest(model: Any) -> str:
    """Return the SHA-256 of all weights of `model` but its adapters', quantization state included.

    Reads every weight once. Equal digests mean bit-equal base weights.

    >>> from torch import nn
    >>> layer = nn.Linear(2, 2)
    >>> before = base_digest(layer)
    >>> layer.bias.data[0] += 1e-3
    >>> base_digest(layer) == before
    False
    """
    adapters = {
        p.data_ptr()
        for name in getattr(model, "peft_config", ())
        for p in adapter_parameters(model, name).values()
        if p.numel()
    }
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, Tensor) and not (tensor.numel() and tensor.data_ptr() in adapters):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(raw.numpy().data)
    return digest.hexdigest()


@contextmanager
def base_unchanged(model: Any) -> Iterator[None]:
    """Prove that the frozen base did not move: `StateError` on exit if its digest is another than on entry.

    Example::

        with base_unchanged(trainer.model):
            trainer.train()
    """
    before = base_digest(model)
    yield
    if (after := base_digest(model)) != before:
        raise StateError(f"the base weights moved: their SHA-256 was {before[:12]}..., now it is {after[:12]}...")


def _lora_variants(model: Any) -> list[dict[str, Any]]:
    return [module.lora_variant for module in model.modules() if getattr(module, "lora_variant", None)]
