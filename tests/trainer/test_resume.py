"""A run that is killed and resumed is the run that was not: weights, strategy state, and what it says of a misfit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.trainer.killed_worker import make_trainer
from trl_grpo_ext import StateError

ROOT = Path(__file__).parents[2]
ADAPTIVE = {"kind": "adaptive", "before": "rank", "after": "mean_centered", "min_std": 0.05, "patience": 4}


CONTROLLED = {
    "advantage": ADAPTIVE,
    "kl": "k3",
    "beta": 0.1,
    "beta_control": {"kind": "adaptive_beta", "target": 0.001, "horizon": 20.0},
    "reference": {"kind": "moving_anchor", "every": 2},
}


def weights_of(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def active(logs: list[dict]) -> list[float]:
    """Which half of Adaptive trained, per step."""
    return [entry["advantage/adaptive_after"] for entry in logs if "advantage/adaptive_after" in entry]


def test_killed_in_the_middle_and_resumed(tiny_model_dir, tmp_path):
    settings = {
        "advantage": ADAPTIVE,
        "kl": "k3",
        "beta": 0.1,
        "beta_control": {"kind": "adaptive_beta", "target": 0.001, "horizon": 20.0},
        "max_steps": 8,
    }
    whole = make_trainer(tiny_model_dir, str(tmp_path / "whole"), settings)
    whole.train()
    switches = active(whole.state.log_history)
    assert switches == [0.0] * 4 + [1.0] * 4  # the call that completes the streak of four still uses `before`

    folder = tmp_path / "killed"
    killed = subprocess.run(
        [sys.executable, "-m", "tests.trainer.killed_worker", tiny_model_dir, str(folder), json.dumps(settings), "3"],
        cwd=ROOT,
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert (folder / "checkpoint-2" / "grpo_strategy_state.json").exists()

    resumed = make_trainer(tiny_model_dir, str(folder), settings)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert active(resumed.state.log_history) == switches
    assert torch.equal(weights_of(resumed), weights_of(whole))
    assert resumed.beta == whole.beta


def test_evaluation_does_not_move_the_state(tiny_model_dir, tmp_path):
    from tests.tiny import prompts

    settings = {"advantage": ADAPTIVE, "max_steps": 1, "per_device_eval_batch_size": 4}
    trainer = make_trainer(tiny_model_dir, str(tmp_path), settings)
    trainer.train()
    before = trainer.advantage.state_dict()
    trainer.evaluate(prompts(4))
    assert trainer.advantage.state_dict() == before


def test_resuming_with_a_strategy_that_was_not_saved(tiny_model_dir, tmp_path):
    make_trainer(tiny_model_dir, str(tmp_path), {"max_steps": 2, "advantage": "rank"}).train()
    other = make_trainer(tiny_model_dir, str(tmp_path), {"max_steps": 4, "advantage": ADAPTIVE})
    with pytest.raises(StateError, match=r"no saved state for `advantage=Adaptive"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.fixture(scope="module")
def controlled(tiny_model_dir, tmp_path_factory):
    """Checkpoint of a run with state: an adaptive advantage, a beta control and a moving anchor."""
    folder = tmp_path_factory.mktemp("controlled")
    make_trainer(tiny_model_dir, str(folder), {**CONTROLLED, "max_steps": 2}).train()
    return folder / "checkpoint-2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"beta_control": {"kind": "linear_beta", "start": 0.1, "end": 0.0, "steps": 9}},
            "`beta_control` 'adaptive_beta'",
        ),
        ({"reference": "frozen_adapter"}, "`reference` 'moving_anchor', whose state is not that of 'frozen_adapter'"),
    ],
)
def test_resuming_with_another_kind_that_would_misread_the_state(
    controlled, tiny_model_dir, tmp_path, changes, message
):
    other = make_trainer(tiny_model_dir, str(tmp_path), {**CONTROLLED, **changes, "max_steps": 4})
    with pytest.raises(StateError, match=message):
        other.train(resume_from_checkpoint=str(controlled))


def test_resuming_without_a_strategy_is_told(controlled, tiny_model_dir, tmp_path, caplog):
    kept = {name: value for name, value in CONTROLLED.items() if name != "beta_control"}
    other = make_trainer(tiny_model_dir, str(tmp_path), {**kept, "kl": "k2", "max_steps": 3})
    other.train(resume_from_checkpoint=str(controlled))
    (told,) = [r.getMessage() for r in caplog.records if "other strategies" in r.getMessage()]
    assert "`beta_control` was {'kind': 'adaptive_beta'" in told
    assert "is unset" in told
    assert "`kl` was" in told
    assert "advantage" not in told


def test_resuming_with_the_same_strategies_says_nothing(controlled, tiny_model_dir, tmp_path, caplog):
    make_trainer(tiny_model_dir, str(tmp_path), {**CONTROLLED, "max_steps": 3}).train(str(controlled))
    assert not [r for r in caplog.records if "other strategies" in r.getMessage()]


@pytest.mark.parametrize("content", ["", "{", "null", "[]", "\xff", "[" * 100_000])
@pytest.mark.parametrize("name", ["grpo_strategy_state.json", "grpo_strategies.json"])
def test_a_corrupted_file_is_named(controlled, tiny_model_dir, tmp_path, name, content):
    shutil.copytree(controlled, tmp_path / "copy")
    (tmp_path / "copy" / name).write_bytes(content.encode("latin-1"))
    other = make_trainer(tiny_model_dir, str(tmp_path), {**CONTROLLED, "max_steps": 4})
    with pytest.raises(StateError, match=name):
        other.train(resume_from_checkpoint=str(tmp_path / "copy"))


@pytest.mark.slow
def test_adaptive_beta_holds_its_target_where_a_constant_beta_drifts(tiny_model_dir, tmp_path):
    # Left alone, this run's KL rises to about 0.02 and stays there, four times the target.
    target, start = 0.005, 0.02
    common = {"kl": "k3", "beta": start, "max_steps": 200, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    control = {"kind": "adaptive_beta", "target": target, "horizon": 20.0, "max": 100.0}
    held = make_trainer(tiny_model_dir, str(tmp_path / "held"), {**common, "beta_control": control})
    held.train()
    drifting = make_trainer(tiny_model_dir, str(tmp_path / "drifting"), common)
    drifting.train()

    def late_kl(trainer) -> float:
        values = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
        return sum(values[100:]) / len(values[100:])

    assert late_kl(held) == pytest.approx(target, rel=0.3)
    assert abs(late_kl(drifting) / target - 1) > 0.5
    assert held.beta != pytest.approx(start)
