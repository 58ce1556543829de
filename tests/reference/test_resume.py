"""CASES 26: the reference is the same after resuming, and the saved adapter loads the normal way."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import BitsAndBytesConfig

from tests.reference.policies import (
    SAVING,
    Kill,
    assert_equal_weights,
    base_model,
    make_trainer,
    reference_logps,
    resume,
    some_slow,
    train,
    trained_policy,
    weights,
)
from tests.tiny import lora
from trl_grpo_ext.errors import StateError
from trl_grpo_ext.reference import REF_ADAPTER, AdapterOff, FrozenAdapter, FullCopy, MovingAnchor

EVERYTHING = LoraConfig(
    r=4, use_rslora=True, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
)

RUNS = {
    "stock-full": ("full", None),
    "stock-fresh": ("fresh", None),
    "stock-trained": ("trained", None),
    "stock-named": ("named", None),
    "full-copy": ("full", FullCopy()),
    "off-fresh": ("fresh", AdapterOff()),
    "off-named": ("named", AdapterOff()),
    "frozen-fresh": ("fresh", FrozenAdapter()),
    "frozen-everything": ("everything", FrozenAdapter()),
    "anchor-fresh": ("fresh", MovingAnchor(every=2, alpha=0.6)),
    "anchor-named": ("named", MovingAnchor(every=1)),
    "anchor-everything": ("everything", MovingAnchor(every=2, alpha=0.6, rank=3)),
}


def policy_of(kind: str, folder: str):
    if kind in ("full", "fresh"):
        return folder
    if kind == "everything":
        return trained_policy(folder, EVERYTHING)
    return trained_policy(folder, name="policy" if kind == "named" else "default")


def trainer_of(name: str, base: str, folder, callbacks=None, **settings):
    kind, reference = RUNS[name]
    return make_trainer(
        policy_of(kind, base),
        base,
        folder,
        callbacks=callbacks,
        reference=reference,
        peft_config=lora() if kind == "fresh" else None,
        **{"max_steps": 4, **SAVING, **settings},
    )


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize(
    "name", some_slow(RUNS, fast=("stock-trained", "off-named", "frozen-everything", "anchor-everything"))
)
def test_case_26_log_probs_are_identical_after_resuming(tiny_model_dir, tmp_path, name):
    first = trainer_of(name, tiny_model_dir, tmp_path, max_steps=2)
    at_construction = reference_logps(first)
    train(first)
    expected = reference_logps(first)
    assert torch.equal(at_construction, expected) is not name.startswith("anchor")
    assert torch.equal(resume(partial(trainer_of, name, tiny_model_dir, tmp_path)).logps, expected)


@pytest.mark.parametrize("name", some_slow(["anchor-fresh", "anchor-named"], fast=("anchor-fresh",)))
def test_kill_and_resume_gives_the_same_anchor(tiny_model_dir, tmp_path, name):
    whole = train(trainer_of(name, tiny_model_dir, tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        train(trainer_of(name, tiny_model_dir, tmp_path / "killed", callbacks=[Kill(3)]))
    resumed = trainer_of(name, tiny_model_dir, tmp_path / "killed")
    train(resumed, resume_from_checkpoint=True)
    for adapter in whole.model.peft_config:
        assert_equal_weights(weights(resumed.model, adapter), weights(whole.model, adapter))
    assert resumed.state.log_history[-2]["kl"] == whole.state.log_history[-2]["kl"]


def test_a_4_bit_policy_keeps_the_dtype_of_its_anchor(tiny_model_dir, tmp_path):
    def quantized(callbacks=None, max_steps=2):
        bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
        return make_trainer(
            trained_policy(tiny_model_dir, quantization_config=bits),
            tiny_model_dir,
            tmp_path,
            callbacks=callbacks,
            reference=MovingAnchor(every=1, alpha=0.6),
            max_steps=max_steps,
            **SAVING,
        )

    first = train(quantized())
    anchor, expected = weights(first.model, REF_ADAPTER), reference_logps(first)
    assert {value.dtype for value in anchor.values()} == {torch.bfloat16}  # as TRL trains adapters of 4-bit policies
    resumed = resume(quantized)
    assert_equal_weights(resumed.adapters[REF_ADAPTER], anchor)
    assert_equal_weights(resumed.adapters["default"], weights(first.model, "default"))
    assert torch.equal(resumed.logps, expected)


def test_another_kind_of_reference_is_not_picked_up_silently(tiny_model_dir, tmp_path):
    def trainer(reference):
        return make_trainer(
            tiny_model_dir, tiny_model_dir, tmp_path, peft_config=lora(), reference=reference, max_steps=2, **SAVING
        )

    train(trainer(AdapterOff()))
    with pytest.raises(StateError, match="holds no reference adapter"):
        train(trainer(FrozenAdapter()), resume_from_checkpoint=True)
    train(trainer(FrozenAdapter()))
    with pytest.raises(StateError, match="trained against that, not against reference 'adapter_off'"):
        train(trainer(AdapterOff()), resume_from_checkpoint=True)


@pytest.mark.parametrize(
    "name",
    some_slow(
        ["stock-trained", "frozen-fresh", "anchor-fresh", "anchor-named"], fast=("stock-trained", "anchor-named")
    ),
)
def test_the_saved_adapter_loads_the_normal_way(tiny_model_dir, tmp_path, name):
    trainer = train(trainer_of(name, tiny_model_dir, tmp_path, save_strategy="no", max_steps=1))
    trainer.save_model(tmp_path / "final")
    policy = trainer.model
    adapter = policy.active_adapter
    # PEFT puts the adapter "default" into the folder itself and any other one into a folder of its name.
    folder = tmp_path / "final" if adapter == "default" else tmp_path / "final" / adapter
    loaded = PeftModel.from_pretrained(base_model(tiny_model_dir), folder)
    assert list(loaded.peft_config) == ["default"]
    assert_equal_weights(weights(loaded, "default"), weights(policy, adapter))
    reference = PeftModel.from_pretrained(base_model(tiny_model_dir), tmp_path / "final" / REF_ADAPTER)
    assert_equal_weights(weights(reference, "default"), weights(policy, REF_ADAPTER))
