"""A dataset in a folder, and the settings of a few fast deterministic steps as YAML keys."""

from __future__ import annotations

import json

import pytest

from tests.tiny import PROMPTS


@pytest.fixture(scope="session")
def dataset_dir(tmp_path_factory):
    """Folder of a dataset as TRL's script loads it: prompts, and the answers that `accuracy_reward` asks for."""
    folder = tmp_path_factory.mktemp("dataset")
    rows = [{"prompt": PROMPTS[i % len(PROMPTS)], "solution": "$3$"} for i in range(16)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder)


@pytest.fixture
def settings(tmp_path, tiny_model_dir, dataset_dir):
    """What a config needs to train the tiny model for two steps."""
    return {
        "model_name_or_path": tiny_model_dir,
        "dataset_name": dataset_dir,
        "output_dir": str(tmp_path / "out"),
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 7,
    }
