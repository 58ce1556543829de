"""The contract of a reward wrapper: a callable with TRL's reward signature around another one."""

from __future__ import annotations

import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar

from trl_grpo_ext._strategy import Strategy
from trl_grpo_ext._suggest import shortened
from trl_grpo_ext.errors import ConfigError, GRPOExtError, RewardError


class ReadingError(RewardError):
    """A reward function raised while its scores were read (a generator): an error of its own, not a wrong result."""


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

    Raises `RewardError` (a ``ValueError``) that names the inner function if it returns something else than one number
    or None per completion.
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
        raw = self._score(completions=completions, completion_ids=completion_ids, **columns)
        return self._reshape(raw, completions, completion_ids, columns)

    async def _call_async(self, *, completions: Any, completion_ids: Any = None, **columns: Any) -> list[float | None]:
        raw = await self._score_async(completions=completions, completion_ids=completion_ids, **columns)
        return self._reshape(raw, completions, completion_ids, columns)

    def _score(self, **columns: Any) -> list[float | None]:
        return scores_of(self.inner, callable_name(self.inner), **columns)

    async def _score_async(self, **columns: Any) -> list[float | None]:
        return await scores_of_async(self.inner, callable_name(self.inner), **columns)

    def _reshape(
        self, raw: list[float | None], completions: Any, completion_ids: Any, columns: dict[str, Any]
    ) -> list[float | None]:
        if self.needs_completion_ids:
            if completion_ids is None:
                raise RewardError(f"{self.__name__} needs `completion_ids`: it counts tokens")
            if len(completion_ids) != len(completions):
                raise RewardError(
                    f"{self.__name__} got {len(completion_ids)} `completion_ids` for {len(completions)} completions"
                )
        return self.reshape(raw, completion_ids, completions=completions, **columns)


def scores_of(function: Callable[..., Any], name: str, /, **columns: Any) -> list[float | None]:
    """Return the scores of the reward function called `name`, as numbers and None (also for NaN).

    Raises `RewardError` if they are anything else, or not one per completion, and `ReadingError` for what a generator
    raises. What the function itself raises is not touched.
    """
    return _as_scores(function(**columns), len(columns["completions"]), name)


async def scores_of_async(function: Callable[..., Any], name: str, /, **columns: Any) -> list[float | None]:
    """As `scores_of`, for an async function."""
    return _as_scores(await function(**columns), len(columns["completions"]), name)


def _as_scores(raw: Any, expected: int, name: str) -> list[float | None]:
    scores = as_numbers(raw, f"reward function {name!r}")
    if len(scores) != expected:
        raise RewardError(
            f"reward function {name!r} returned {len(scores)} scores for {expected} completions; "
            "it must return one per completion"
        )
    return scores


def as_numbers(raw: Any, who: str) -> list[float | None]:
    """Return what `who` (a function, for errors) returned as numbers and None (also for NaN)."""
    values = raw
    try:
        if isinstance(raw, (str, bytes, bytearray, Mapping, Set)):  # iterable, but their items are no scores in order
            raise TypeError("not a list")
        values = _read(iter(raw), who)
        return [None if value is None else _as_number(value) for value in values]
    except GRPOExtError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise RewardError(f"{who} must return a list of numbers or None, got {shortened(values)}") from error


def _read(values: Iterator[Any], who: str) -> list[Any]:
    try:
        return list(values)
    except GRPOExtError:
        raise
    except Exception as error:
        raise ReadingError(f"{who} raised {type(error).__name__}: {error} while its scores were read") from error


def _as_number(value: Any) -> float | None:
    try:
        number = float(value)
    except OverflowError:  # an integer beyond every float
        return math.inf if value > 0 else -math.inf
    return None if math.isnan(number) else number


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
