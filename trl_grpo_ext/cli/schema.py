"""Print a JSON Schema of the config file, so that an editor completes and checks it.

Save it, and put this line at the top of the YAML (VS Code, Neovim, PyCharm and others read it):
# yaml-language-server: $schema=grpo-schema.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("--output", type=Path, metavar="FILE", help="write it to this file instead of printing it")


def run(args: argparse.Namespace) -> int:
    """Print or write the schema; return 0."""
    from trl_grpo_ext.cli._keys import config_schema

    text = json.dumps(config_schema(), indent=2)
    if args.output is None:
        print(text)
    else:
        from trl_grpo_ext.errors import ConfigError

        try:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {str(args.output)!r}: {error.strerror}") from error
    return 0
