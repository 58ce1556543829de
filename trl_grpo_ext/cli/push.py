"""Publish a set of strategies as its own small repository on the Hub, with a card.

They are read from a YAML file (the strategy fields of a config; TRL's and accelerate's keys are left out), or from a
folder or Hub repository that holds grpo_strategies.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("source", help="a config in YAML, or a folder (or Hub repository) with grpo_strategies.json")
    parser.add_argument("repo_id", help="where to publish: user/name")
    parser.add_argument("--private", action="store_true", default=None, help="make the repository private")
    parser.add_argument("--revision", help="branch to commit to (default: main)")
    parser.add_argument("--message", default="Training strategies", help="commit message (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Publish and print the address; return 0."""
    from trl_grpo_ext.cli._rewards import allow_local_modules
    from trl_grpo_ext.errors import ConfigError, GRPOExtError
    from trl_grpo_ext.hub import push_strategies

    allow_local_modules()
    specs = strategies_of(args.source)
    try:
        address = push_strategies(
            specs, args.repo_id, private=args.private, revision=args.revision, commit_message=args.message
        )
    except GRPOExtError:
        raise
    except Exception as error:  # the client's and its transport's errors share no root
        raise ConfigError(f"cannot publish to {args.repo_id!r}: {' '.join(str(error).split())}") from error
    print(address)
    return 0


def strategies_of(source: str) -> dict[str, Any]:
    """Return the strategy fields in a YAML config, or those that a run or a repository has saved."""
    from trl_grpo_ext.cli._problems import Report, raise_problems, unknown_keys
    from trl_grpo_ext.cli._spec_problems import field_problems
    from trl_grpo_ext.cli._yaml import read_config
    from trl_grpo_ext.hub import load_strategies
    from trl_grpo_ext.specs import STRATEGY_FIELDS

    if Path(source).suffix not in (".yaml", ".yml"):
        return load_strategies(source)
    values = {name: value for name, value in read_config(source).items() if value is not None}
    specs = {name: value for name, value in values.items() if name in STRATEGY_FIELDS}
    wrong = [problem for name, value in specs.items() for problem in field_problems(name, value)]
    raise_problems(Report(unknown_keys(values) + wrong))
    return specs
