"""The contract of a reward wrapper: a callable with TRL's reward signature around another one."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
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

    ``wrapper(prompts=..., completions=..., completion_ids=..., **columns) -> list[float | None]``: None (not scored)
    stays None, an async inner function makes the wrapper async. `inner` may be given as an object, a spec, the name
    of a TRL reward function, or ``"module:function"``.

    Raises `RewardError` (a ``ValueError``) that names the inner function if it returns the wrong number of scores.
    """

    family: ClassVar[str] = "reward"
    needs_completion_ids: ClassVar[bool] = True
    """Whether `reshape` reads `completion_ids`; a wrapper that does not can be called without them."""

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
        """Return one score per completion from the inner scores; `columns` holds prompts, completions and the rest.

        A `raw` score is None (not scored) or a number, infinite at worst: NaN, TRL's mark of the same, came in as None.
        """

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
        if self.needs_completion_ids:
            if completion_ids is None:
                raise RewardError(f"{self.__name__} needs `completion_ids`: it counts tokens")
            if len(completion_ids) != len(completions):
                raise RewardError(
                    f"{self.__name__} got {len(completion_ids)} `completion_ids` for {len(completions)} completions"
                )
        scores = as_scores(raw, len(completions), callable_name(self.inner))
        return self.reshape(scores, completion_ids, completions=completions, **columns)


def as_scores(raw: Any, expected: int, name: str) -> list[float | None]:
    """Return what the reward function called `name` returned as numbers and None (also for NaN), one per completion.

    Raises `RewardError` if it is anything else, or not `expected` of them.
    """
    try:
        scores = [None if score is None or (number := float(score)) != number else number for score in raw]
    except (TypeError, ValueError, RuntimeError) as error:
        raise RewardError(
            f"reward function {name!r} must return a list of numbers or None, got {_shortened(raw)}"
        ) from error
    if len(scores) != expected:
        raise RewardError(
            f"reward function {name!r} returned {len(scores)} scores for {expected} completions; "
            "it must return one per completion"
        )
    return scores


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... of type {type(value).__name__}"


def inner_functions(function: Any) -> Iterator[Any]:
    """Yield a reward function and, through its wrappers, everything inside it."""
    while True:
        yield function
        if not isinstance(function, RewardWrapper):
            return
        function = function.inner


def bind_rewards(functions: Sequence[Any], model: Any, tokenizer: Any) -> None:
    """Hand the policy and its tokenizer to every reward of ours that works on them, also inside wrappers."""
    for function in functions:
        for part in inner_functions(function):
            if isinstance(part, Strategy) and hasattr(part, "bind"):
                part.bind(model, tokenizer)


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
