"""One rank of `test_distributed`: trains a step and writes what this rank saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)

from tests.tiny import arguments, lora, prompts  # noqa: E402
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer  # noqa: E402


def code_sum(completions, **kwargs):
    """Score that differs between completions, so that ranks hold different rewards."""
    return [float(sum(ord(c) for c in text) % 17) for text in completions]


class Recorder(GRPOExtTrainer):
    """Keeps what it was given."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.local = output["advantages"].tolist()
        return output

    def _advantages(self, batch):
        self.scores, self.names = batch.scores.tolist(), batch.names
        self.penalty = batch.rewards[:, -1].tolist()
        return super()._advantages(batch)


def main(model: str, folder: str, strategy: str, placement: str) -> None:
    """Train two steps, so that the policy has left its reference, and write the record of the second."""
    kl = {"kl_placement": "reward", "beta": 20.0} if placement == "reward" else {"kl": "k3", "beta": 0.1}
    args = arguments(
        GRPOExtConfig,
        Path(folder) / "out",
        per_device_train_batch_size=2,
        max_steps=2,
        advantage=strategy,
        **kl,
        ddp_backend="gloo",
    )
    trainer = Recorder(model, code_sum, args, train_dataset=prompts(), peft_config=lora())
    trainer.train()
    record = {
        "rewards": trainer.scores,
        "names": trainer.names,
        "penalty": trainer.penalty,
        "advantages": trainer.local,
        "logged": list(trainer._logs["advantages"]),
        "weights": sum(p.double().sum().item() for p in trainer.model.parameters()),
    }
    (Path(folder) / f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(*sys.argv[1:])
