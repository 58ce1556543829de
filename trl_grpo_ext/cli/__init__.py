"""The ``trl-grpo-ext`` command: each subcommand is a module of this package, imported only when it runs."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from trl_grpo_ext import __version__
from trl_grpo_ext._suggest import did_you_mean

# name -> (module, one line for --help). A module offers `add_arguments(parser)` and `run(args) -> int`, and if it hands
# flags on, `parse_arguments(parser, argv)`.
COMMANDS = {
    "demo": ("trl_grpo_ext.cli.demo", "train a tiny model with mixed strategies and write a report"),
    "advantages": ("trl_grpo_ext.cli.advantages", "print what each strategy makes of one group of rewards"),
    "train": ("trl_grpo_ext.cli.train", "train from a config file and flags"),
    "run": ("trl_grpo_ext.cli.run", "run a script that uses TRL's GRPOTrainer with strategies put in"),
    "strategies": ("trl_grpo_ext.cli.strategies", "list every strategy with its fields"),
    "schema": ("trl_grpo_ext.cli.schema", "print a JSON Schema of the config file, for editors"),
    "check": ("trl_grpo_ext.cli.check", "check a config file and name every problem at once"),
    "report": ("trl_grpo_ext.cli.report", "write an HTML report of a run, or of several compared"),
    "push": ("trl_grpo_ext.cli.push", "publish a set of strategies on the Hub"),
}

INTERRUPTED = 128 + signal.SIGINT
BROKEN_PIPE = 128 + 13
"""Exit statuses after Ctrl-C, and with nobody to read the output, as shells have them."""


def build_parser() -> argparse.ArgumentParser:
    """Return the top-level parser; subcommands are listed but not imported."""
    listing = "\n".join(f"  {name:<12} {line}" for name, (_, line) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="trl-grpo-ext",
        description="Swappable strategies for TRL's GRPOTrainer.",
        epilog=f"commands:\n{listing}\n\n`trl-grpo-ext COMMAND --help` explains one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"trl-grpo-ext {__version__}")
    parser.add_argument("command", metavar="COMMAND", help="one of the commands below")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return its exit status.

    User errors end in one line on stderr and status 2, Ctrl-C in one line and the status that shells give it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    if not arguments:
        parser.print_help()
        return 0
    name = parser.parse_args(arguments[:1]).command
    if name not in COMMANDS:
        parser.error(f"unknown command {name!r}{did_you_mean(name, COMMANDS)}")
    try:
        status = _run(name, arguments[1:])
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read the output, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return BROKEN_PIPE
    except KeyboardInterrupt:
        print(f"trl-grpo-ext {name}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(name: str, arguments: list[str]) -> int:
    module_name, line = COMMANDS[name]
    module = importlib.import_module(module_name)
    subparser = argparse.ArgumentParser(
        prog=f"trl-grpo-ext {name}",
        description=module.__doc__ or line,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(subparser)
    parse = getattr(module, "parse_arguments", argparse.ArgumentParser.parse_args)
    args = parse(subparser, arguments)

    from trl_grpo_ext.errors import GRPOExtError

    try:
        return module.run(args)
    except GRPOExtError as error:
        for line in str(error).splitlines():
            print(f"trl-grpo-ext {name}: {line}", file=sys.stderr)
        return 2
