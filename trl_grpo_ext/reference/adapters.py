"""What the references do to a PEFT model: look at, add, copy and mix its adapters.

By PEFT's layout, not by its classes: an adapter's weights are the entries under its name in dictionaries (`lora_A`,
`lora_embedding_B`, `modules_to_save`, ...) all over the model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trl_grpo_ext.errors import ConfigError
from trl_grpo_ext.functional.low_rank import truncated_sum
from trl_grpo_ext.reference.base import REF_ADAPTER
from trl_grpo_ext.reference.preserve import preserved

_FACTORS = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))


class Pair(NamedTuple):
    """One module's LoRA under one adapter: it changes the weight by ``scaling * B @ A``."""

    B: Tensor
    A: Tensor
    bias: Tensor | None
    scaling: float

    def term(self, weight: float) -> tuple[float, Tensor, Tensor]:
        """Return its product, times `weight`, for `truncated_sum`; convolutions as matrices."""
        return weight * self.scaling, self.B.flatten(1), self.A.flatten(1)


def policy_adapter(model: Any) -> str:
    """Return the name of the adapter that is trained; `ConfigError` unless exactly one is active."""
    active = list(model.active_adapters)
    if len(active) != 1:
        raise ConfigError(
            f"the reference is a copy of the policy's adapter, so exactly one adapter must be active, got {active}; "
            "call `model.set_adapter(name)` first"
        )
    return active[0]


def adapter_parameters(model: Any, adapter: str) -> dict[str, nn.Parameter]:
    """Return the weights of an adapter, by their place in the model, which is the same for every adapter."""
    found: dict[str, nn.Parameter] = {}
    for path, holder in model.named_modules():
        if not isinstance(holder, (nn.ModuleDict, nn.ParameterDict)) or adapter not in holder:
            continue
        entry = holder[adapter]
        if isinstance(entry, nn.Parameter):
            found[f"{path}.*"] = entry
        elif isinstance(entry, nn.Module):
            found.update({f"{path}.*.{name}": parameter for name, parameter in entry.named_parameters()})
    return found


def lora_pairs(model: Any, adapter: str) -> dict[str, Pair]:
    """Return the LoRA factors of an adapter: module path -> `Pair`."""
    return {path: pair for path, module in model.named_modules() for pair in _pairs_of(module, adapter)}


def _pairs_of(module: Any, adapter: str) -> Iterator[Pair]:
    for name_A, name_B in _FACTORS:
        A, B = (module._modules.get(name) for name in (name_A, name_B))
        if isinstance(A, nn.Module) and adapter in A:  # type: ignore[operator]  # PEFT's dictionaries
            factor_A, factor_B = A[adapter], B[adapter]  # type: ignore[index]
            bias = getattr(factor_B, "bias", None)
            yield Pair(_weight(factor_B), _weight(factor_A), bias, float(module.scaling[adapter]))


def _weight(factor: Any) -> Tensor:
    return factor if isinstance(factor, Tensor) else factor.weight


def differs_from_base(model: Any, adapter: str) -> bool:
    """Whether a LoRA adapter changes the model, so that switching it off is not where the policy is now."""
    pairs = lora_pairs(model, adapter).values()
    if any(bool(pair.A.any()) and bool(pair.B.any()) for pair in pairs):
        return True
    for module in model.modules():
        copies = module._modules.get("modules_to_save")
        if isinstance(copies, nn.ModuleDict) and adapter in copies:
            ours, base = copies[adapter].state_dict(), module.original_module.state_dict()
            if not all(torch.equal(value, base[name]) for name, value in ours.items()):
                return True
    return False


def add_reference(model: Any, source: str, rank: int | None = None) -> None:
    """Add the frozen adapter `REF_ADAPTER`, of the shape and dtype of `source` (LoRA of rank `rank` if given), unset.

    It has no dropout. No random number is drawn, and nothing else about the model changes.
    """
    config = copy.deepcopy(model.peft_config[source])
    config.inference_mode = True
    if hasattr(config, "lora_dropout"):
        config.lora_dropout = 0.0
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # others, such as PiSSA, would change the base weights a second time
    if rank is not None:
        config.r, config.rank_pattern = rank, {}
    try:
        with torch.random.fork_rng(devices=[]), preserved(model):
            model.add_adapter(REF_ADAPTER, config)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"PEFT can't hold a second adapter beside {source!r}: {error}") from error
    sources = adapter_parameters(model, source)
    references = adapter_parameters(model, REF_ADAPTER)
    if not sources or sources.keys() != references.keys():
        odd = sorted(sources.keys() ^ references.keys())[:3]
        model.delete_adapter(REF_ADAPTER)
        raise ConfigError(
            f"can't make a reference adapter beside {source!r} of type {config.peft_type}: "
            + (f"their weights differ, e.g. {odd}" if odd else "its weights are not kept by adapter name")
        )
    for key, reference in references.items():
        reference.requires_grad_(False)
        reference.data = reference.data.to(sources[key])


@torch.no_grad()
def copy_adapter(model: Any, source: str) -> None:
    """Copy the weights of adapter `source` into the reference adapter, bit for bit."""
    sources = adapter_parameters(model, source)
    for key, reference in adapter_parameters(model, REF_ADAPTER).items():
        reference.copy_(sources[key])


@torch.no_grad()
def mix_into_reference(model: Any, source: str, alpha: float) -> tuple[float, float]:
    """Move the reference adapter to ``alpha * source + (1 - alpha) * reference``, in what the adapters *do*.

    For LoRA that is the products ``scaling * B @ A``, per module, truncated to the reference's rank. Weights that are
    no factors (`modules_to_save`, trainable tokens, biases of B) are mixed as they are. Where nothing has to be
    mixed or truncated, weights are copied bit for bit.

    Returns the relative error of the truncation, over all modules and of the worst.
    """
    sources, references = lora_pairs(model, source), lora_pairs(model, REF_ADAPTER)
    lost, norm = [], []
    for path, reference in references.items():
        policy = sources[path]
        if alpha == 1 and policy.A.shape == reference.A.shape and policy.scaling == reference.scaling:
            reference.A.copy_(policy.A)
            reference.B.copy_(policy.B)
        elif reference.scaling != 0:
            terms = [policy.term(alpha)] if alpha == 1 else [policy.term(alpha), reference.term(1 - alpha)]
            B, A, *norms = truncated_sum(terms, reference.A.size(0))
            root = math.sqrt(abs(reference.scaling))
            reference.B.copy_((B / (reference.scaling / root)).view_as(reference.B))
            reference.A.copy_((A / root).view_as(reference.A))
            lost.append(norms[0])
            norm.append(norms[1])
        if reference.bias is not None and policy.bias is not None and reference.scaling != 0:
            _lerp(reference.bias, policy.bias * (policy.scaling / reference.scaling), alpha)
    factors = {id(tensor) for pair in references.values() for tensor in pair[:3] if tensor is not None}
    others = adapter_parameters(model, source)
    for key, parameter in adapter_parameters(model, REF_ADAPTER).items():
        if id(parameter) not in factors:
            _lerp(parameter, others[key], alpha)
    return _relative_errors(lost, norm)


def _lerp(target: Tensor, source: Tensor, alpha: float) -> None:
    target.copy_(source if alpha == 1 else (1 - alpha) * target + alpha * source)


def _relative_errors(lost: list[Tensor], norm: list[Tensor]) -> tuple[float, float]:
    if not lost:
        return 0.0, 0.0
    device = lost[0].device  # a model may be spread over devices
    losses, norms = (torch.stack([x.to(device) for x in values]) for values in (lost, norm))
    tiny = torch.finfo(norms.dtype).tiny
    overall = torch.linalg.vector_norm(losses) / torch.linalg.vector_norm(norms).clamp(min=tiny)
    return overall.item(), (losses / norms.clamp(min=tiny)).max().item()
