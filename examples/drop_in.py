"""A plain TRL GRPO script. One import differs from stock TRL; the two marked settings are what that makes possible.

python examples/drop_in.py                        # SmolLM2-135M-Instruct from the Hub
python examples/drop_in.py --model smollm2-135m   # or a local folder; about a minute on a CPU
"""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig

# The one changed import. It was: from trl import GRPOConfig, GRPOTrainer
from trl_grpo_ext import GRPOExtConfig as GRPOConfig
from trl_grpo_ext import GRPOExtTrainer as GRPOTrainer


def names_the_answer(completions, answer, **kwargs):
    """Reward: 1 where the completion contains the answer."""
    return [float(a in completion[0]["content"]) for completion, a in zip(completions, answer, strict=True)]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="Hub id or local folder")
    parser.add_argument("--output", default="runs/drop_in", help="folder for the adapter and the model card")
    parser.add_argument("--steps", type=int, default=5, help="optimiser steps")
    options = parser.parse_args(argv)

    sums = [(a, b) for a in range(10) for b in range(10)]
    dataset = Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in sums],
            "answer": [str(a + b) for a, b in sums],
        }
    )
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=names_the_answer,
        args=GRPOConfig(
            output_dir=options.output,
            advantage="rank",  # ours: ranks inside the group, where TRL takes z-scores
            kl="k3",  # ours: the KL estimator, by name
            beta=0.01,
            num_generations=8,
            per_device_train_batch_size=8,
            max_completion_length=24,
            max_steps=options.steps,
            learning_rate=1e-4,
            logging_steps=1,
            gradient_checkpointing=False,
            bf16=torch.cuda.is_available(),
            report_to="none",
        ),
        train_dataset=dataset,
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
