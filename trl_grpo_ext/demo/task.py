"""The demo's task: sums of two numbers below 20, one character a token, and how well a model does them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

LIMIT = 20
"""Numbers are below this; written with two digits: ``07+12=19``."""

MARK = "!"
"""What an answer may trail off into. It costs length and adds nothing, so there is something to penalise."""

SLIPS = (-10, 10)
"""By how much a wrong sum in the sloppy text is off: a carry forgotten, or one too many."""

MAX_ANSWER_LENGTH = 8
"""Tokens a completion may have: two digits, some marks, the end-of-sequence token."""


class Problem(NamedTuple):
    """One sum."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """What the model is given."""
        return f"{self.left:02d}+{self.right:02d}="

    @property
    def answer(self) -> str:
        """The two digits that are right."""
        return f"{self.left + self.right:02d}"


class Split(NamedTuple):
    """Problems to train on, and problems that neither the warm-start nor GRPO ever sees."""

    train: list[Problem]
    held_out: list[Problem]


class Accuracy(NamedTuple):
    """How a model does under sampling at temperature 1."""

    rate: float
    mean_length: float
    samples: int
    problems: int


def split_problems(rng: random.Random, share: float = 0.2) -> Split:
    """Hold out a `share` of the sums, each in both orders: ``3 + 5`` is not held out if ``5 + 3`` is trained on."""
    pairs = [(a, b) for a in range(LIMIT) for b in range(a, LIMIT)]
    rng.shuffle(pairs)
    held_out = set(pairs[: round(share * len(pairs))])
    problems = [Problem(a, b) for a in range(LIMIT) for b in range(LIMIT)]
    return Split(
        train=[p for p in problems if tuple(sorted(p)) not in held_out],
        held_out=[p for p in problems if tuple(sorted(p)) in held_out],
    )


def correct(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """Reward function: 1 where a completion is the right sum, whatever marks follow it, else 0.

    >>> correct(["19", "19!!", "18", "!19"], ["19"] * 4)
    [1.0, 1.0, 0.0, 0.0]
    """
    return [float(text.rstrip(MARK) == right) for text, right in zip(completions, answer, strict=True)]


def sloppy_line(problem: Problem, rng: random.Random, wrong: float, marks: int) -> str:
    """Return a line of the text the base model learns from: wrong with probability `wrong`, up to `marks` marks."""
    total = problem.left + problem.right
    if rng.random() < wrong:
        total = rng.choice([total + slip for slip in SLIPS if 0 <= total + slip <= 2 * (LIMIT - 1)])
    return f"{problem.prompt}{total:02d}{MARK * rng.randint(0, marks)}"


@torch.no_grad()
def measure(model: Any, tokenizer: Any, problems: Sequence[Problem], samples: int, seed: int) -> Accuracy:
    """Sample `samples` answers to each problem at temperature 1 and count the right ones.

    The global random state is left as it was, and the same `seed` draws the same noise for every model.
    """
    asked = [problem for problem in problems for _ in range(samples)]
    inputs = tokenizer(
        [problem.prompt for problem in asked], return_tensors="pt", padding=True, return_token_type_ids=False
    ).to(model.device)
    was_training = model.training
    model.eval()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        output = model.generate(
            **inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_ANSWER_LENGTH
        )
    model.train(was_training)
    answers = output[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    right = correct(texts, [problem.answer for problem in asked])
    lengths = (answers != tokenizer.pad_token_id).sum(dim=1).float()
    return Accuracy(sum(right) / len(right), lengths.mean().item(), len(asked), len(problems))
