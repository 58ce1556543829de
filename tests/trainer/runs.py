"""Runs of the tiny model whose weights and logs the trainer tests compare."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import torch
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer

from tests.tiny import arguments, digits, lora, prompts, vowels

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
TIMES = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")


class Run(NamedTuple):
    """A finished run: its trainer, all weights as one vector, and the log without times."""

    trainer: Any
    weights: torch.Tensor
    logs: list[dict[str, float]]


def train(
    trainer_class, config_class, model, folder, *, peft: bool, trainer_kwargs: dict | None = None, **settings
) -> Run:
    """Train a few steps, two micro-batches each, and return what came out."""
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, **settings}
    set_seed(1)  # older TRL draws the adapter's weights from whatever state the generator is in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        trainer = trainer_class(
            model,
            (trainer_kwargs or {}).pop("reward_funcs", [digits, vowels]) if trainer_kwargs else [digits, vowels],
            arguments(config_class, folder, **settings),
            train_dataset=prompts(),
            peft_config=lora() if peft else None,
            **(trainer_kwargs or {}),
        )
        trainer.train()
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    logs = [{k: v for k, v in entry.items() if k not in TIMES} for entry in trainer.state.log_history]
    return Run(trainer, weights, logs)


def stock(model, folder, *, peft: bool, **settings) -> Run:
    """Train with TRL's own classes."""
    return train(GRPOTrainer, GRPOConfig, model, folder, peft=peft, **settings)


def assert_same_logs(ours: list[dict], theirs: list[dict], *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Every value TRL logged is in our log, equal (within the tolerance)."""
    assert len(ours) == len(theirs)
    for mine, stocks in zip(ours, theirs, strict=True):
        for key, value in stocks.items():
            assert key in mine
            if value is None or mine[key] is None:
                assert mine[key] is value, key
            else:
                assert math.isclose(mine[key], value, rel_tol=rtol, abs_tol=atol), (key, mine[key], value)
