"""Reward models that can't be loaded: what is seen before anything is, and errors that name the reward."""

from __future__ import annotations

import functools
import importlib.util
import shutil
from pathlib import Path

import pytest
import torch

from tests.rewards.test_adapter_reward import policy_on
from trl_grpo_ext.errors import CompatibilityError, ConfigError
from trl_grpo_ext.rewards import AdapterRewardModel, ClipReward, RetryReward, RewardModel

LLAMA, BERT = "LlamaForSequenceClassification", "BertForSequenceClassification"


def without(*patterns):
    def break_(folder: Path) -> None:
        for pattern in patterns:
            for file in folder.glob(pattern):
                file.unlink()

    return break_


def half(name):
    def break_(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return break_


BROKEN = {
    "no folder": (LLAMA, shutil.rmtree, "there is no such folder, and it can't be a Hub id"),
    "empty": (LLAMA, without("*"), "there is no config.json in it"),
    "half a config": (LLAMA, half("config.json"), "not a valid JSON file"),
    "no weights": (LLAMA, without("*.safetensors"), "there are no weights in it|no file named"),
    "half the weights": (LLAMA, half("model.safetensors"), "SafetensorError: .* incomplete metadata"),
    "no tokenizer": (LLAMA, without("tok*"), "can't load its tokenizer from .* give `tokenizer`"),
    "a tokenizer made up": (BERT, without("tok*"), "can't load its tokenizer from .* no vocabulary"),
}
"""What is wrong with a folder -> architecture, how to break it, and what loading says."""


@pytest.mark.parametrize(("architecture", "break_", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_folder_is_told_before_and_when_loading(classifier_dir, tmp_path, architecture, break_, message):
    folder = tmp_path / "broken"
    shutil.copytree(classifier_dir(architecture), folder)
    break_(folder)
    reward = RewardModel(folder, bits=None)
    retried = functools.partial(RetryReward(reward, retries=9), prompts=["p"], completions=["c"])
    for call in (reward.check_source, reward.load, retried):
        with pytest.raises(ConfigError, match=message) as error:
            call()
        assert str(error.value).startswith("reward_model(broken) can't load ")
    assert reward.module is None


def test_what_is_checked_before_besides_the_folder(classifier_dir):
    folder = classifier_dir(LLAMA)
    for options, message in (
        ({"tokenizer": "/nope"}, r"reward_model\(.*\) can't load its tokenizer from '/nope': .* no such folder"),
        ({"chat_template": "nowhere.jinja"}, "`chat_template` can't be read"),
        ({"label": 1}, "`label` is 1, but .* has 1 outputs"),
    ):
        with pytest.raises(ConfigError, match=message):
            RewardModel(folder, bits=None, **options).check_source()


def test_the_check_loads_no_weights_and_asks_no_hub(classifier_dir, monkeypatch):
    from huggingface_hub import file_download
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    def never(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", never)
    monkeypatch.setattr(file_download, "get_hf_file_metadata", never)
    RewardModel(classifier_dir(LLAMA)).check_source()
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", never)
    RewardModel("org/model").check_source()
    RewardModel("model", tokenizer="org/tokenizer").check_source()
    AdapterRewardModel("org/adapter").check_source()


@pytest.mark.parametrize(
    ("break_", "message"),
    [
        (shutil.rmtree, "there is no such folder, and it can't be a Hub id"),
        (without("adapter_config.json"), "there is no adapter_config.json in it"),
        (half("adapter_model.safetensors"), "SafetensorError: .* incomplete metadata"),
    ],
)
def test_a_broken_adapter_is_told_before_and_when_binding(tiny_model_dir, adapter_dir, tmp_path, break_, message):
    folder = tmp_path / "broken"
    shutil.copytree(adapter_dir, folder)
    AdapterRewardModel(folder).check_source()
    break_(folder)
    reward, policy = AdapterRewardModel(folder), policy_on(tiny_model_dir)
    for call in (reward.check_source, lambda: reward.bind(policy, None)):
        with pytest.raises(
            ConfigError, match=rf"adapter_reward_model\(broken\) can't load .*{message}.*; `adapter` must"
        ):
            call()


# What may work another time


def out_of_reach(offline):
    """Return a stand-in for loading from a Hub that does not answer, or may not be asked."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    def load(*args, **kwargs):
        try:
            raise OfflineModeIsEnabled("HF_HUB_OFFLINE=1") if offline else OSError("name not known")
        except OSError as error:
            try:
                raise LocalEntryNotFoundError("no file, no connection") from error
            except LocalEntryNotFoundError as missing:
                raise OSError("We couldn't connect") from missing

    return load


def test_a_hub_out_of_reach_is_tried_again(monkeypatch):
    from transformers import AutoConfig

    monkeypatch.setattr(AutoConfig, "from_pretrained", out_of_reach(offline=False))
    reward = RewardModel("org/model", bits=None)
    with pytest.raises(ConnectionError, match=r"reward_model\(model\) can't load 'org/model': the Hub is out of reach"):
        reward.load()
    retried = RetryReward(ClipReward(reward, low=0, high=1), retries=1)
    assert retried(prompts=["p"], completions=["c"]) == [None]
    assert retried.counts["failed_tries"] == 2
    monkeypatch.setattr(AutoConfig, "from_pretrained", out_of_reach(offline=True))
    with pytest.raises(ConfigError, match="We couldn't connect; `model` must be a Hub id"):
        retried(prompts=["p"], completions=["c"])


def test_a_lack_of_memory_is_raised_as_it_is(classifier_dir, monkeypatch):
    from transformers import AutoModelForSequenceClassification

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", full)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        RewardModel(classifier_dir(LLAMA), bits=None).load()


def test_a_missing_bitsandbytes_is_found_beforehand(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else found(name))
    with pytest.raises(CompatibilityError, match=r"bits=4 needs bitsandbytes"):
        RewardModel("org/model").check_source()
    RewardModel("org/model", bits=None).check_source()


def test_code_of_an_adapters_repository_is_never_asked_about():
    assert AdapterRewardModel("org/adapter").tokenizer_options["trust_remote_code"] is False
