"""Policies, trainers and reference passes for the reference tests."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from tests.tiny import arguments, digits, lora, prompts, vowels
from trl_grpo_ext.config import GRPOExtConfig
from trl_grpo_ext.reference import REF_ADAPTER, preserved
from trl_grpo_ext.reference.adapters import adapter_parameters
from trl_grpo_ext.trainer import GRPOExtTrainer

SAVING = {"save_strategy": "steps", "save_steps": 2}


def some_slow(names: Iterable[str], fast: Collection[str]) -> list[Any]:
    """Return the names as test parameters, all but `fast` of them marked slow: each is a few runs of a trainer."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


def base_model(folder: str, **kwargs: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs)


def fill(parameters: Any, seed: int = 3) -> None:
    """Move trainable parameters away from where they start, as training would."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        if parameter.requires_grad:
            noise = 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.data.add_(noise.to(parameter.dtype))


def trained_policy(folder: str, config: Any = None, name: str = "default", **kwargs: Any) -> Any:
    """Return a PeftModel whose adapter already changes the model."""
    from peft import get_peft_model

    torch.manual_seed(0)
    policy = get_peft_model(base_model(folder, **kwargs), config or lora(), adapter_name=name)
    fill(policy.parameters())
    return policy


def make_trainer(model: Any, base: str, folder: Any, callbacks: Any = None, peft_config: Any = None, **settings: Any):
    """Return a trainer of the tiny task; strategies and config fields by keyword."""
    strategies = {name: settings.pop(name) for name in ("reference", "kl", "advantage") if name in settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return GRPOExtTrainer(
            model,
            [digits, vowels],
            arguments(GRPOExtConfig, folder, **{"beta": 0.1, "max_steps": 2, **settings}),
            train_dataset=prompts(),
            processing_class=AutoTokenizer.from_pretrained(base),
            peft_config=peft_config,
            callbacks=callbacks,
            **strategies,
        )


def train(trainer: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        trainer.train(**kwargs)
    return trainer


def resume(make: Any) -> AfterLoading:
    """Resume the run of ``make(callbacks=..., max_steps=3)`` after step 2, and return what was there before step 3."""
    seen = AfterLoading()
    seen.trainer = make(callbacks=[seen], max_steps=3)
    train(seen.trainer, resume_from_checkpoint=True)
    assert seen.trainer.state.global_step == 3
    return seen


def kls(trainer: Any) -> list[float]:
    return [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]


def reference_logps(trainer: Any, seed: int = 0) -> torch.Tensor:
    """Return the reference's log-probs of a fixed batch, through the switch that TRL's reference pass uses."""
    from trl.trainer.utils import use_adapter

    ids = torch.randint(3, 30, (4, 9), generator=torch.Generator().manual_seed(seed))
    policy = trainer.accelerator.unwrap_model(trainer.model)
    with torch.no_grad(), preserved(policy):
        if trainer.ref_model is not None:
            return score(trainer, trainer.ref_model, ids)
        with use_adapter(policy, REF_ADAPTER if REF_ADAPTER in policy.peft_config else None):
            return score(trainer, trainer.model, ids)


def score(trainer: Any, model: Any, ids: torch.Tensor) -> torch.Tensor:
    return trainer._get_per_token_logps_and_entropies(model, ids, torch.ones_like(ids), 6, batch_size=4)[0]


def own_logps(model: Any, output: dict[str, Any]) -> torch.Tensor:
    """Return a plain model's log-probs of the completions in what TRL's scoring returned."""
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
    length = output["completion_ids"].size(1)
    logps = logits[:, -length - 1 : -1].log_softmax(-1)
    return logps.gather(2, output["completion_ids"][..., None])[..., 0]


def weights(model: Any, adapter: str) -> dict[str, torch.Tensor]:
    return {key: parameter.detach().clone() for key, parameter in adapter_parameters(model, adapter).items()}


def assert_equal_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert value.dtype == right[key].dtype, key
        assert torch.equal(value, right[key]), key


def train_state(model: Any) -> tuple:
    """Return all that a reference pass must leave as it was."""
    names = ("_active_adapter", "_disable_adapters", "active_adapter", "_adapters_disabled", "gradient_checkpointing")
    modules = [
        (name, module.training, [(n, str(vars(module)[n])) for n in names if n in vars(module)])
        for name, module in model.named_modules()
    ]
    return modules, [(name, parameter.requires_grad) for name, parameter in model.named_parameters()]


class AfterLoading(TrainerCallback):
    """Looks at the reference when the first step begins, when a checkpoint has been loaded."""

    trainer: Any = None
    logps: torch.Tensor | None = None

    def on_step_begin(self, args, state, control, **kwargs):
        if self.logps is None:
            self.logps = reference_logps(self.trainer)
            policy = self.trainer.accelerator.unwrap_model(self.trainer.model)
            self.adapters = {name: weights(policy, name) for name in getattr(policy, "peft_config", ())}


class Kill(TrainerCallback):
    """Ends the run with an exception when a step was done."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt
