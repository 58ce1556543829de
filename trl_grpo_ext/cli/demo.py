"""Train a tiny model with swapped strategies, in about two minutes without a GPU, and write a report.

A character-level model is built here and learns sums from a sloppy text, so that it is right only some of the time.
GRPO with LoRA, a rank advantage, a k3 KL against the adapter-off reference and a length penalty then makes it better.
Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

STAGES = {
    "warm-start": "learning from a sloppy text",
    "before": "held-out accuracy before GRPO",
    "grpo": "GRPO",
    "after": "held-out accuracy after GRPO",
}
BAR_WIDTH = 28
PLAIN_LINES = 5
"""How many lines a stage prints where there is no terminal to redraw one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/demo"),
        help="folder for the model, the adapter and the report (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=200, help="GRPO steps (default: %(default)s)")
    parser.add_argument("--warm-steps", type=int, default=400, help="supervised steps before (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Run the demo, print a table and how to load what was trained; return 0."""
    from trl_grpo_ext.report import require_matplotlib

    require_matplotlib()  # takes no time; the next import does
    print("loading TRL ...", flush=True)
    _quieten()

    from trl_grpo_ext.demo import DemoSettings, run_demo

    settings = DemoSettings(output=args.output, steps=args.steps, warm_steps=args.warm_steps, seed=args.seed)
    result = run_demo(settings, Bar(sys.stdout))
    record = result.record
    _print_table([("", "before", "after", "change"), *((r.label, r.before, r.after, r.change) for r in record.summary)])
    print(f"\nReport: {result.report}\nBase model: {result.base}\nAdapter and grpo_strategies.json: {result.adapter}")
    print(f"\nLoad it with:\n\n{record.usage}")
    return 0


class Bar:
    """Progress on one line that redraws itself; a few plain lines where the stream is not a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._redraws = stream.isatty()
        self._stage = ""
        self._began = 0.0
        self._printed = 0

    def __call__(self, stage: str, done: int, total: int, values: Mapping[str, float]) -> None:
        """Show that `stage` is at `done` of `total`, with the latest values."""
        if stage not in STAGES:
            return
        if stage != self._stage:
            self._stage, self._began, self._printed = stage, time.perf_counter(), 0
        shown = "  ".join(f"{name} {value:.3f}" for name, value in values.items())
        text = f"{STAGES[stage]}: {shown}"
        if total > 1:
            text = f"{STAGES[stage]} {done}/{total}  {shown}"
        if self._redraws:
            self._redraw(text, done, total)
        elif done * PLAIN_LINES // total > self._printed:
            self._printed = done * PLAIN_LINES // total
            print(text, file=self._stream, flush=True)

    def _redraw(self, text: str, done: int, total: int) -> None:
        if total > 1:
            filled = BAR_WIDTH * done // total
            elapsed = time.perf_counter() - self._began
            left = f"  {elapsed * (total - done) / done:.0f} s left" if 1 < done < total else ""
            text = f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {text}{left}"
        width = _terminal_width(self._stream)
        print(f"\r{text[: width - 1]:<{width - 1}}", end="\n" if done == total else "", file=self._stream, flush=True)


def _terminal_width(stream: TextIO) -> int:
    try:
        return max(20, os.get_terminal_size(stream.fileno()).columns)
    except OSError:
        return 80


def _quieten() -> None:
    """Keep other packages' bars, warnings and notices off the one line of progress."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    for package in ("transformers", "trl", "peft", "accelerate", "torch", "datasets"):
        warnings.filterwarnings("ignore", module=rf"{package}(\.|$)")


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for label, *cells in rows:
        padded = "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        print(f"{label:<{widths[0]}}  {padded}".rstrip())
