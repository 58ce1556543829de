"""Print what each advantage strategy makes of one group of rewards.

Without rewards it shows the worked example of one group of four: 1 2 4 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from trl_grpo_ext._validate import check_number
from trl_grpo_ext.errors import ConfigError

WORKED_EXAMPLE = (1.0, 2.0, 4.0, 2.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument(
        "rewards", nargs="*", help="the group's rewards, in order; 'nan' or 'none' for a completion without a score"
    )
    parser.add_argument(
        "--strategy",
        action="append",
        metavar="SPEC",
        help='a kind, or JSON such as \'{"kind": "zscore", "ddof": 0}\'; repeat for several (default: all)',
    )
    parser.add_argument("--lengths", type=int, nargs="+", metavar="LEN", help="completion lengths in tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def parse_arguments(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Parse, taking ``-2e3`` and ``-inf`` for numbers, where argparse sees a flag in all but plain ones."""
    return parser.parse_args([f" {token}" if token.startswith("-") and _is_number(token) else token for token in argv])


def run(args: argparse.Namespace) -> int:
    """Print the table; return 0."""
    rewards = [_number(text) for text in args.rewards] or list(WORKED_EXAMPLE)
    rows = advantages_of(rewards, args.strategy, args.lengths)
    if args.json:
        finite = [r if math.isfinite(r) else None for r in rewards]  # JSON has no other
        print(json.dumps({"rewards": finite, "advantages": dict(rows)}))
        return 0
    width = max(len(name) for name, _ in [*rows, ("reward", [])])
    _print_row("reward", rewards, width)
    for name, values in rows:
        _print_row(name, values, width)
    return 0


def advantages_of(
    rewards: Sequence[float], specs: Sequence[str] | None = None, lengths: Sequence[int] | None = None
) -> list[tuple[str, list[float]]]:
    """Return each strategy's label and its advantages for one group; all kinds that have defaults if no `specs`.

    Raises `ConfigError` for specs, rewards or lengths that do not fit.
    """
    import torch

    from trl_grpo_ext.batch import RewardBatch

    if lengths is not None and len(lengths) != len(rewards):
        raise ConfigError(f"`--lengths` must give {len(rewards)} lengths, one per reward, got {len(lengths)}")
    for index, length in enumerate(lengths or ()):
        check_number(f"lengths[{index}]", length, at_least=0, at_most=2**53, integer=True)
    n = len(rewards)
    batch = RewardBatch(
        rewards=torch.tensor(rewards, dtype=torch.float32).unsqueeze(1),
        weights=torch.ones(1),
        lengths=torch.tensor([1] * n if lengths is None else lengths),
        truncated=torch.zeros(n, dtype=torch.bool),
        num_generations=n,
        names=("reward",),
    )
    return [(label, strategy(batch).advantages.tolist()) for label, strategy in _strategies(specs)]


def _strategies(specs: Sequence[str] | None) -> list[tuple[str, Any]]:
    from trl_grpo_ext.cli._rewards import allow_local_modules
    from trl_grpo_ext.specs import from_spec, kinds

    if specs is None:
        classes = sorted(set(kinds("advantage").values()), key=lambda cls: cls.kind)
        # A strategy made of others has no defaults to show.
        strategies = [(cls.kind, cls()) for cls in classes if all(has_default(f) for f in dataclasses.fields(cls))]  # type: ignore[arg-type]
        population = from_spec({"kind": "zscore", "ddof": 0, "eps": 0.0}, family="advantage")
        return [*strategies, ("zscore, ddof=0 eps=0", population)]
    allow_local_modules()
    return [(text, from_spec(text, family="advantage")) for text in specs]


def has_default(field: dataclasses.Field) -> bool:
    """Whether a dataclass field may be left out."""
    return not field.init or not (field.default is field.default_factory is dataclasses.MISSING)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _number(text: str) -> float:
    try:
        return math.nan if text.strip().lower() == "none" else float(text)
    except ValueError as error:
        raise ConfigError(f"a reward must be a number, 'nan' or 'none', got {text!r}") from error


def _print_row(name: str, values: Sequence[float], width: int) -> None:
    print(f"{name:<{width}}  " + "  ".join(f"{value:8.4f}" for value in values))
