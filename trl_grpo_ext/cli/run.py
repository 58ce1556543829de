"""Run a script that uses TRL's GRPOTrainer, unmodified, with strategies put in.

Each strategy is used where the script does not set it itself. Without --strategies the script trains as with stock TRL,
bit for bit. The script's own arguments go after `--`:

  trl-grpo-ext run train.py --strategies strategies.yaml -- --learning_rate 1e-5

On several processes, start the same through a launcher:

  accelerate launch -m trl_grpo_ext.cli run train.py --strategies strategies.yaml -- --learning_rate 1e-5

The file holds the strategy fields of a config, and `beta` if the script leaves it at 0:

  advantage: rank
  kl: k3
  beta: 0.01
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("script", help="the Python script")
    parser.add_argument(
        "--strategies",
        metavar="SOURCE",
        help="a YAML file, or a folder or Hub repository with grpo_strategies.json (default: none, stock TRL)",
    )
    parser.add_argument("--strategies_revision", metavar="REVISION", help="branch, tag or commit on the Hub")
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="allow strategies from the Hub that import code"
    )


def parse_arguments(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Split at the first ``--``: ours before it, the script's after it."""
    end = argv.index("--") if "--" in argv else len(argv)
    args, unknown = parser.parse_known_args(argv[:end])
    if unknown:
        parser.error(f"unknown argument {unknown[0]!r}; the script's own arguments go after `--`")
    args.script_arguments = argv[end + 1 :]
    return args


def run(args: argparse.Namespace) -> int:
    """Run the script; return 0, or let its own exit status through."""
    from trl_grpo_ext.cli._rewards import allow_local_modules
    from trl_grpo_ext.errors import ConfigError

    if not Path(args.script).is_file():
        raise ConfigError(f"there is no script {args.script!r}")
    allow_local_modules(str(Path(args.script).resolve().parent))
    strategies = read_strategies(args.strategies, args.strategies_revision, args.trust_remote_code)

    from trl_grpo_ext.cli._patch import patched

    with patched(strategies) as use, _as_program(args.script, args.script_arguments):
        try:
            runpy.run_path(args.script, run_name="__main__")
        except SystemExit:
            _tell(use)
            raise
        _tell(use)
    if strategies and not use:
        raise ConfigError(f"{args.script} built no GRPOTrainer, so the strategies were not used")
    return 0


def read_strategies(source: str | None, revision: str | None = None, trust_remote_code: bool = False) -> dict[str, Any]:
    """Return config field -> spec from YAML, or as an earlier run saved them; raise with every problem at once."""
    from trl_grpo_ext._strategy import read_number
    from trl_grpo_ext._suggest import did_you_mean
    from trl_grpo_ext._validate import check_number
    from trl_grpo_ext.cli._spec_problems import field_problems
    from trl_grpo_ext.cli._yaml import read_config
    from trl_grpo_ext.errors import ConfigError, SpecError
    from trl_grpo_ext.specs import STRATEGY_FIELDS

    of_yaml = source is not None and Path(source).suffix in (".yaml", ".yml")
    if revision is not None and (source is None or of_yaml):
        raise ConfigError(f"`--strategies_revision` needs `--strategies` to be a Hub repository, got {source!r}")
    if source is None:
        return {}
    if not of_yaml:
        return _saved(source, revision, trust_remote_code)
    values = {name: value for name, value in read_config(source).items() if value is not None}
    problems = []
    for name, value in values.items():
        if name in STRATEGY_FIELDS:
            problems += field_problems(name, value)
        elif name != "beta":
            problems.append(f"unknown key {name!r}{did_you_mean(str(name), (*STRATEGY_FIELDS, 'beta'))}")
    if "beta" in values:
        values["beta"] = read_number(values["beta"])  # YAML takes 1e-2 for text
        try:
            check_number("beta", values["beta"], at_least=0)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise SpecError("\n".join(f"{source}: {problem}" for problem in problems))
    return values


def _saved(source: str, revision: str | None, trust_remote_code: bool) -> dict[str, Any]:
    """Return what a run has saved; its rewards only if they can be used: scripts nearly always bring their own."""
    from trl_grpo_ext.cli._saved import with_beta
    from trl_grpo_ext.errors import ConfigError
    from trl_grpo_ext.hub import load_saved

    try:
        return with_beta(load_saved(source, revision, trust_remote_code))
    except ConfigError as error:
        rest = load_saved(source, revision, trust_remote_code, without=("rewards",))  # raises if it was not the rewards
        print(f"trl-grpo-ext run: left out, the script's own are used: {error}", file=sys.stderr)
        return with_beta(rest)


class _as_program:  # noqa: N801  # reads as a phrase: with _as_program(script, arguments)
    """While active, `sys.argv` and `sys.path` are as if Python had been started with the script."""

    def __init__(self, script: str, arguments: list[str]) -> None:
        self._argv = [script, *arguments]
        self._folder = str(Path(script).resolve().parent)

    def __enter__(self) -> None:
        self._before = sys.argv, list(sys.path)
        sys.argv = self._argv
        sys.path.insert(0, self._folder)

    def __exit__(self, *exception: object) -> None:
        sys.argv, sys.path[:] = self._before


def _tell(use: dict[str, set[str]]) -> None:
    """Say on the main process which strategies trained, and which were left to the script."""
    if os.environ.get("RANK", "0") != "0" or not any(use.values()):
        return
    parts = [f"put in {', '.join(sorted(use['put in']))}"] if use["put in"] else []
    parts += [f"the script sets {', '.join(sorted(use['sets']))} itself"] if use["sets"] else []
    print(f"trl-grpo-ext run: {'; '.join(parts)}", file=sys.stderr)
