"""A run that is killed by the system in the middle of training; see `test_resume`."""

from __future__ import annotations

import json
import os
import signal
import sys

import torch
from transformers import TrainerCallback

torch.set_num_threads(1)

from tests.tiny import arguments, digits, lora, prompts, vowels  # noqa: E402
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer  # noqa: E402


class Kill(TrainerCallback):
    """SIGKILL at a step: no handler, no clean-up."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def make_trainer(model: str, folder: str, settings: dict, callbacks: list | None = None) -> GRPOExtTrainer:
    """Return the trainer of all three runs: whole, killed and resumed."""
    torch.manual_seed(7)  # before TRL seeds, in older versions, the adapter is initialised
    args = arguments(GRPOExtConfig, folder, save_strategy="steps", save_steps=2, **settings)
    return GRPOExtTrainer(
        model, [digits, vowels], args, train_dataset=prompts(32), peft_config=lora(), callbacks=callbacks
    )


if __name__ == "__main__":
    model, folder, settings, step = sys.argv[1:]
    make_trainer(model, folder, json.loads(settings), [Kill(int(step))]).train()
