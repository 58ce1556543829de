"""Reward models trained once for all tests here."""

from __future__ import annotations

import pytest

from tests.rewards.models import random_classifier, reward_lora, train_reward


@pytest.fixture(scope="session")
def reward_dir(tiny_model_dir, tmp_path_factory):
    """Folder of a reward model on the tiny Llama, trained to like digits."""
    return train_reward(tiny_model_dir, tmp_path_factory.mktemp("reward"))


@pytest.fixture(scope="session")
def adapter_dir(tiny_model_dir, tmp_path_factory):
    """Folder of a LoRA reward adapter on the tiny Llama, trained to like digits."""
    return train_reward(tiny_model_dir, tmp_path_factory.mktemp("adapter"), peft_config=reward_lora())


@pytest.fixture(scope="session")
def classifier_dir(tiny_model_dir, tmp_path_factory):
    """Return a function from the name of an architecture to the folder of a random classifier of it."""
    folders = {}

    def folder(architecture):
        if architecture not in folders:
            target = tmp_path_factory.mktemp(architecture)
            folders[architecture] = random_classifier(target, tiny_model_dir, architecture)
        return folders[architecture]

    return folder
