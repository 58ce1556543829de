"""Two processes: groups that span both, and reward functions that fail on one of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.rewards.test_shaping import batch, longer
from trl_grpo_ext.advantages import ZScore
from trl_grpo_ext.rewards import GroupLengthReward, PairwiseWinRate, PassRateLengthPenalty

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ended(tiny_model_dir, tmp_path_factory):
    """Run `workers` in two processes; return exit code, output and results of each."""
    folder = tmp_path_factory.mktemp("distributed")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    processes = []
    for rank in range(2):
        env = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.rewards.workers", tiny_model_dir, str(folder)]
        with Path(folder, f"{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=log))
    ends = []
    deadline = time.monotonic() + 600
    for rank, process in enumerate(processes):
        try:
            code = process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = None
        text, written = Path(folder, f"{rank}.log").read_text(), Path(folder, f"{rank}.json")
        assert written.exists(), f"process {rank} ended with {code}:\n{text[-4000:]}"
        ends.append((code, text, json.loads(written.read_text())))
    return ends


def test_groups_that_span_processes_equal_one_process(ended):  # CASES 14
    first, second = (results["spanning"] for _, _, results in ended)
    for shaping in (
        GroupLengthReward(weight=0.7),
        PassRateLengthPenalty(weight=0.3, max_length=6),
        PairwiseWinRate(longer),
    ):
        seen = first[shaping.kind]
        assert seen["advantages"] == second[shaping.kind]["advantages"] == seen["local"] + second[shaping.kind]["local"]
        rows = batch(seen["digits"], seen["lengths"])
        object.__setattr__(rows, "completions", seen["completions"])
        assert seen["advantages"] == pytest.approx(ZScore()(shaping(rows)).advantages.tolist(), abs=1e-5)
    assert torch.tensor(first["group_length"]["advantages"]).abs().max() > 0


def test_a_failure_on_one_process_is_an_error_on_both(ended):  # CASES 12
    for _, _, results in ended:
        seen = results["failures"]
        assert seen["raises"].startswith(
            "reward function 'scale_reward(raises)' failed on process 1: ConnectionError: service is down after"
        )
        assert "'scale_reward(async_raises)' failed on process 1: ConnectionError" in seen["async_raises"]
        assert "'wrong_count' returned 1 scores for 2 completions" in seen["wrong_count"]
        assert "'raises' failed on process 1" in seen["plain_function"]
        assert seen["broken_judge"].startswith("the main process failed: ConnectionError: no judge")


def test_a_hang_on_one_process_is_an_error_on_both_in_bounded_time(ended):  # CASES 12
    for _, _, results in ended:
        message, _, seconds = results["failures"]["hangs"].rpartition(" after ")
        assert (
            message == "reward function 'scale_reward(hangs)' failed on process 1: TimeoutError: no scores within 3.6 s"
        )
        assert float(seconds.split()[0]) < 120


def test_retries_carry_on_with_none(ended):  # CASES 12
    for _, _, results in ended:
        assert results["failures"]["retry_raises"] == [1.0, 1.0]  # two tries on one of two processes, per batch
        assert results["failures"]["retry_hangs"] == [0.5, 0.5]


def test_both_processes_end_with_the_error(ended):  # CASES 12
    for code, text, _ in ended:
        assert code not in (0, None)
        assert "RewardError: reward function 'scale_reward(raises)' failed on process 1" in text
