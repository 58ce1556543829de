"""One step of the round trip through the Hub, in a process of its own: ``python -m tests.hub.steps push|load ...``."""

from __future__ import annotations

import json
import sys

import torch

torch.set_num_threads(1)


def trained(model, folder, **settings):
    """Train two steps and return the trainer."""
    from tests.tiny import arguments, digits, lora, prompts
    from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer

    args = arguments(GRPOExtConfig, folder, max_steps=2, beta=0.1, **settings)
    trainer = GRPOExtTrainer(model=model, reward_funcs=digits, args=args, train_dataset=prompts(), peft_config=lora())
    trainer.train()
    return trainer


def push(model, folder, repo):
    """Train with strategies and push the run."""
    strategies = {"advantage": {"kind": "zscore", "ddof": 0, "eps": 1e-6}, "kl": "k2", "reference": "adapter_off"}
    trainer = trained(model, folder, hub_model_id=repo, **strategies)
    trainer.save_model()
    trainer.push_to_hub()
    return [dict(trainer.strategy_specs), weights(trainer)]


def load(model, folder, repo):
    """Load the strategies of a pushed run and train with them."""
    from trl_grpo_ext import hub

    specs = hub.load_strategies(repo)
    return [specs, weights(trained(model, folder, **specs))]


def weights(trainer):
    """Return a digest of the trained weights."""
    return [p.detach().double().sum().item() for p in trainer.model.parameters() if p.requires_grad]


if __name__ == "__main__":
    step, *rest = sys.argv[1:]
    print(json.dumps({"push": push, "load": load}[step](*rest)))
