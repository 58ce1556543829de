"""A user's script for `accelerate launch`: an Accelerator of its own, everything in main()."""

import os

import torch
from accelerate import PartialState

from tests.tiny import arguments, digits, prompts

torch.set_num_threads(1)


def main():
    from trl import GRPOConfig, GRPOTrainer

    args = arguments(GRPOConfig, os.environ["OUTPUT"], max_steps=2, per_device_train_batch_size=4)
    trainer = GRPOTrainer(os.environ["MODEL"], digits, args, train_dataset=prompts())
    trainer.train()
    trainer.save_model(os.environ["OUTPUT"])
    if PartialState().is_main_process:
        print(f"processes: {PartialState().num_processes}")


if __name__ == "__main__":
    main()
