"""The contract of a reward wrapper: a callable with TRL's reward signature around another one."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from trl_grpo_ext._strategy import Strategy
from trl_grpo_ext.errors import ConfigError, RewardError


class _SyncOrAsync:
    """Makes ``__call__`` a coroutine function exactly where the inner function is one, so that TRL awaits it."""

    def __get__(self, wrapper: RewardWrapper | None, owner: type) -> Any:
        if wrapper is None:
            return self
        return wrapper._call_async if is_async(wrapper.inner) else wrapper._call


@dataclass(frozen=True)
class RewardWrapper(Strategy, ABC):
    """Reshapes the scores of `inner`, which is any reward function, wrapper or reward model.

    ``wrapper(prompts=..., completions=..., completion_ids=..., **columns) -> list[float | None]``: None (not
    scored) stays None, an async inner function makes the wrapper async. `inner` may be given as an object, a spec, the name of a
    TRL reward function, or ``"module:function"``.

    Raises `RewardError` (a ``ValueError``) that names the inner function if it returns the wrong number of scores.
    """

    family: ClassVar[str] = "reward"

    inner: Any = field(metadata={"family": "reward"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if hasattr(self.inner, "named_parameters"):
            raise ConfigError(
                f"`inner` must be a reward function, got the model {type(self.inner).__name__}; "
                "pass a function that scores with it"
            )
        if not callable(self.inner):
            raise ConfigError(f"`inner` must be a reward function, its name or a spec, got {self.inner!r}")

    @abstractmethod
    def reshape(
        self, raw: list[float | None], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float | None]:
        """Return one score per completion from the inner scores; `columns` holds prompts, completions and the rest."""

    __call__ = _SyncOrAsync()

    @property
    def __name__(self) -> str:
        return f"{vars(type(self)).get('kind', type(self).__name__)}({callable_name(self.inner)})"

    def _call(self, *, completions: Sequence[Any], completion_ids: Any = None, **columns: Any) -> list[float | None]:
        raw = self.inner(completions=completions, completion_ids=completion_ids, **columns)
        return self._reshape(raw, completions, completion_ids, columns)

    async def _call_async(self, *, completions: Any, completion_ids: Any = None, **columns: Any) -> list[float | None]:
        raw = await self.inner(completions=completions, completion_ids=completion_ids, **columns)
        return self._reshape(raw, completions, completion_ids, columns)

    def _reshape(self, raw: Any, completions: Any, completion_ids: Any, columns: dict[str, Any]) -> list[float | None]:
        if completion_ids is None:
            raise RewardError(f"{self.__name__} needs `completion_ids`: lengths are counted in tokens")
        try:
            scores = [None if score is None else float(score) for score in raw]
        except TypeError as error:
            raise RewardError(
                f"reward function {callable_name(self.inner)!r} must return a list of numbers or None, got {raw!r}"
            ) from error
        if len(scores) != len(completions):
            raise RewardError(
                f"reward function {callable_name(self.inner)!r} returned {len(scores)} scores for "
                f"{len(completions)} completions; it must return one per completion"
            )
        return self.reshape(scores, completion_ids, completions=completions, **columns)


def callable_name(function: Any) -> str:
    """Return the name that the log shows for a reward function, as TRL does."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` (a function, a partial of one, or an object) returns a coroutine."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
