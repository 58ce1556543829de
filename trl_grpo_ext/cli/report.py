"""Write an HTML report of a run, or of several runs compared: reward, KL and length curves, figures, strategies.

A run is its output folder (or one of its checkpoints). Several runs are drawn over each other.
"""

from __future__ import annotations

import argparse
from pathlib import Path

DEFAULT_COMPARISON = Path("runs/comparison")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output folder of a run, or a checkpoint")
    parser.add_argument(
        "--output",
        type=Path,
        help=f"folder for report.html and plots/ (default: the run's own; for several {DEFAULT_COMPARISON})",
    )


def run(args: argparse.Namespace) -> int:
    """Write the report and print where it is; return 0."""
    from trl_grpo_ext.errors import ConfigError
    from trl_grpo_ext.report import names_of, read_run, require_matplotlib, write_comparison, write_report

    require_matplotlib()
    records = [read_run(folder) for folder in args.runs]
    try:
        if len(records) == 1:
            path = write_report(records[0], args.output or args.runs[0])
        else:
            runs = dict(zip(names_of(args.runs), records, strict=True))
            path = write_comparison(runs, args.output or DEFAULT_COMPARISON)
    except OSError as error:
        raise ConfigError(f"cannot write the report: {error.strerror}: {error.filename}") from error
    print(path)
    return 0
