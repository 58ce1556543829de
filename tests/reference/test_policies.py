"""Reference log-probs against a separately loaded model, for every kind of policy, through a whole run."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import BitsAndBytesConfig

from tests.reference.policies import (
    SAVING,
    base_model,
    fill,
    kls,
    make_trainer,
    own_logps,
    resume,
    some_slow,
    train,
    trained_policy,
    weights,
)
from tests.tiny import lora
from trl_grpo_ext.errors import StateError
from trl_grpo_ext.reference import REF_ADAPTER, AdapterOff, FrozenAdapter, MovingAnchor, base_digest, base_unchanged
from trl_grpo_ext.reference.adapters import adapter_parameters

WITH_EMBEDDINGS = {"target_modules": ["q_proj", "embed_tokens"]}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}

# Name -> LoRA settings, name of the adapter, how the base is loaded, trainer settings
POLICIES = {
    "plain": ({}, "default", {}, {}),
    "other-name": ({}, "policy", {}, {}),
    "modules-to-save": ({"modules_to_save": ["lm_head"]}, "default", {}, {}),
    "embeddings": (WITH_EMBEDDINGS, "default", {}, {}),
    "checkpointing": ({}, "default", {}, {"gradient_checkpointing": True}),
    "4-bit": ({}, "default", {"quantized": True}, {}),
}
TOLERANCE = 1e-6


def loaded(folder: str, quantized: bool = False):
    return base_model(folder, quantization_config=BitsAndBytesConfig(**NF4)) if quantized else base_model(folder)


def build(name: str, folder: str):
    config, adapter, how, settings = POLICIES[name]
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], **config})
    extra = {"quantization_config": BitsAndBytesConfig(**NF4)} if how else {}
    return trained_policy(folder, config, adapter, **extra), loaded(folder, **how), settings


def record(trainer) -> list[dict]:
    """Keep what every scoring of completions returns."""
    outputs = []
    score = trainer._generate_and_score_completions

    def scored(inputs):
        outputs.append(score(inputs))
        return outputs[-1]

    trainer._generate_and_score_completions = scored
    return outputs


def worst(outputs: list[dict], model) -> float:
    """Return the largest difference between the recorded reference log-probs and those of a model by itself."""
    gaps = [
        ((output["ref_per_token_logps"] - own_logps(model, output)) * output["completion_mask"]).abs().max()
        for output in outputs
    ]
    return max(gaps).item()


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
class TestEveryPolicy:
    @pytest.mark.parametrize(
        "name", some_slow(POLICIES, fast=("modules-to-save", "embeddings", "checkpointing", "4-bit"))
    )
    def test_adapter_off_is_the_base_model(self, tiny_model_dir, tmp_path, name):
        policy, base, settings = build(name, tiny_model_dir)
        trainer = make_trainer(policy, tiny_model_dir, tmp_path, reference=AdapterOff(), **settings)
        outputs = record(trainer)
        with base_unchanged(policy):
            train(trainer)
        assert len(outputs) == 2
        assert worst(outputs, base) <= TOLERANCE

    @pytest.mark.parametrize("name", some_slow(POLICIES, fast=("modules-to-save", "embeddings", "4-bit")))
    def test_frozen_adapter_is_the_adapter_it_started_from(self, tiny_model_dir, tmp_path, name):
        policy, base, settings = build(name, tiny_model_dir)
        trainer = make_trainer(policy, tiny_model_dir, tmp_path, reference=FrozenAdapter(), **settings)
        policy.save_pretrained(tmp_path / "start")  # after TRL has cast the adapter of a 4-bit policy
        outputs, frozen = record(trainer), weights(policy, REF_ADAPTER)
        train(trainer)
        start = PeftModel.from_pretrained(base, tmp_path / "start" / REF_ADAPTER)
        for key, parameter in adapter_parameters(start, "default").items():
            parameter.data = parameter.data.to(frozen[key].dtype)
        assert worst(outputs, start) <= TOLERANCE
        assert worst(outputs, loaded(tiny_model_dir)) > 1e-2
        assert kls(trainer)[0] == 0
        assert all(torch.equal(value, frozen[key]) for key, value in weights(policy, REF_ADAPTER).items())

    @pytest.mark.parametrize("name", some_slow(POLICIES, fast=("embeddings", "checkpointing", "4-bit")))
    def test_moving_anchor_is_where_the_policy_was(self, tiny_model_dir, tmp_path, name):
        policy, _, settings = build(name, tiny_model_dir)
        trainer = make_trainer(policy, tiny_model_dir, tmp_path, reference=MovingAnchor(every=1), **settings)
        before = weights(policy, REF_ADAPTER)
        train(trainer)
        after = weights(policy, REF_ADAPTER)
        assert all(
            torch.equal(value, after[key]) for key, value in weights(policy, trainer.model.active_adapter).items()
        )
        assert any(not torch.equal(value, before[key]) for key, value in after.items())
        assert kls(trainer) == [0, 0]  # it moves at the end of each step, so each batch is scored by its own policy
        assert [e["reference/move_error"] for e in trainer.state.log_history if "kl" in e] == [0, 0]


def test_the_base_model_before_during_after_and_resumed(tiny_model_dir, tmp_path):
    base = loaded(tiny_model_dir)

    def make(callbacks=None, max_steps=2):
        return make_trainer(
            tiny_model_dir,
            tiny_model_dir,
            tmp_path,
            callbacks,
            lora(),
            reference=AdapterOff(),
            max_steps=max_steps,
            **SAVING,
        )

    trainer = make()
    inputs = [{"prompt": "2+3="}] * 8
    outputs = record(trainer)
    before = base_digest(trainer.model)
    trainer._generate_and_score_completions(inputs)
    train(trainer)
    trainer._generate_and_score_completions(inputs)
    assert len(outputs) == 4
    resumed = resume(make).trainer
    outputs_resumed = record(resumed)
    resumed._generate_and_score_completions(inputs)
    assert worst(outputs + outputs_resumed, base) <= TOLERANCE
    assert base_digest(trainer.model) == base_digest(resumed.model) == before
    for name, parameter in base.named_parameters():
        place, _, leaf = name.rpartition(".")
        module = trainer.model.get_base_model().get_submodule(place)
        assert torch.equal(getattr(getattr(module, "base_layer", module), leaf), parameter), name


@pytest.mark.parametrize("quantized", [False, True], ids=["", "4-bit"])
class TestBaseDigest:
    def test_adapters_do_not_count(self, tiny_model_dir, quantized):
        extra = {"quantization_config": BitsAndBytesConfig(**NF4)} if quantized else {}
        policy = trained_policy(
            tiny_model_dir, LoraConfig(r=2, modules_to_save=["lm_head"], **WITH_EMBEDDINGS), **extra
        )
        before = base_digest(policy)
        fill(policy.parameters(), seed=9)
        FrozenAdapter().prepare(policy)
        assert base_digest(policy) == before

    def test_one_bit_of_the_base_counts(self, tiny_model_dir, quantized):
        extra = {"quantization_config": BitsAndBytesConfig(**NF4)} if quantized else {}
        policy = trained_policy(tiny_model_dir, **extra)
        weight = policy.get_base_model().model.layers[1].mlp.up_proj.base_layer.weight
        with pytest.raises(StateError, match="base weights moved"), base_unchanged(policy):
            weight.data.view(torch.uint8)[0, 0] ^= 1
