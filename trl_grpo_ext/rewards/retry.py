"""A wrapper for reward functions that fail or hang: judges behind a network, sandboxes, services."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from trl_grpo_ext._validate import check_number
from trl_grpo_ext.errors import ConfigError, GRPOExtError
from trl_grpo_ext.rewards.base import (
    ReadingError,
    RewardWrapper,
    callable_name,
    inner_functions,
    scores_of,
    scores_of_async,
)
from trl_grpo_ext.rewards.limits import await_within, call_within

logger = logging.getLogger(__name__)

_LOG_CALLBACKS = ("log_extra", "log_metric")
"""Columns through which TRL lets a reward function write to its log."""


@dataclass(frozen=True)
class RetryReward(RewardWrapper):
    """`inner`'s scores; if it raises, or takes longer than `timeout` seconds, `retries` extra tries, then all None.

    A batch then costs at most ``(retries + 1) * timeout`` seconds, and one failing process does not stop the others:
    its rows count as not scored. Keep that product below the process group's timeout (`ddp_timeout`, 30 minutes by
    default). Every failed try is a line in the log; the metrics ``<name>/failed_tries`` and
    ``<name>/unscored_batches`` and the `counts` attribute tell how often.

    A function runs in a thread of its own, and one that is out of time is left there: it can't be killed, its late
    result and log entries are dropped. An async function runs in the trainer's event loop and is cancelled; if it
    blocks that loop, nothing can interrupt it. Errors of this package, such as a wrong number of scores or a reward
    model that is not there, are mistakes and not outages, and are raised at once. A reward that works on the policy
    itself can't be left half-way, and is refused.

    Use it for everything that leaves the process. Don't use it to silence a function that fails on *some inputs*:
    return None for these rows instead.

    >>> calls = []
    >>> def judge(completions, **kwargs):
    ...     calls.append(1)
    ...     if len(calls) < 2:
    ...         raise ConnectionError("busy")
    ...     return [0.5] * len(completions)
    >>> reward = RetryReward(judge, retries=1, timeout=5.0)
    >>> reward(prompts=["p"], completions=["a"]), dict(reward.counts)
    ([0.5], {'failed_tries': 1})
    """

    kind: ClassVar[str] = "retry_reward"
    needs_completion_ids: ClassVar[bool] = False

    retries: int = 2
    timeout: float = 60.0
    counts: Counter[str] = field(init=False, repr=False, compare=False, default_factory=Counter)
    """What happened so far in this process: `failed_tries`, `timeouts` among them, and `unscored_batches`."""

    def validate(self) -> None:
        check_number("retries", self.retries, at_least=0, integer=True)
        check_number("timeout", self.timeout, above=0)
        for function in inner_functions(self.inner):
            if hasattr(function, "bind"):
                raise ConfigError(
                    f"`inner` must not be {callable_name(function)!r}: it scores with the policy's own weights, which "
                    "training goes on with, so a try can't be given up half-way"
                )

    def reshape(
        self, raw: list[float | None], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float | None]:
        return raw

    def _score(self, **columns: Any) -> list[float | None]:
        tries = _Tries(self, columns)
        for held in tries:
            try:
                outcome = call_within(self.timeout, _attempt, self.inner, **held.columns)
            except TimeoutError as error:
                outcome = error
            if (scores := tries.scores(outcome, held)) is not None:
                return scores
        return tries.unscored()

    async def _score_async(self, **columns: Any) -> list[float | None]:
        tries = _Tries(self, columns)
        for held in tries:
            try:
                outcome = await await_within(self.timeout, _attempt_async, self.inner, **held.columns)
            except TimeoutError as error:
                outcome = error
            if (scores := tries.scores(outcome, held)) is not None:
                return scores
        return tries.unscored()


def _attempt(function: Callable[..., Any], /, **columns: Any) -> list[float | None] | Exception:
    """Return the scores, or what the function raised: then whatever *is* raised comes from the waiting for it."""
    try:
        return scores_of(function, callable_name(function), **columns)
    except Exception as error:
        return error


async def _attempt_async(function: Callable[..., Any], /, **columns: Any) -> list[float | None] | Exception:
    try:
        return await scores_of_async(function, callable_name(function), **columns)
    except Exception as error:
        return error


class _HeldLogs:
    """Keeps what a try writes to TRL's log until the try is known to count."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.entries: list[tuple[Callable[..., Any], tuple, dict]] = []
        self.columns = {
            name: self._hold(value) if name in _LOG_CALLBACKS and callable(value) else value
            for name, value in columns.items()
        }

    def _hold(self, callback: Callable[..., Any]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.entries.append((callback, args, kwargs))

    def release(self) -> None:
        for callback, args, kwargs in list(self.entries):
            callback(*args, **kwargs)


class _Tries:
    """The tries of one batch, and what is said about them."""

    def __init__(self, reward: RetryReward, columns: dict[str, Any]) -> None:
        self.reward, self.columns, self.failures = reward, columns, 0

    def __iter__(self) -> Any:
        return (_HeldLogs(self.columns) for _ in range(self.reward.retries + 1))

    def scores(self, outcome: list[float | None] | Exception, held: _HeldLogs) -> list[float | None] | None:
        """Return the scores of a try that worked, with its log entries let through; None for one that failed."""
        if isinstance(outcome, Exception):
            self._failed(outcome)
            return None
        held.release()
        self._log(unscored=0.0)
        return outcome

    def _failed(self, error: Exception) -> None:
        if isinstance(error, GRPOExtError) and not isinstance(error, ReadingError):
            raise error
        self.failures += 1
        self.reward.counts["failed_tries"] += 1
        self.reward.counts.update(["timeouts"] if isinstance(error, TimeoutError) else [])
        logger.warning(
            "Reward function %r failed (try %d of %d): %s: %s",
            callable_name(self.reward.inner), self.failures, self.reward.retries + 1, type(error).__name__, error,
        )  # fmt: skip

    def unscored(self) -> list[float | None]:
        rows = len(self.columns["completions"])
        self.reward.counts["unscored_batches"] += 1
        logger.warning(
            "Reward function %r failed %d times: the %d completions of this batch stay unscored by it.",
            callable_name(self.reward.inner), self.failures, rows,
        )  # fmt: skip
        self._log(unscored=1.0)
        return [None] * rows

    def _log(self, unscored: float) -> None:
        log_metric = self.columns.get("log_metric")
        if log_metric is not None:
            log_metric(f"{self.reward.__name__}/failed_tries", float(self.failures))
            log_metric(f"{self.reward.__name__}/unscored_batches", unscored)
