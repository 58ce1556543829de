"""A tiny real model and task, shared by the trainer tests."""

from __future__ import annotations

import os

os.environ.setdefault("ACCELERATE_USE_CPU", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(1)  # tiny models: threads cost more than they give


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory):
    """Folder of a 2-layer Llama with a character tokenizer, random weights."""
    from tests.tiny import save_tiny_model

    return str(save_tiny_model(tmp_path_factory.mktemp("tiny")))
