"""A user's script: `from trl import ...`, its own arguments, keywords."""

import argparse

import torch
from trl import GRPOConfig, GRPOTrainer

from tests.tiny import arguments, digits, prompts

torch.set_num_threads(1)


def score(completions, **kwargs):
    return digits(completions)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--output")
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=[score],
        args=arguments(GRPOConfig, options.output, max_steps=options.steps),
        train_dataset=prompts(),
    )
    trainer.train()
    trainer.save_model(options.output)
