"""What was said on the command line of ``train``: which values, from YAML and flags, and what is for the launcher."""

from __future__ import annotations

import argparse
import importlib.resources
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_grpo_ext._suggest import did_you_mean, nearest
from trl_grpo_ext._validate import check_number
from trl_grpo_ext.cli._keys import Parser, fields_by_name, launch_actions
from trl_grpo_ext.cli._yaml import read_config
from trl_grpo_ext.errors import ConfigError


@dataclass
class Arguments:
    """The values of YAML and flags together (flags go first), and the command lines of launcher and script."""

    values: dict[str, Any]
    launch: list[str] = field(default_factory=list)
    script: list[str] = field(default_factory=list)

    @property
    def processes(self) -> int | None:
        """How many processes were asked for, None if that is left to accelerate."""
        if "--num_processes" not in self.launch:
            return None
        return process_count(self.launch[self.launch.index("--num_processes") + 1])


def process_count(text: str) -> int:
    """Return a number of processes as the launcher reads it. Raises `ConfigError` if it is none."""
    number = int(text) if text.isdecimal() else text
    check_number("num_processes", number, at_least=1, integer=True)
    return int(number)


def read_arguments(argv: list[str]) -> Arguments:
    """Read YAML and flags. Raises `ConfigError` for a flag that neither TRL, accelerate nor we know."""
    path, flags = _config_path(argv)
    from_file = {} if path is None else read_config(path)
    parser = Parser(prog="trl-grpo-ext train")
    for action in parser._actions:
        action.default, action.required = argparse.SUPPRESS, False
    try:
        given, unknown = parser.parse_known_args(flags)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    launch = _launch_flags(unknown)
    in_file = _launch_keys(from_file)
    script = _without(flags, unknown) + ([] if path is None else ["--config", path])
    return Arguments({**from_file, **vars(given)}, _resolved(in_file + launch), script)


def _config_path(argv: list[str]) -> tuple[str | None, list[str]]:
    path, flags, rest = None, [], iter(argv)
    for token in rest:
        name, equals, value = token.partition("=")
        if name != "--config":
            flags.append(token)
            continue
        path = value if equals else next(rest, None)
        if not path:
            raise ConfigError("expected a file after `--config`")
    return path, flags


def _launch_flags(unknown: list[str]) -> list[str]:
    """Return the flags for ``accelerate launch`` among those our parser does not know; raise for any other."""
    actions, flags, rest = launch_actions(), [], list(unknown)
    while rest:
        token = rest.pop(0)
        name, equals, value = token.partition("=")
        key = name.lstrip("-").replace("-", "_")
        if not name.startswith("--") or key not in actions:
            raise ConfigError(_unknown(token, name, key, [*fields_by_name(), *actions]))
        flags.append(f"--{key}")
        if actions[key] is None or actions[key].nargs != 0:
            if not equals and not rest:
                raise ConfigError(f"expected a value after `{name}`")
            flags.append(value if equals else rest.pop(0))
    return flags


def _unknown(token: str, name: str, key: str, valid: list[str]) -> str:
    if not name.startswith("--"):
        return f"unexpected argument {token!r}"
    return f"unknown flag {name!r}{nearest(key, valid) or '; `trl-grpo-ext schema` lists the valid ones'}"


def _launch_keys(values: dict[str, Any]) -> list[str]:
    ours, actions = fields_by_name(), launch_actions()
    flags = []
    for key, value in values.items():
        if key not in actions or key in ours or key == "env":
            continue
        if actions[key] is not None and actions[key].nargs == 0:
            flags += [f"--{key}"] if value else []
        else:
            flags += [f"--{key}", str(value)]
    return flags


def _resolved(flags: list[str]) -> list[str]:
    """Replace TRL's ``--accelerate_config name-or-file`` by accelerate's ``--config_file``, as TRL's command does."""
    if "--accelerate_config" not in flags:
        return flags
    index = flags.index("--accelerate_config")
    name = flags[index + 1]
    file = Path(name)
    if not file.is_file():
        folder = importlib.resources.files("trl.accelerate_configs")
        names = [item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml")]
        if name not in names:
            raise ConfigError(
                f"`accelerate_config` {name!r} is neither a file nor one of TRL's{did_you_mean(name, names)}"
            )
        file = Path(str(folder.joinpath(f"{name}.yaml")))
    return ["--config_file", str(file), *flags[:index], *flags[index + 2 :]]


def _without(flags: list[str], unknown: list[str]) -> list[str]:
    """Return `flags` without `unknown`, which is an ordered subsequence of it."""
    kept, rest = [], list(unknown)
    for token in flags:
        if rest and token == rest[0]:
            rest.pop(0)
        else:
            kept.append(token)
    return kept
