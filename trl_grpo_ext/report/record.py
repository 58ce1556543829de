"""What a report is made from: a trainer's log, its strategies, a summary table and the last batch. All JSON-able."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trl_grpo_ext.batch import RewardBatch
from trl_grpo_ext.errors import ConfigError
from trl_grpo_ext.hub import versions, write_json

SMOOTHING = 10
"""Logged values in the moving average of a curve, and in the "first" and "last" values of a run."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the summary table; an empty cell where a value has no meaning."""

    label: str
    before: str = ""
    after: str = ""
    change: str = ""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A finished run. Only `log_history` (a trainer's ``state.log_history``) is needed; absent parts are not shown."""

    log_history: Sequence[Mapping[str, Any]]
    title: str = "GRPO run"
    lead: str = ""
    """A paragraph of plain text below the title."""
    summary: Sequence[Row] = ()
    strategies: Mapping[str, Any] = field(default_factory=dict)
    """Config field -> spec, as in `grpo_strategies.json`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Other settings worth showing next to the strategies."""
    batch: RewardBatch | None = None
    """A training batch, to show what each advantage strategy makes of it."""
    guides: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    """Logged name -> a level to mark in its curve, with its label."""
    usage: str = ""
    """Code that loads what was trained."""
    versions: Mapping[str, str] = field(default_factory=versions)

    def save(self, path: Path) -> None:
        """Write the record as JSON, so that the report can be made again without the run."""
        content = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        content["summary"] = [dataclasses.asdict(row) for row in self.summary]
        content["batch"] = None if self.batch is None else _dump_batch(self.batch)
        write_json(path, content)

    @classmethod
    def load(cls, path: Path) -> RunRecord:
        """Read a record that `save` wrote. Raises `ConfigError` if it is not one."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            content["summary"] = [Row(**row) for row in content["summary"]]
            content["batch"] = content["batch"] and _load_batch(content["batch"])
            content["guides"] = {name: (level, label) for name, (level, label) in content["guides"].items()}
            return cls(**content)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not the record of a run: {error}") from error


def series(log_history: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return the steps at which `name` was logged, and its values.

    >>> series([{"step": 1, "kl": 0.0}, {"step": 2, "kl": 0.5}, {"step": 2, "train_loss": 0.1}], "kl")
    ([1, 2], [0.0, 0.5])
    """
    points = [(entry["step"], entry[name]) for entry in log_history if entry.get(name) is not None and "step" in entry]
    return [int(step) for step, _ in points], [float(value) for _, value in points]


def ends(log_history: Sequence[Mapping[str, Any]], name: str, window: int = SMOOTHING) -> tuple[float, float] | None:
    """Return the mean of the first and of the last `window` values of `name`, or None if it was never logged.

    A short log is split in the middle, so that no value is in both.
    """
    _, values = series(log_history, name)
    if not values:
        return None
    window = max(1, min(window, len(values) // 2))
    first, last = values[:window], values[-window:]
    return sum(first) / len(first), sum(last) / len(last)


class BatchTap:
    """Stands in for a trainer's advantage strategy, passes everything on, and keeps the last training batch."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.batch: RewardBatch | None = None

    @classmethod
    def attach(cls, trainer: Any) -> BatchTap | None:
        """Tap the trainer's advantage strategy; None if it has none (then its advantages are TRL's own)."""
        if getattr(trainer, "advantage", None) is None:
            return None
        trainer.advantage = tap = cls(trainer.advantage)
        return tap

    def __call__(self, batch: RewardBatch, **context: Any) -> Any:
        if batch.training:
            self.batch = batch
        return self.strategy(batch, **context)

    def __getattr__(self, name: str) -> Any:
        if name == "strategy":  # not set yet: while unpickling
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def __repr__(self) -> str:
        return repr(self.strategy)


def _dump_batch(batch: RewardBatch) -> dict[str, Any]:
    # JSON has no NaN: a cell without a score is null.
    rewards = [[None if cell != cell else cell for cell in row] for row in batch.cells.tolist()]
    return {
        "rewards": rewards,
        "weights": batch.weights.tolist(),
        "lengths": batch.lengths.tolist(),
        "truncated": batch.truncated.tolist(),
        "num_generations": batch.num_generations,
        "names": list(batch.names),
    }


def _load_batch(content: Mapping[str, Any]) -> RewardBatch:
    cells = [[float("nan") if cell is None else cell for cell in row] for row in content["rewards"]]
    return RewardBatch(
        rewards=torch.tensor(cells, dtype=torch.float32),
        weights=torch.tensor(content["weights"], dtype=torch.float32),
        lengths=torch.tensor(content["lengths"], dtype=torch.int64),
        truncated=torch.tensor(content["truncated"], dtype=torch.bool),
        num_generations=content["num_generations"],
        names=tuple(content["names"]),
    )
