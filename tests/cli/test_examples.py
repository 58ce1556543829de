"""Every config in examples/configs trains the tiny model: only model, data, sizes and reward models are replaced."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import yaml

from tests.rewards.models import CHAT_TEMPLATE, random_classifier, reward_lora, train_reward
from tests.tiny import PROMPTS, save_tiny_model
from trl_grpo_ext import hub

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """The tiny model with a chat template: the recipes' data are conversations."""
    from transformers import AutoTokenizer

    folder = save_tiny_model(tmp_path_factory.mktemp("chat"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def chat_data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conversations")
    rows = [{"prompt": [{"role": "user", "content": text}], "solution": "$3$"} for text in PROMPTS * 2]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder)


@pytest.fixture(scope="module")
def replacements(tmp_path_factory, chat_model):
    """A random reward model and a briefly trained reward adapter, in place of those that the recipes name."""
    folder = tmp_path_factory.mktemp("rewards")
    return {
        "model": random_classifier(folder / "model", chat_model, "Qwen2ForSequenceClassification"),
        "adapter": train_reward(chat_model, folder / "adapter", peft_config=reward_lora(), steps=2),
    }


def replaced(spec, replacements):
    """Return the spec with the model ids of its reward models replaced."""
    if isinstance(spec, dict):
        return {k: replacements.get(k) or replaced(v, replacements) for k, v in spec.items()}
    return [replaced(item, replacements) for item in spec] if isinstance(spec, list) else spec


def test_there_is_one_per_recipe():
    names = {"chat_reward_model", "length_bucketed", "math_exact", "one_backbone", "rank_then_zscore"}
    assert {path.stem for path in EXAMPLES} == names


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_recipe_trains(path, tmp_path, settings, chat_model, chat_data, replacements):
    from trl_grpo_ext.cli._worker import train

    config = yaml.safe_load(path.read_text())
    if any(text in path.read_text() for text in ("bits: 4",)):
        pytest.importorskip("bitsandbytes")
    if "accuracy_reward" in str(config["rewards"]):
        pytest.importorskip("math_verify")
    kept = copy.deepcopy(config)
    sizes = {**settings, "model_name_or_path": chat_model, "dataset_name": chat_data, "lora_r": 4}
    config |= {**sizes, "rewards": replaced(config["rewards"], replacements)}
    if isinstance(config.get("reference"), dict):
        config["reference"] = {**config["reference"], "every": 1}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    train(["--config", str(file)])

    saved = json.loads((tmp_path / "out" / hub.STRATEGIES_FILE).read_text())
    assert kept["advantage"] in (saved["advantage"], saved["advantage"]["kind"]) or (
        saved["advantage"]["kind"] == kept["advantage"]["kind"]
    )
    assert len(saved["rewards"]) == len(kept["rewards"])
    assert (tmp_path / "out" / "adapter_config.json").exists()
