"""Check a config file without loading a model: name every problem at once, or print the strategies as resolved.

Prints the strategies as YAML, every field written out, to standard output; problems, one a line, to standard error.
Exit status 0, or 2 if there are problems.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("config", type=Path, help="the YAML file")
    parser.add_argument(
        "--num_processes", type=int, help="how many will train, for TRL's rules about batch sizes (default: the file's)"
    )


def run(args: argparse.Namespace) -> int:
    """Print problems or the resolved strategies; return 2 or 0."""
    import yaml

    from trl_grpo_ext.cli._yaml import read_config

    values = read_config(args.config)

    from trl_grpo_ext.cli import _rewards
    from trl_grpo_ext.cli._arguments import process_count
    from trl_grpo_ext.cli._problems import check_config
    from trl_grpo_ext.cli._saved import with_saved_strategies
    from trl_grpo_ext.errors import ConfigError

    _rewards.allow_local_modules()
    values = with_saved_strategies(values)
    given = values.get("num_processes") if args.num_processes is None else args.num_processes
    try:
        report = check_config(values, processes=1 if given is None else process_count(str(given)))
    except ConfigError as error:
        report = check_config(values, processes=None)
        report.problems.append(str(error))
    for problem in report.problems:
        print(f"{args.config}: {problem}", file=sys.stderr)
    if report.problems:
        return 2
    print(yaml.safe_dump(report.resolved, sort_keys=False).strip() if report.resolved else "# no strategies: stock TRL")
    for gap in _rewards.missing(values):
        print(f"# {gap}: give it to `train` as a flag")
    return 0
