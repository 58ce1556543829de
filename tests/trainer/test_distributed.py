"""Two gloo processes: a group that spans ranks is compared as one group."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.distributed


def launch(script: str, *args: str, processes: int, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run `script` under torchrun on the CPU and return what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", "0"]
    command = [*command, "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", str(ROOT / script), *args]
    environment = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    import os

    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.mark.parametrize(("strategy", "placement"), [("zscore", "loss"), ("rank", "loss"), ("zscore", "reward")])
def test_a_group_across_ranks_equals_one_process(tiny_model_dir, tmp_path, strategy, placement):
    """CASES 14: two rows per process and G=4, against the same eight completions scored by hand in one process."""
    result = launch(
        "tests/trainer/distributed_worker.py", tiny_model_dir, str(tmp_path), strategy, placement, processes=2
    )
    assert result.returncode == 0, result.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{i}.json").read_text()) for i in range(2)]

    rewards = torch.tensor(ranks[0]["rewards"])
    assert ranks[1]["rewards"] == ranks[0]["rewards"]  # both saw the whole batch
    assert rewards.shape == (4,)
    if placement == "reward":  # each rank computed its own rows' KL; both see all of them, in the scores
        assert ranks[0]["names"] == ["code_sum", "kl_penalty"]
        assert ranks[0]["penalty"] == ranks[1]["penalty"]
        assert all(value != 0 for value in ranks[0]["penalty"])
    from trl_grpo_ext import from_spec

    expected = from_spec(strategy, family="advantage").normalize(rewards, torch.zeros(4, dtype=torch.int64))
    assert expected.abs().max() > 0
    assert ranks[0]["advantages"] + ranks[1]["advantages"] == expected.tolist()
    assert ranks[0]["logged"] == expected.tolist()
    assert ranks[0]["weights"] == ranks[1]["weights"]
