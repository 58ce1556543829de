"""Several processes: a reward function that fails on one of them must not leave the others waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trl_grpo_ext.errors import RewardError
from trl_grpo_ext.rewards.base import is_async, scores_of, scores_of_async
from trl_grpo_ext.rewards.limits import await_within, interrupt_after


class RewardGuard:
    """Stands in for the reward functions of one batch: failures are kept, and raised once every process can know.

    TRL gathers the scores after calling the functions. An exception before that would leave the other processes waiting
    in the gather; with the guard a failed function's scores are None, everybody reaches it, and `check` then raises on
    every process. A function that hangs is interrupted after `seconds`, see `interrupt_after`.
    """

    def __init__(self, functions: Sequence[Any], names: Sequence[str], rank: int, seconds: float) -> None:
        self.rank, self.seconds = rank, seconds
        self.failures: list[str] = []
        self.error: BaseException | None = None
        self.functions = [self._guarded(function, name) for function, name in zip(functions, names, strict=True)]

    def check(self, gather_list: Callable[[list[str]], list[str]]) -> None:
        """Raise `RewardError` that names function and process if any failed anywhere. Every process must call it."""
        failures = gather_list(self.failures)
        if failures:
            raise RewardError("; ".join(failures)) from self.error

    def _guarded(self, function: Any, name: str) -> Any:
        if hasattr(function, "named_parameters"):  # a model, which TRL runs itself
            return function
        if is_async(function):

            async def guarded_async(**columns: Any) -> list[float | None]:
                try:
                    return await await_within(self.seconds, scores_of_async, function, name, **columns)
                except Exception as error:
                    return self._failed(name, error, len(columns["completions"]))

            return guarded_async

        def guarded(**columns: Any) -> list[float | None]:
            try:
                return interrupt_after(self.seconds, scores_of, function, name, **columns)
            except Exception as error:
                return self._failed(name, error, len(columns["completions"]))

        return guarded

    def _failed(self, name: str, error: Exception, rows: int) -> list[float | None]:
        self.failures.append(f"reward function {name!r} failed on process {self.rank}: {type(error).__name__}: {error}")
        self.error = self.error or error
        return [None] * rows
