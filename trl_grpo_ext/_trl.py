"""The only module that touches TRL's private names, and the guard that they are as this package knows them.

Each function stands for one seam of `GRPOTrainer`; a TRL release that moves one is met here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import trl
from accelerate.utils import broadcast_object_list, gather, gather_object, is_peft_model
from packaging.version import Version
from torch import Tensor
from trl import GRPOConfig
from trl import GRPOTrainer as GRPOTrainer  # its mixins take it from here
from trl.trainer.utils import use_adapter

from trl_grpo_ext.errors import CompatibilityError, ConfigError, RewardError
from trl_grpo_ext.functional.masked import masked_sum
from trl_grpo_ext.reference import REF_ADAPTER, preserved
from trl_grpo_ext.rewards import callable_name

SUPPORTED = "trl>=1.12,<2"

# Method -> the leading parameters (after self) that the trainer relies on.
SEAMS = {
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_generate_and_score_completions": ("inputs",),
    "_compute_loss": ("model", "inputs"),
    "_get_per_token_logps_and_entropies": ("model",),
    "_save": ("output_dir",),
    "_save_checkpoint": ("model", "trial"),
    "_load_from_checkpoint": ("resume_from_checkpoint",),
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


def argument(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return one of the arguments of TRL's trainer that follow `args`, given by position or by name; None if unset."""
    names = list(inspect.signature(GRPOTrainer.__init__).parameters)
    following = names[names.index("args") + 1 :]
    return kwargs.get(name, dict(zip(following, args, strict=False)).get(name))


def reward_name(function: Any) -> str:
    """Return the name that TRL gives a reward function, a reward model or the id of one."""
    if isinstance(function, torch.nn.Module):
        function = getattr(function.config, "_name_or_path", "")
    return function.split("/")[-1] if isinstance(function, str) else callable_name(function)


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


def patience(trainer: Any) -> float:
    """Return for how many seconds a reward function may run while the other processes wait for it."""
    return 0.9 * trainer.args.ddp_timeout  # after that timeout the waiting ones give up, with an error that says little


def from_main_process(trainer: Any, compute: Callable[[], Any]) -> Any:
    """Return on every process what `compute` returns on the main one, the only one to call it; it must be picklable.

    Raises `RewardError` on every process if it raises there.
    """
    result, failure, cause = None, None, None
    if trainer.accelerator.is_main_process:
        try:
            result = compute()
        except Exception as error:
            if trainer.accelerator.num_processes == 1:
                raise
            failure, cause = f"{type(error).__name__}: {error}", error
    if trainer.accelerator.num_processes > 1:
        result, failure = broadcast_object_list([result, failure])
    if failure is not None:
        raise RewardError(f"the main process failed: {failure}") from cause
    return result


def is_truncated(trainer: Any, completion_ids: Sequence[Sequence[int]]) -> list[bool]:
    """Whether each completion ended without an end-of-sequence token, by TRL's own test. An empty one did not."""
    eos_ids = getattr(trainer, "eos_token_ids", None) or [trainer._tokenizer.eos_token_id]  # a list since 1.15
    ends = {*eos_ids, trainer._tokenizer.pad_token_id}
    return [len(ids) > 0 and ids[-1] not in ends for ids in completion_ids]


def log_reward_column(trainer: Any, name: str, column: Tensor) -> None:
    """Log an `(N,)` global column of scores as TRL logs that of a reward function: its metrics and its table column."""
    log_metrics(trainer, {f"rewards/{name}/{key}": value for key, value in _mean_and_std(column).items()})
    trainer._logs["rewards"][name].extend(column.tolist())


def rewrite_reward(trainer: Any, scores: Tensor) -> None:
    """Make the `reward` metrics that TRL logged of this batch tell of the given `(N,)` scores."""
    mean_and_std = _mean_and_std(scores)
    metrics = trainer._metrics[mode(trainer)]
    metrics["reward"][-1], metrics["reward_std"][-1] = mean_and_std["mean"], mean_and_std["std"]


def _mean_and_std(values: Tensor) -> dict[str, float]:
    """Return mean and sample deviation of the values that are not NaN; NaN, which no log shows, if there are none."""
    known = values[~values.isnan()].to(torch.float32)
    return {"mean": known.mean().item(), "std": known.std().item() if len(known) > 1 else torch.nan}


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


LOSS_TYPES = ("grpo", "sapo", "bnpo", "dr_grpo", "luspo", "dapo", "cispo", "vespo")
"""Those whose weight of a token `token_weights` knows."""


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


def global_sums(trainer: Any, values: Sequence[Tensor], mask: Tensor) -> tuple[list[float], float]:
    """Return the sum of each of the `(B, T)` values over the masked tokens of all processes, and how many those are."""
    local = torch.stack([*(masked_sum(v, mask).float() for v in values), mask.sum().float()])
    *totals, tokens = trainer.accelerator.reduce(local, reduction="sum").tolist()
    return totals, tokens


# What `_get_per_token_logps_and_entropies` takes beside ids and masks, for models that see more than text.
_FORWARD_EXTRAS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


def forward(trainer: Any, model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the `(B, T)` log-probs of the completion tokens in `inputs` under `model`, by TRL's own pass."""
    accepted = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
    any_keyword = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    extras = {name: inputs[name] for name in _FORWARD_EXTRAS if name in inputs and (any_keyword or name in accepted)}
    training = mode(trainer) == "train"
    args = trainer.args
    return trainer._get_per_token_logps_and_entropies(
        model,
        torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        inputs["completion_ids"].size(1),
        batch_size=args.per_device_train_batch_size if training else args.per_device_eval_batch_size,
        **extras,
    )[0]


def base_of(trainer: Any, model: Any) -> Any:
    """Return the causal language model inside wrappers and adapters."""
    model = trainer.accelerator.unwrap_model(model)
    return model.get_base_model() if is_peft_model(model) else model


@contextmanager
def captured_hidden(trainer: Any, model: Any, *, wanted: bool) -> Iterator[list[Tensor]]:
    """Collect the `(B, P + T, H)` last hidden states of the backbone's forward passes while the block runs."""
    hidden: list[Tensor] = []
    if not wanted:
        yield hidden
        return
    backbone = base_of(trainer, model).base_model
    handle = backbone.register_forward_hook(lambda module, args, output: hidden.append(output.last_hidden_state))
    try:
        yield hidden
    finally:
        handle.remove()


@contextmanager
def reference_model(trainer: Any) -> Iterator[Any]:
    """Yield the model to call for the reference's forward pass: as TRL does it, and everything restored afterwards."""
    if trainer.ref_model is not None:
        yield trainer.ref_model
        return
    policy = trainer.accelerator.unwrap_model(trainer.model)
    with preserved(policy), use_adapter(policy, REF_ADAPTER if REF_ADAPTER in policy.peft_config else None):
        yield trainer.model


def output_head(trainer: Any, model: Any) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of the output projection, as they are now: a head may be part of the active adapter."""
    head = base_of(trainer, model).get_output_embeddings()
    return head.weight, head.bias


@contextmanager
def head_precision(trainer: Any) -> Iterator[torch.dtype | None]:
    """Run the output head as TRL does: under its autocast, or in float32. Yields the dtype of its inputs, if cast."""
    if getattr(trainer.args, "cast_lm_head_to_fp32", False):
        with torch.autocast(trainer.accelerator.device.type, enabled=False):
            yield torch.float32
    else:
        with trainer.accelerator.autocast():
            yield None


def logit_settings(trainer: Any) -> dict[str, Any]:
    """Return temperature, scale and cap of the policy's logits, as TRL applies them to the log-probs."""
    config = base_of(trainer, trainer.model).config.get_text_config()
    scale = next(
        (value for name in _LOGIT_SCALES if (value := getattr(config, name, None)) is not None),
        None,
    )
    divisor = getattr(config, "logits_scaling", None)  # HyperCLOVA X, alone, multiplies by it
    if scale is None and divisor is not None:
        scale = divisor if config.model_type == "hyperclovax" else 1 / divisor
    return {
        "temperature": trainer.temperature,
        "logit_scale": 1.0 if scale is None else scale,
        "softcap": getattr(config, "final_logit_softcapping", None),
    }


_LOGIT_SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier")


def policy_of(trainer: Any) -> Any:
    """Return the unwrapped policy, and None if it carries no adapter."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model if is_peft_model(model) else None


def sharding(trainer: Any) -> str | None:
    """Return what splits the policy's weights over processes, so that none sees them whole; None if nothing does."""
    if trainer.is_fsdp_enabled:
        return "FSDP"
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    return "DeepSpeed ZeRO-3" if plugin is not None and plugin.zero_stage == 3 else None


def first_metric(trainer: Any, name: str) -> float | None:
    """Return the first value of a training metric since the last `log`, None if there is none."""
    values = trainer._metrics["train"].get(name)
    return values[0] if values else None
