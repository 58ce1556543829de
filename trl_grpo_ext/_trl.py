"""The only module that touches TRL's private names, and the guard that they are as this package knows them.

Each function stands for one seam of `GRPOTrainer`; a TRL release that moves one is met here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import trl
from accelerate.utils import gather, gather_object, is_peft_model
from packaging.version import Version
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from trl_grpo_ext.errors import CompatibilityError, ConfigError
from trl_grpo_ext.functional.masked import masked_sum

SUPPORTED = "trl>=1.12,<2"

# Method -> the leading parameters (after self) that the trainer relies on.
SEAMS = {
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_generate_and_score_completions": ("inputs",),
    "_compute_loss": ("model", "inputs"),
    "_get_per_token_logps_and_entropies": ("model",),
    "_save": ("output_dir",),
    "_save_checkpoint": ("model", "trial"),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "create_model_card": ("model_name",),
}


def check_compatibility(trainer_class: type = GRPOTrainer, version: str = trl.__version__) -> None:
    """Raise `CompatibilityError` that says what moved, unless TRL has every seam this package is built on."""
    if not Version("1.12") <= Version(Version(version).base_version) < Version("2"):
        raise CompatibilityError(
            f"trl-grpo-ext supports {SUPPORTED}, found trl {version}; run `pip install '{SUPPORTED}'`"
        )
    for name, expected in SEAMS.items():
        method = getattr(trainer_class, name, None)
        if method is None:
            raise CompatibilityError(f"trl {version}: GRPOTrainer has no `{name}`, which trl-grpo-ext {_relies()}")
        got = tuple(inspect.signature(method).parameters)[1 : len(expected) + 1]
        if got != expected:
            raise CompatibilityError(
                f"trl {version}: GRPOTrainer.{name} takes {got}, expected {expected}; trl-grpo-ext {_relies()}"
            )


def _relies() -> str:
    return f"relies on it. Install a version known to work ({SUPPORTED}) and report this"


def stock_default(field: str) -> Any:
    """Return the default of a `GRPOConfig` field in the installed TRL."""
    return next(f.default for f in dataclasses.fields(GRPOConfig) if f.name == field)


def default_args(model: Any) -> str:
    """Return the output folder that TRL gives a run without `args`."""
    name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
    return f"{name.split('/')[-1]}-GRPO"


@contextmanager
def overridden(target: Any, **values: Any) -> Iterator[None]:
    """Set attributes of `target` while the block runs."""
    before = {name: getattr(target, name) for name in values}
    vars(target).update(values)
    try:
        yield
    finally:
        vars(target).update(before)


def refuse_liger(args: Any, version: str = trl.__version__) -> None:
    """Raise if TRL's Liger loss, which bypasses `_compute_loss` up to 1.14, would skip the KL strategy."""
    if getattr(args, "use_liger_kernel", False) and Version(version) < Version("1.15"):
        raise ConfigError(
            f"a KL strategy and `use_liger_kernel=True` do not go together with trl {version}: "
            "its Liger loss bypasses the KL term. Set `use_liger_kernel=False` or install trl>=1.15"
        )


def awaited_reward(function: Any, version: str = trl.__version__) -> Any:
    """Return an async reward object in the form in which the installed TRL awaits it.

    TRL before 1.14 looks only at functions, so there the object is put behind one with the same name.
    """
    if Version(version) >= Version("1.14") or inspect.iscoroutinefunction(function):
        return function

    async def reward(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    reward.__name__ = function.__name__
    return reward


def mode(trainer: Any) -> str:
    """Return the key under which TRL collects metrics now: "train" or "eval"."""
    return "train" if trainer.model.training else "eval"


def log_metrics(trainer: Any, metrics: dict[str, float]) -> None:
    """Add values to the averages that the next `log` call reports; the same on every process."""
    for name, value in metrics.items():
        trainer._metrics[mode(trainer)][name].append(value)


def gather_tensor(tensor: Tensor) -> Tensor:
    """Concatenate the `(n, ...)` tensors of all processes, in rank order."""
    return gather(tensor)


def gather_list(items: list) -> list:
    """Concatenate the lists of all processes, in rank order."""
    return gather_object(items)


def is_truncated(trainer: Any, completion_ids: Sequence[Sequence[int]]) -> list[bool]:
    """Whether each completion ended without an end-of-sequence token, by TRL's own test. An empty one did not."""
    eos_ids = getattr(trainer, "eos_token_ids", None) or [trainer._tokenizer.eos_token_id]  # a list since 1.15
    ends = {*eos_ids, trainer._tokenizer.pad_token_id}
    return [len(ids) > 0 and ids[-1] not in ends for ids in completion_ids]


def rewrite_logs(trainer: Any, advantages: Tensor, frac_zero: float) -> None:
    """Make the logs that TRL filled with its own advantages of this batch tell of the given `(N,)` ones."""
    logged = trainer._logs["advantages"]
    for _ in range(min(len(advantages), len(logged))):
        logged.pop()
    logged.extend(advantages.tolist())
    trainer._metrics[mode(trainer)]["frac_reward_zero_std"][-1] = frac_zero


def local_slice(trainer: Any, advantages: Tensor, rows: int) -> Tensor:
    """Return this process's `rows` of the `(N,)` global advantages."""
    start = trainer.accelerator.process_index * rows
    return advantages[start : start + rows]


def loss_mask(inputs: dict[str, Any]) -> Tensor:
    """Return the `(B, T)` mask of the tokens that train: completion, without padding and tool output."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def token_weights(trainer: Any, inputs: dict[str, Any], mask: Tensor) -> Tensor:
    """Return the `(B, T)` weight that TRL's loss type gives each token's term, so that the loss is ``sum(term * w)``.

    B rows of one micro-batch; the weight covers the division by the gradient accumulation steps.
    """
    training = mode(trainer) == "train"
    accumulation = trainer.current_gradient_accumulation_steps if training else 1.0
    kind, rows = trainer.loss_type, mask.size(0)
    m = mask.float()
    if kind in ("grpo", "sapo"):
        return m / m.sum(-1, keepdim=True).clamp(min=1.0) / rows / accumulation
    if kind == "bnpo":
        return m / m.sum().clamp(min=1.0) / accumulation
    if kind == "dr_grpo":
        return m / (rows * trainer.max_completion_length) / accumulation
    if kind == "luspo":
        return m / rows / accumulation
    if kind in ("dapo", "cispo", "vespo"):
        normalizer = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
        if training:
            normalizer = normalizer * accumulation / trainer.args.steps_per_generation
        return m / normalizer
    raise ConfigError(f"trl-grpo-ext does not know how TRL normalises loss_type={kind!r}; train without a KL strategy")


def global_mean(trainer: Any, values: Tensor, mask: Tensor) -> float:
    """Return the mean of `(B, T)` values over the masked tokens of all processes."""
    local = torch.stack([masked_sum(values, mask), mask.sum().float()])
    total, count = trainer.accelerator.reduce(local, reduction="sum")
    return (total / count.clamp(min=1.0)).item()


def policy_of(trainer: Any) -> Any:
    """Return the unwrapped policy, and None if it carries no adapter."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model if is_peft_model(model) else None
