"""Our metrics reach the trackers through the trainer's own reporting: TensorBoard and trackio, for real."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

RUN = """
import sys, torch
torch.set_num_threads(1)
from tests.tiny import arguments, digits, lora, prompts
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer
model, folder, tracker = sys.argv[1:]
strategies = {"advantage": {"kind": "length_bucketed", "buckets": 2}, "kl": "k3", "kl_log": ["k1"], "beta": 0.1}
args = arguments(GRPOExtConfig, folder, report_to=tracker, project="grpo-ext", run_name="run", **strategies)
trainer = GRPOExtTrainer(model, digits, args, train_dataset=prompts(), peft_config=lora(), beta_control={
    "kind": "linear_beta", "start": 0.1, "end": 0.3, "steps": 3})
trainer.train()
trainer.end() if hasattr(trainer, "end") else None
ours = [k for k in trainer.state.log_history[0] if k.startswith("advantage/") or k in ("kl", "beta", "kl/k1")]
print("LOGGED", *sorted(ours))
"""


def tracked(tracker, tmp_path, model, **env):
    """Train three steps in a process of its own; return the names of our metrics in its log."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), **env}
    result = subprocess.run(
        [sys.executable, "-c", RUN, model, str(tmp_path / "out"), tracker],
        cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    line = next(line for line in result.stdout.splitlines() if line.startswith("LOGGED"))
    ours = line.split()[1:]
    assert {"kl", "beta"} <= set(ours)
    assert any(name.startswith("advantage/") for name in ours)
    return ours


@pytest.mark.slow
def test_tensorboard_receives_our_metrics(tmp_path, tiny_model_dir):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = tmp_path / "board"
    ours = tracked("tensorboard", tmp_path, tiny_model_dir, TENSORBOARD_LOGGING_DIR=str(folder))
    (events,) = tmp_path.rglob("events.out.tfevents*")
    board = reader.EventAccumulator(str(events.parent))
    board.Reload()
    scalars = set(board.Tags()["scalars"])
    assert {f"train/{name}" for name in ours} <= scalars
    values = [event.value for event in board.Scalars("train/beta")]
    assert len(values) == 3
    assert values[0] < values[1] < values[2]


@pytest.mark.slow
def test_trackio_receives_our_metrics(tmp_path, tiny_model_dir):
    pytest.importorskip("trackio")
    folder = tmp_path / "trackio"
    ours = tracked("trackio", tmp_path, tiny_model_dir, TRACKIO_DIR=str(folder))
    import sqlite3

    (database,) = [path for path in folder.rglob("*.db") if "grpo" in path.name]
    rows = sqlite3.connect(database).execute("SELECT metrics FROM metrics ORDER BY step").fetchall()
    text = "".join(str(row) for row in rows)
    for name in ours:
        assert name in text or name.replace("/", "\\/") in text
