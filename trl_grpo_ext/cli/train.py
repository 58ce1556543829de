"""Train from a config file and flags: everything `trl grpo` takes, and the strategies.

  trl-grpo-ext train --config run.yaml --learning_rate 1e-5 --advantage '{"kind": "zscore", "ddof": 0}'

A flag goes before the same key in the file. `--num_processes`, `--accelerate_config` and whatever else
`accelerate launch` takes goes to it, as with TRL's own command. Reward functions are given by TRL's names or as
`module.function` in `reward_funcs`, or as specs in `rewards`. `--strategies_from` takes the strategies that an earlier
run saved in a folder or on the Hub, where none is set here; nothing from there is executed without
`--trust_remote_code`.

The config is checked before anything is loaded. `trl-grpo-ext train --help_all` lists every flag.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from trl_grpo_ext.cli import INTERRUPTED

WORKER = "trl_grpo_ext.cli._worker"

PATIENCE = 10.0
"""Seconds that processes have to end by themselves after Ctrl-C, which the terminal sends to them too."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that are not TRL's: those are known only once TRL is loaded."""
    parser.add_argument("--config", metavar="FILE", help="the YAML file")
    parser.add_argument("--help_all", action="store_true", help="list every flag (loads TRL, takes some seconds)")
    parser.epilog = "Any other flag is a field of TRL's GRPOConfig, ModelConfig or script, or of `accelerate launch`."


def parse_arguments(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Leave everything but the help to TRL's parser."""
    if {"-h", "--help"} & set(argv):
        parser.parse_args(["--help"])
    return argparse.Namespace(argv=argv, help_all="--help_all" in argv)


def run(args: argparse.Namespace) -> int:
    """Check the config, then train it through ``accelerate launch``; return its exit status."""
    from trl_grpo_ext.cli import _problems, _rewards
    from trl_grpo_ext.cli._arguments import read_arguments
    from trl_grpo_ext.cli._keys import Parser
    from trl_grpo_ext.cli._saved import with_saved_strategies

    if args.help_all:
        Parser(prog="trl-grpo-ext train").print_help()
        return 0
    arguments = read_arguments(args.argv)
    _set_environment(arguments.values)
    _rewards.allow_local_modules()
    values = with_saved_strategies(arguments.values)
    report = _problems.check_config(values, processes=arguments.processes)
    report.problems += _rewards.missing(values)
    _problems.raise_problems(report)
    if values.get("output_dir"):
        _check_folder(Path(values["output_dir"]))
    return launch(arguments.launch, arguments.script)


def _check_folder(folder: Path) -> None:
    """Make the output folder, or raise `ConfigError`: rather now than when the first checkpoint is saved."""
    from trl_grpo_ext.errors import ConfigError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"`output_dir`: cannot write to {str(folder)!r}: {error.strerror}") from error


def launch(launch_arguments: list[str], script_arguments: list[str]) -> int:
    """Start the worker through ``accelerate launch``; return its exit status.

    Raises `KeyboardInterrupt` if it was interrupted, here or there, and then leaves no process behind.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    command = [*launch_arguments, "--module", WORKER, *script_arguments]
    arguments = launch_command_parser().parse_args(command)
    _start_all_on_a_cpu(arguments)
    status = 0
    try:
        launch_command(arguments)
    except KeyboardInterrupt:
        _end_children()
        raise
    except subprocess.CalledProcessError as error:  # it has said itself what is wrong
        status = error.returncode
    except SignalException as error:  # several processes, which have been ended
        status = 128 + error.sigval
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        status = failure.exitcode if failure.exitcode in _INTERRUPTED else 1
        if status == 1:
            print(error, file=sys.stderr)
    if status in _INTERRUPTED:
        raise KeyboardInterrupt
    return status


_INTERRUPTED = (INTERRUPTED, -signal.SIGINT)
"""How a process that Ctrl-C has ended is told by a shell, and by Python."""


def _end_children() -> None:
    """Wait for the processes that were started, then end those that are left."""
    import psutil  # type: ignore[import-untyped]

    alive = psutil.Process().children(recursive=True)
    for end in (psutil.Process.terminate, psutil.Process.kill):
        _, alive = psutil.wait_procs(alive, timeout=PATIENCE)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                end(process)


def _start_all_on_a_cpu(arguments: argparse.Namespace) -> None:
    """Let several processes on a CPU be several: left to itself, ``accelerate launch`` starts one and says nothing."""
    import torch

    on_cpu = arguments.cpu or not getattr(torch, "accelerator", torch.cuda).is_available()
    if on_cpu and (arguments.num_processes or 1) > 1 and arguments.mpirun_hostfile is None:
        os.environ["ACCELERATE_USE_CPU"] = "true"
        arguments.cpu, arguments.multi_gpu = False, True  # which means torchrun, on whatever device


def _set_environment(values: dict) -> None:
    for name, value in (values.get("env") or {}).items() if isinstance(values.get("env"), dict) else ():
        os.environ[name] = str(value)
