"""A run read back from its folder: `run.json` if it wrote one, else its last checkpoint's log and its strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl_grpo_ext.errors import ConfigError
from trl_grpo_ext.hub import STRATEGIES_FILE, read_object
from trl_grpo_ext.report.record import Row, RunRecord, ends

RECORD_FILE = "run.json"
STATE_FILE = "trainer_state.json"

HEADLINES = {
    "reward": "reward",
    "KL per token": "kl",
    "completion length, tokens": "completions/mean_length",
    "share of groups without a signal": "frac_reward_zero_std",
    "reward on held-out prompts": "eval_reward",
}
"""Row of a summary -> the name under which the trainer logs it."""


def read_run(folder: Path) -> RunRecord:
    """Return what a run has left in its output folder or in one of its checkpoints.

    The log is that of the newest checkpoint, so a run needs one: `save_strategy="no"` leaves none. Nothing is
    unpickled. Raises `ConfigError` if there is no log.
    """
    if (folder / RECORD_FILE).exists():
        return RunRecord.load(folder / RECORD_FILE)
    state = _newest_state(folder)
    log = read_object(state).get("log_history")
    if not isinstance(log, list) or not log:
        raise ConfigError(f"{state} holds no log: nothing was logged before it was saved (see `logging_steps`)")
    saved = {}
    for place in (state.parent, folder):
        if (place / STRATEGIES_FILE).exists():
            saved = read_object(place / STRATEGIES_FILE)
            break
    versions = saved.pop("_meta", {}).get("versions", {})
    without = "" if saved else " Nothing was configured: it trained as TRL does."
    return RunRecord(
        log_history=log,
        title=folder.resolve().name,
        lead=f"From the log that {state.parent.name} holds.{without}",
        summary=headline_rows(log),
        strategies=saved,
        versions=versions,
    )


def headline_rows(log_history: list[dict[str, Any]]) -> list[Row]:
    """Return the first and last values of each of `HEADLINES` that was logged; each a mean over a few entries."""
    found = {label: ends(log_history, key) for label, key in HEADLINES.items()}
    return [
        Row(label=label, before=f"{first:.4g}", after=f"{last:.4g}", change=f"{last - first:+.4g}")
        for label, (first, last) in ((label, pair) for label, pair in found.items() if pair is not None)
    ]


def _newest_state(folder: Path) -> Path:
    if not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is no folder; give the output folder of a run, or one of its checkpoints")
    if (folder / STATE_FILE).exists():
        return folder / STATE_FILE
    steps = {path: path.parent.name.rpartition("-")[2] for path in folder.glob(f"checkpoint-*/{STATE_FILE}")}
    numbered = {path: int(step) for path, step in steps.items() if step.isdigit()}
    if not numbered:
        raise ConfigError(
            f"{str(folder)!r} holds neither {RECORD_FILE} nor a checkpoint with {STATE_FILE}; a run needs "
            "`save_strategy` (and `logging_steps`) to leave a log"
        )
    return max(numbered, key=lambda path: numbered[path])
