"""CASES 24: a reference pass leaves the policy exactly as it was, also when it raises."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig

from tests.reference.policies import make_trainer, reference_logps, train_state, trained_policy, weights
from tests.tiny import lora
from trl_grpo_ext.reference import AdapterOff, FrozenAdapter, MovingAnchor, preserved

REFERENCES = {"stock": None, "off": AdapterOff(), "frozen": FrozenAdapter(), "anchor": MovingAnchor(every=1)}


def policy_with_oddities(folder: str):
    """Return a trained policy with what PEFT does not put back: a frozen factor, and whole modules."""
    config = LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"])
    policy = trained_policy(folder, config)
    for name, parameter in policy.named_parameters():
        if "q_proj.lora_A" in name:
            parameter.requires_grad_(False)
    policy.get_base_model().model.layers[1].eval()
    return policy


class PassError(Exception):
    pass


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("name", REFERENCES)
def test_case_24_everything_is_as_before(tiny_model_dir, tmp_path, monkeypatch, name, checkpointing):
    policy = policy_with_oddities(tiny_model_dir)
    trainer = make_trainer(
        policy, tiny_model_dir, tmp_path, reference=REFERENCES[name], gradient_checkpointing=checkpointing
    )
    if checkpointing:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train()
    policy.get_base_model().model.layers[1].eval()
    before, values = train_state(policy), weights(policy, "default")
    assert dict(before[1])["base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"] is False
    inputs = [{"prompt": "1+1="}] * 8

    output = trainer._generate_and_score_completions(inputs)
    assert output["ref_per_token_logps"].isfinite().all()
    assert train_state(policy) == before

    seen = []

    def fail(*args, **kwargs):
        seen.append(train_state(policy) != before)
        raise PassError

    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", fail)
    with pytest.raises(PassError):
        trainer._generate_and_score_completions(inputs)
    assert seen == [True]  # it failed where the policy was switched to the reference
    assert train_state(policy) == before
    assert all(torch.equal(value, values[key]) for key, value in weights(policy, "default").items())


def test_peft_alone_does_not_put_everything_back(tiny_model_dir):
    """The reason for `preserved`; if this fails, PEFT has learnt it."""
    policy = policy_with_oddities(tiny_model_dir)
    before = train_state(policy)
    with policy.disable_adapter():
        pass
    assert train_state(policy) != before


def test_preserved_covers_mode_gradients_and_active_adapter(tiny_model_dir):
    policy = trained_policy(tiny_model_dir)
    policy.add_adapter("other", lora())
    before = train_state(policy)
    with pytest.raises(PassError), preserved(policy):  # noqa: PT012  # the state at the raise is the point
        policy.set_adapter("other")
        policy.eval()
        policy.gradient_checkpointing_enable()
        policy.base_model.disable_adapter_layers()
        next(policy.parameters()).requires_grad_(True)
        raise PassError
    assert train_state(policy) == before
    assert policy.active_adapter == "default"


@pytest.mark.parametrize("name", ["frozen", "anchor"])
def test_the_reference_never_gets_a_gradient(tiny_model_dir, tmp_path, name):
    policy = trained_policy(tiny_model_dir)
    trainer = make_trainer(policy, tiny_model_dir, tmp_path, reference=REFERENCES[name])
    assert not reference_logps(trainer).requires_grad
    flags = {n: p.requires_grad for n, p in policy.named_parameters()}
    assert not any(flag for n, flag in flags.items() if ".ref." in n)
    assert all(flag for n, flag in flags.items() if ".default." in n)
    trainer.create_optimizer()
    trained = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for n, p in policy.named_parameters() if ".default." in n}
