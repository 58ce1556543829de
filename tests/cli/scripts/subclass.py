"""A user's script: subclasses of both classes, from the modules that define them; the script sets the advantage."""

import sys
from dataclasses import dataclass

import torch
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from tests.tiny import arguments, digits, prompts

torch.set_num_threads(1)


@dataclass
class MyConfig(GRPOConfig):
    greeting: str = "hello"


class MyTrainer(GRPOTrainer):
    def log(self, logs, *args, **kwargs):
        super().log({**logs, "greeting": len(self.args.greeting)}, *args, **kwargs)


model, output, *own = sys.argv[1:]
args = arguments(MyConfig, output, max_steps=2, greeting="hi")
keywords = {"advantage": "mean_centered"} if own else {}
trainer = MyTrainer(model=model, args=args, reward_funcs=digits, train_dataset=prompts(), **keywords)
trainer.train()
assert any(entry.get("greeting") == 2 for entry in trainer.state.log_history)
trainer.save_model(output)
