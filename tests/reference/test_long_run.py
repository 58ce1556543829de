"""Two hundred steps with an anchor that follows: the KL falls at each move."""

from __future__ import annotations

import pytest
import torch

from tests.reference.policies import kls, make_trainer, train
from tests.tiny import lora
from trl_grpo_ext.reference import MovingAnchor, base_unchanged

EVERY = 25


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [1.0, 0.6])
def test_the_kl_falls_at_each_move(tiny_model_dir, tmp_path, alpha):
    anchor = MovingAnchor(every=EVERY, alpha=alpha)
    settings = {"max_steps": 200, "beta": 0.02, "lr_scheduler_type": "constant"}
    trainer = make_trainer(tiny_model_dir, tiny_model_dir, tmp_path, peft_config=lora(), reference=anchor, **settings)
    with base_unchanged(trainer.model):
        train(trainer)
    values = torch.tensor(kls(trainer))
    errors = {e["step"]: e["reference/move_error"] for e in trainer.state.log_history if "reference/move_error" in e}
    moves = range(EVERY, 200 + 1, EVERY)
    assert list(errors) == list(moves)
    assert errors[EVERY] == 0  # from the base, whose products are zero, the mixture has the policy's rank
    assert all((error == 0) if alpha == 1 else (0 < error < 0.05) for error in list(errors.values())[1:])
    for move in moves[:-1]:
        before = values[move - 3 : move].mean()  # the last steps scored by the old anchor
        after = values[move]  # the first step scored by the new one
        assert after < (1e-6 if alpha == 1 else 0.5 * before), move
        assert before > 1e-4, move
