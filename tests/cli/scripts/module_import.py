"""A user's script: `import trl`, positional arguments, the name looked up late, a helper module beside it."""

import sys

import torch
import trl
from beside import reward

from tests.tiny import arguments, prompts

torch.set_num_threads(1)

model, output = sys.argv[1:3]
args = arguments(trl.GRPOConfig, output, max_steps=2)
trainer = trl.GRPOTrainer(model, reward, args, prompts())
assert isinstance(trainer, trl.trainer.grpo_trainer.GRPOTrainer)
trainer.train()
trainer.save_model(output)
