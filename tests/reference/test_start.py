"""Which reference a run starts with, what is refused, and what the user is told."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, PeftModel, VeraConfig, get_peft_model

from tests.reference.policies import (
    base_model,
    fill,
    kls,
    make_trainer,
    reference_logps,
    score,
    train,
    trained_policy,
)
from tests.tiny import lora
from trl_grpo_ext.errors import ConfigError, GRPOExtWarning
from trl_grpo_ext.kl import K3
from trl_grpo_ext.reference import REF_ADAPTER, AdapterOff, FrozenAdapter, FullCopy, MovingAnchor

KL_ZERO = 1e-6


def make_policy(kind: str, folder: str):
    """Return the model and `peft_config` arguments of a kind of policy."""
    if kind == "full":
        return folder, None
    if kind == "fresh":
        return folder, lora()
    return trained_policy(folder, name="policy" if kind == "named" else "default"), None


@pytest.mark.parametrize(
    ("policy", "reference"),
    [("full", FullCopy()), ("fresh", AdapterOff()), ("trained", FrozenAdapter()), ("named", FrozenAdapter())],
)
def test_the_default_is_what_trl_does_and_is_logged(tiny_model_dir, tmp_path, caplog, policy, reference):
    caplog.set_level(logging.INFO, "trl_grpo_ext")
    model, peft_config = make_policy(policy, tiny_model_dir)
    trainer = make_trainer(model, tiny_model_dir, tmp_path, peft_config=peft_config, max_steps=1)
    assert trainer.reference is None
    lines = [r.getMessage() for r in caplog.records if "the KL is measured against" in r.getMessage()]
    assert len(lines) == 1
    assert lines[0].endswith(f"{reference.meaning} ({reference.name}, TRL's default here)")
    assert kls(train(trainer))[0] == pytest.approx(0, abs=KL_ZERO)
    assert not (tmp_path / "grpo_strategies.json").exists()


@pytest.mark.parametrize(
    ("strategy", "name"), [(FrozenAdapter(), "default"), (MovingAnchor(every=9), "policy")], ids=["frozen", "anchor"]
)
def test_case_23_a_trained_adapter_starts_at_zero_against_itself(tiny_model_dir, tmp_path, strategy, name):
    policy = trained_policy(tiny_model_dir, name=name)
    trainer = make_trainer(policy, tiny_model_dir, tmp_path, reference=strategy)
    own = score(trainer, policy, torch.randint(3, 30, (4, 9), generator=torch.Generator().manual_seed(0))).detach()
    assert torch.equal(reference_logps(trainer), own)
    with policy.disable_adapter():
        base = score(trainer, policy, torch.randint(3, 30, (4, 9), generator=torch.Generator().manual_seed(0)))
    assert (base - own).abs().max() > 0.1
    train(trainer)
    assert kls(trainer)[0] == pytest.approx(0, abs=KL_ZERO)
    assert kls(trainer)[1] > 1e-5
    assert list(policy.peft_config) == [name, REF_ADAPTER]


def test_adapter_off_on_a_trained_adapter_says_what_it_means(tiny_model_dir, tmp_path, caplog):
    policy = trained_policy(tiny_model_dir)
    trainer = make_trainer(policy, tiny_model_dir, tmp_path, reference="adapter_off", max_steps=1)
    assert "measures the distance from the base model, not from where this run starts" in caplog.text
    assert list(policy.peft_config) == ["default"]
    assert kls(train(trainer))[0] > 1e-3  # and no second warning about it


def test_the_arguments_are_left_as_they_were(tiny_model_dir, tmp_path):
    trainer = make_trainer(trained_policy(tiny_model_dir, name="policy"), tiny_model_dir, tmp_path, beta=0.25)
    assert (trainer.args.beta, trainer.beta) == (0.25, 0.25)
    with pytest.raises(ConfigError, match="second adapter"):
        make_trainer(
            trained_policy(tiny_model_dir, LoraConfig(r=2, target_modules=["q_proj"], bias="all")),
            tiny_model_dir,
            tmp_path,
            reference=FrozenAdapter(),
            peft_config=None,
        )


def test_no_reference_is_set_up_without_beta(tiny_model_dir, tmp_path):
    policy = trained_policy(tiny_model_dir, name="policy")
    train(make_trainer(policy, tiny_model_dir, tmp_path, beta=0.0, max_steps=1))
    assert list(policy.peft_config) == ["policy"]


@pytest.mark.parametrize(
    ("policy", "reference", "message"),
    [
        ("full", AdapterOff(), "'adapter_off' needs a PEFT policy"),
        ("full", FrozenAdapter(), "'frozen_adapter' needs a PEFT policy"),
        ("full", MovingAnchor(every=2), "'moving_anchor' needs a PEFT policy"),
        ("fresh", FullCopy(), "'full_copy' is for full fine-tuning"),
        ("trained", FullCopy(), "'full_copy' is for full fine-tuning"),
    ],
)
def test_a_reference_the_policy_cannot_have(tiny_model_dir, tmp_path, policy, reference, message):
    model, peft_config = make_policy(policy, tiny_model_dir)
    with pytest.raises(ConfigError, match=message):
        make_trainer(model, tiny_model_dir, tmp_path, peft_config=peft_config, reference=reference)


def test_sync_ref_model_and_a_reference(tiny_model_dir, tmp_path):
    with pytest.raises(ConfigError, match="sync_ref_model"):
        make_trainer(tiny_model_dir, tiny_model_dir, tmp_path, reference=FullCopy(), sync_ref_model=True)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_case_25_an_adapter_loaded_for_inference(tiny_model_dir, tmp_path, beta):
    trained_policy(tiny_model_dir).save_pretrained(tmp_path / "adapter")
    policy = PeftModel.from_pretrained(base_model(tiny_model_dir), tmp_path / "adapter")
    with pytest.raises(ConfigError, match="is_trainable=True"):
        make_trainer(policy, tiny_model_dir, tmp_path, beta=beta)


def test_case_27_lora_on_the_head_is_refused_by_trl(tiny_model_dir, tmp_path):
    peft_config = LoraConfig(r=4, target_modules=["lm_head"], task_type="CAUSAL_LM")
    for reference in (None, FrozenAdapter()):
        with pytest.raises(ValueError, match="Applying a PEFT adapter to `lm_head` is not supported"):
            make_trainer(tiny_model_dir, tiny_model_dir, tmp_path, peft_config=peft_config, reference=reference)


@pytest.mark.parametrize("reference", [AdapterOff(), FrozenAdapter(), MovingAnchor(every=1)], ids=lambda s: s.name)
class TestPoliciesThatCannotBeSharedWith:
    def test_an_adapter_already_called_ref(self, tiny_model_dir, reference):
        policy = trained_policy(tiny_model_dir)
        policy.add_adapter(REF_ADAPTER, lora())
        with pytest.raises(ConfigError, match=r"delete_adapter\('ref'\)"):
            reference.prepare(policy)
        with pytest.raises(ConfigError, match="under another name"):
            reference.prepare(trained_policy(tiny_model_dir, name=REF_ADAPTER))

    def test_a_base_that_trains(self, tiny_model_dir, reference):
        policy = trained_policy(tiny_model_dir)
        policy.get_base_model().model.norm.weight.requires_grad_(True)
        with pytest.raises(ConfigError, match=r"model\.norm\.weight.*would move with the policy"):
            reference.prepare(policy)

    def test_merged_adapters(self, tiny_model_dir, reference):
        policy = trained_policy(tiny_model_dir)
        policy.merge_adapter()
        with pytest.raises(ConfigError, match="merged"):
            reference.prepare(policy)


@pytest.mark.parametrize("reference", [FrozenAdapter(), MovingAnchor(every=1)], ids=lambda s: s.name)
def test_weights_split_by_zero_3_are_refused(tiny_model_dir, reference):
    policy = trained_policy(tiny_model_dir)
    next(policy.parameters()).ds_id = 0
    with pytest.raises(ConfigError, match="ZeRO-3"):
        reference.prepare(policy)


@pytest.mark.parametrize("reference", [FrozenAdapter(), MovingAnchor(every=1)], ids=lambda s: s.name)
def test_several_active_adapters_are_refused(tiny_model_dir, reference):
    policy = trained_policy(tiny_model_dir)
    policy.add_adapter("other", lora())
    policy.base_model.set_adapter(["default", "other"])
    with pytest.raises(ConfigError, match="exactly one adapter must be active"):
        reference.prepare(policy)


def test_sharded_training_refuses_a_reference_that_moves(tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_grpo_ext._trl.sharding", lambda trainer: "FSDP")
    with pytest.raises(ConfigError, match="FSDP splits over processes"):
        make_trainer(
            tiny_model_dir,
            tiny_model_dir,
            tmp_path,
            peft_config=lora(),
            reference={"kind": "moving_anchor", "every": 1},
        )


def test_no_random_number_is_drawn(tiny_model_dir):
    policy = trained_policy(tiny_model_dir)
    before = torch.get_rng_state()
    MovingAnchor(every=1).prepare(policy)
    assert torch.equal(torch.get_rng_state(), before)


class TestStepZeroCheck:
    def test_a_model_changed_after_loading(self, tiny_model_dir, tmp_path):
        model = base_model(tiny_model_dir)
        fill(model.parameters())  # TRL loads its second model from the path
        trainer = make_trainer(model, tiny_model_dir, tmp_path, max_steps=2)
        with pytest.warns(GRPOExtWarning, match=r"'full_copy'.*where it should be 0: policy and reference") as caught:
            train(trainer)
        assert sum(w.category is GRPOExtWarning for w in caught) == 1  # once

    def test_dropout_is_named_as_the_cause(self, tiny_model_dir, tmp_path):
        config = LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
        policy = trained_policy(tiny_model_dir, config)
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.data.mul_(4)
        trainer = make_trainer(policy, tiny_model_dir, tmp_path, kl=K3(), max_steps=1)
        with pytest.warns(GRPOExtWarning, match="set `disable_dropout=True`"):
            train(trainer)

    def test_half_precision_rounding_is_no_reason(self, tiny_model_dir, tmp_path):
        policy = trained_policy(tiny_model_dir, dtype=torch.bfloat16)
        train(make_trainer(policy, tiny_model_dir, tmp_path, max_steps=1))


def test_the_files_name_the_reference(tiny_model_dir, tmp_path):
    def saved(folder: str, **settings) -> dict:
        trainer = make_trainer(tiny_model_dir, tiny_model_dir, tmp_path / folder, peft_config=lora(), **settings)
        trainer.save_model()
        return json.loads(Path(tmp_path / folder / "grpo_strategies.json").read_text())

    named = saved("named", reference="adapter_off")
    assert named["reference"] == {"kind": "adapter_off"}
    assert named["_meta"]["reference"] == "adapter_off"
    assert named["_meta"]["versions"]["trl-grpo-ext"]
    default = saved("default", kl="k3")
    assert "reference" not in default
    assert default["_meta"]["reference"] == "adapter_off"
    assert "reference" not in saved("no-beta", advantage="rank", beta=0.0)["_meta"]


def test_init_from_base_weights_is_not_run_twice(tiny_model_dir):
    config = LoraConfig(r=4, init_lora_weights="pissa", target_modules=["q_proj"], task_type="CAUSAL_LM")
    policy = get_peft_model(base_model(tiny_model_dir), config)
    residual = policy.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.clone()
    FrozenAdapter().prepare(policy)
    assert torch.equal(policy.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight, residual)
    assert not AdapterOff().starts_at_policy(policy)


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=4, target_modules=["q_proj"], use_dora=True),
        LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="mica"),
        LoraConfig(r=4, target_modules=[], target_parameters=["mlp.up_proj.weight"]),
        LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[3, 4], use_rslora=True),
        LoHaConfig(r=4, target_modules=["q_proj"]),
        IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
        VeraConfig(r=4, target_modules=["q_proj"]),
    ],
    ids=["dora", "mica", "target-parameters", "tokens", "loha", "ia3", "vera"],
)
def test_a_frozen_copy_of_any_adapter(tiny_model_dir, config):
    policy = trained_policy(tiny_model_dir, config)
    FrozenAdapter().prepare(policy)
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        own = policy(ids).logits
        policy.set_adapter(REF_ADAPTER)
        assert torch.equal(policy(ids).logits, own)
        with policy.disable_adapter():
            assert not torch.equal(policy(ids).logits, own)
