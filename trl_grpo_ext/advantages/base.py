"""The contract of an advantage strategy."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from trl_grpo_ext._strategy import Strategy
from trl_grpo_ext.batch import RewardBatch
from trl_grpo_ext.errors import StateError


class AdvantageOutput(NamedTuple):
    """What a strategy returns: `(N,)` float32 finite `advantages`, and `metrics` for the log."""

    advantages: Tensor
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class AdvantageStrategy(Strategy, ABC):
    """Turns the scores of a global batch into advantages: ``strategy(batch) -> AdvantageOutput``.

    Subclasses are frozen dataclasses that implement `normalize`; override `evaluate` only if the batch is needed beyond
    its scores, groups and lengths. A strategy never gathers, logs or knows about processes.

    A strategy with state changes it in `observe` only, which is called once for each training batch. Strategies that
    hold others show them `RewardBatch.evaluation`, and pass `observe` on.
    """

    family: ClassVar[str] = "advantage"
    needs_text: ClassVar[bool] = False
    """Whether the strategy reads `RewardBatch.prompts` and `RewardBatch.completions`."""

    @abstractmethod
    def normalize(self, values: Tensor, segments: Tensor, **context: Any) -> Tensor:
        """Return the `(N,)` float32 advantages of `(N,)` values for any `(N,)` int64 partition.

        Segment ids may come in any order and need not be dense. `context` carries what some strategies read, such as
        `lengths` `(N,)`, and `rows`, the `ScoredSegments` of the two tensors; the others ignore it. State is not
        changed.
        """

    def __call__(self, batch: RewardBatch, **context: Any) -> AdvantageOutput:
        """Return advantages and metrics of a global batch, and take note of it if it is a training batch.

        Unknown keywords are ignored.
        """
        output = self.evaluate(batch, **context)
        if batch.training:
            self.observe(batch)
        return output

    def evaluate(self, batch: RewardBatch, **context: Any) -> AdvantageOutput:
        """Return advantages and metrics of a global batch without changing state."""
        context = {**context, "lengths": batch.lengths, "rows": batch.rows}
        advantages = self.normalize(batch.scores, batch.groups, **context)
        return AdvantageOutput(advantages, batch_metrics(batch, advantages))

    def observe(self, batch: RewardBatch) -> None:
        """Update the state, if there is any, after a training batch. A strategy held in two places observes it once."""
        for strategy in {id(s): s for s in self.children().values() if s.has_state}.values():
            strategy.observe(batch)

    # State

    def children(self) -> dict[str, AdvantageStrategy]:
        """Return the strategies held in fields, by the path to them: ``inner``, ``parts.0.1``."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return dict(_strategies_in(values))

    @property
    def has_state(self) -> bool:
        """Whether there is a state to save: the strategy's own, or that of one it holds."""
        return any(strategy.has_state for strategy in self.children().values())

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-able state, ``{}`` where there is none."""
        return {path: strategy.state_dict() for path, strategy in self.children().items() if strategy.has_state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state from `state_dict`. Raises `StateError` if it is not that of a strategy like this one."""
        expected = self.state_dict()
        if not isinstance(state, Mapping) or set(state) != set(expected):
            raise StateError(f"cannot load the state {state!r} into {self!r}: its state looks like {expected!r}")
        for path, strategy in self.children().items():
            if path in state:
                strategy.load_state_dict(state[path])


class Composite(AdvantageStrategy, ABC):
    """Base of strategies that hold others."""

    @property
    def needs_text(self) -> bool:  # type: ignore[override]  # a constant of the class where nothing is held
        """Whether one of the strategies reads the texts."""
        return any(strategy.needs_text for strategy in self.children().values())


def batch_metrics(batch: RewardBatch, advantages: Tensor) -> dict[str, float]:
    """Return what every strategy reports: the share of constant groups and the largest ``|advantage|``."""
    if not len(advantages):
        return {"constant_groups": 0.0, "abs_max": 0.0}
    return {"constant_groups": batch.rows.constant_share.item(), "abs_max": advantages.abs().max().item()}


def prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return `metrics` with ``prefix/`` before each name."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def _strategies_in(value: Any, path: str = "") -> Iterator[tuple[str, AdvantageStrategy]]:
    """Yield ``(path, strategy)`` for the strategies in nested mappings and tuples."""
    if isinstance(value, AdvantageStrategy):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strategies_in(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _strategies_in(item, f"{path}.{index}")
