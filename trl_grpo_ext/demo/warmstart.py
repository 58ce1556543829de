"""Supervised training of the base model on a sloppy text, so that it is right only some of the time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trl_grpo_ext.demo.task import Problem, sloppy_line

BATCH_SIZE = 64
LEARNING_RATE = 1e-3
MAX_GRAD_NORM = 1.0
IGNORED = -100
"""Label of tokens that the cross-entropy of transformers leaves out."""


def warm_start(
    model: Any,
    tokenizer: Any,
    problems: Sequence[Problem],
    *,
    steps: int,
    wrong: float,
    marks: int,
    rng: random.Random,
    on_step: Callable[[int, float], None] | None = None,
) -> None:
    """Train `model` in place for `steps` batches of lines that are wrong with probability `wrong`.

    `on_step(step, loss)` is called after each step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, betas=(0.9, 0.98))
    model.train()
    for step in range(1, steps + 1):
        lines = [sloppy_line(problem, rng, wrong, marks) for problem in rng.choices(problems, k=BATCH_SIZE)]
        batch = encode_lines(tokenizer, lines)
        loss = model(**{name: tensor.to(model.device) for name, tensor in batch.items()}).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        if on_step is not None:
            on_step(step, loss.item())


def encode_lines(tokenizer: Any, lines: Sequence[str]) -> dict[str, Tensor]:
    """Return a padded batch whose labels are the answers only: what comes after ``=``, with the end of sequence."""
    batch = tokenizer(
        [line + tokenizer.eos_token for line in lines],
        return_tensors="pt",
        padding=True,
        padding_side="right",
        return_token_type_ids=False,
    )
    is_equals = batch["input_ids"] == tokenizer.convert_tokens_to_ids("=")
    after_equals = is_equals.cumsum(dim=1).bool() & ~is_equals
    keep = after_equals & batch["attention_mask"].bool()
    return {**batch, "labels": batch["input_ids"].masked_fill(~keep, IGNORED)}
