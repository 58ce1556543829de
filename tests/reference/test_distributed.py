"""Two gloo processes keep the same anchor."""

from __future__ import annotations

import json

import pytest

from tests.trainer.test_distributed import launch


@pytest.mark.slow
@pytest.mark.distributed
def test_both_processes_have_the_same_anchor(tiny_model_dir, tmp_path):
    result = launch("tests/reference/anchor_worker.py", tiny_model_dir, str(tmp_path), processes=2)
    assert result.returncode == 0, result.stderr[-3000:]
    one, two = (json.loads((tmp_path / f"rank{i}.json").read_text()) for i in range(2))
    assert one["policy"] == two["policy"]
    assert one["anchor"] == two["anchor"] != one["policy"]
    assert one["base"] is two["base"] is True
    assert len(one["errors"]) == 1
    assert 0 < one["errors"][0] < 0.1
    assert one["kl"][0] == 0
