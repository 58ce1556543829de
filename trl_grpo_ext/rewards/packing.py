"""Many token sequences through a classifier: each distinct one once, in batches of like length, within memory."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence

import torch

logger = logging.getLogger(__name__)

Ids = tuple[int, ...]


def plan(lengths: Sequence[int], budget: int, waste: int) -> list[list[int]]:
    """Return batches of row numbers, longest rows first; each row is in one batch.

    A batch padded to its longest row holds at most `budget` tokens (a row longer than that is alone) and at most
    `waste` tokens of padding: one batch more costs less than computing more padding than that.

    >>> plan([3, 10, 9, 3, 3], budget=20, waste=4)
    [[1, 2], [0, 3, 4]]
    """
    batches: list[list[int]] = []
    width = padding = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        padding += width - lengths[row]
        if not batches or width * (len(batches[-1]) + 1) > budget or padding > waste:
            batches.append([])
            width, padding = lengths[row], 0
        batches[-1].append(row)
    return batches


def score_packed(
    rows: Sequence[Sequence[int]], forward: Callable[[list[Ids]], list[float]], *, budget: int, waste: int
) -> tuple[list[float], int]:
    """Return the score of each row of token ids, and the budget that was kept.

    `forward` scores one batch. If it runs out of memory, the budget becomes half the padded tokens of the batch that
    failed, and what is left is packed anew; a single row that does not fit is an error.
    """
    distinct = list(dict.fromkeys(tuple(row) for row in rows))
    scores: dict[Ids, float] = {}
    while len(scores) < len(distinct):
        left = [row for row in distinct if row not in scores]
        for batch in plan([len(row) for row in left], budget, waste):
            chosen = [left[i] for i in batch]
            found = _or_out_of_memory(forward, chosen)
            if found is None:
                budget = len(chosen) * max(map(len, chosen)) // 2
                logger.warning("Out of memory while scoring: the token budget is now %d.", budget)
                break
            scores.update(zip(chosen, found, strict=True))
    return [scores[tuple(row)] for row in rows], budget


def _or_out_of_memory(forward: Callable[[list[Ids]], list[float]], batch: list[Ids]) -> list[float] | None:
    """Return ``forward(batch)``, or None if it ran out of memory and there is something to split."""
    try:
        return forward(batch)
    except Exception as error:
        if len(batch) == 1 or not is_out_of_memory(error):
            raise
    gc.collect()  # outside the handler, which keeps the tensors of the failed pass alive
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def is_out_of_memory(error: Exception) -> bool:
    """Whether an exception says that a device, or the CPU, has no memory left."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
    )
