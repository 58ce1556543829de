"""One training process of ``trl-grpo-ext train``: TRL's own script with our parser, config and trainer."""

from __future__ import annotations

import sys

from trl_grpo_ext.cli import INTERRUPTED
from trl_grpo_ext.errors import ConfigError, GRPOExtError


def train(argv: list[str]) -> None:
    """Train as the YAML and flags in `argv` say. Raises `ConfigError` before anything is loaded."""
    from trl.scripts import grpo

    from trl_grpo_ext.cli import _rewards
    from trl_grpo_ext.cli._arguments import read_arguments
    from trl_grpo_ext.cli._keys import Parser
    from trl_grpo_ext.cli._patch import patched
    from trl_grpo_ext.cli._saved import with_saved_strategies
    from trl_grpo_ext.specs import STRATEGY_FIELDS

    values = read_arguments(argv).values
    _rewards.allow_local_modules()
    merged = with_saved_strategies(values)
    parser = Parser(prog="trl-grpo-ext train")
    saved = {name: merged[name] for name in (*STRATEGY_FIELDS, "beta") if name in merged and name not in values}
    parser.set_defaults(**saved)
    try:
        script, training, model, dataset = parser.parse_args_and_config(argv, fail_with_unknown_args=False)
    except (ValueError, TypeError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error
    script.reward_funcs = [_rewards.dotted(name) for name in script.reward_funcs or []]
    with patched():
        grpo.main(script, training, model, dataset)


def main() -> int:
    """Train as the command line says; user errors end in one line and status 2, Ctrl-C in what the parent says."""
    try:
        train(sys.argv[1:])
    except GRPOExtError as error:
        print(f"trl-grpo-ext train: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # most of it is imports, so they are inside
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
