"""How the moving anchor moves: against a hand-made copy and against the dense mixture."""

from __future__ import annotations

import pytest
import torch
from peft import LoHaConfig, LoraConfig, get_peft_model

from tests.reference.policies import assert_equal_weights, base_model, fill, trained_policy, weights
from tests.tiny import lora
from trl_grpo_ext.errors import ConfigError
from trl_grpo_ext.reference import REF_ADAPTER, MovingAnchor
from trl_grpo_ext.reference.adapters import lora_pairs

CONFIGS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "per-module": {"rank_pattern": {"q_proj": 2, "up_proj": 6}, "alpha_pattern": {"v_proj": 3, "up_proj": 16}},
    "rslora-per-module": {"use_rslora": True, "rank_pattern": {"v_proj": 3}, "alpha_pattern": {"q_proj": 1}},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "lora-bias": {"target_modules": ["q_proj"], "lora_bias": True},
}


def config(name: str, **overrides) -> LoraConfig:
    settings = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "task_type": "CAUSAL_LM",
        "bias": "none",
        **CONFIGS.get(name, {}),
        **overrides,
    }
    return LoraConfig(**settings)


def move_policy(policy, seed: int) -> None:
    fill(policy.parameters(), seed)


def deltas(policy, adapter: str) -> dict[str, torch.Tensor]:
    """Return what the adapter adds to each weight, by PEFT's own account (which is what a merge would add)."""
    return {
        name: module.get_delta_weight(adapter).detach().double()
        for name, module in policy.named_modules()
        if hasattr(module, "get_delta_weight")
    }


def rank_of(policy, name: str, adapter: str = REF_ADAPTER) -> int:
    return lora_pairs(policy, adapter)[name].A.size(0)


@pytest.mark.filterwarnings("ignore:.*lora_bias.*")
@pytest.mark.parametrize("name", CONFIGS)
def test_alpha_1_is_a_copy_bit_for_bit(tiny_model_dir, name):
    policy = trained_policy(tiny_model_dir, config(name))
    anchor = MovingAnchor(every=3)
    anchor.prepare(policy)
    assert_equal_weights(weights(policy, REF_ADAPTER), weights(policy, "default"))
    start = weights(policy, "default")
    move_policy(policy, 4)
    assert anchor.after_step(policy, 2) == {}
    assert_equal_weights(weights(policy, REF_ADAPTER), start)
    assert anchor.after_step(policy, 3) == {"reference/move_error": 0.0, "reference/move_error_max": 0.0}
    assert_equal_weights(weights(policy, REF_ADAPTER), weights(policy, "default"))


@pytest.mark.filterwarnings("ignore:.*lora_bias.*")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_mixture_is_the_projection_of_the_dense_one(tiny_model_dir, name):
    policy = trained_policy(tiny_model_dir, config(name))
    anchor = MovingAnchor(every=1, alpha=0.6)
    anchor.prepare(policy)
    lost, norms = [], []
    for seed in (4, 5):  # twice, so that the anchor is a truncated mixture itself
        before = deltas(policy, REF_ADAPTER)
        move_policy(policy, seed)
        metrics = anchor.after_step(policy, seed)
        mixtures = {n: 0.6 * delta + 0.4 * before[n] for n, delta in deltas(policy, "default").items()}
        for module, delta in deltas(policy, REF_ADAPTER).items():
            U, S, Vh = torch.linalg.svd(mixtures[module], full_matrices=False)
            rank = rank_of(policy, module)
            best = U[:, :rank] * S[:rank] @ Vh[:rank]
            torch.testing.assert_close(delta, best, rtol=0, atol=1e-5)
            lost.append(torch.linalg.norm(S[rank:]))
            norms.append(torch.linalg.norm(S))
        expected = torch.linalg.norm(torch.stack(lost)) / torch.linalg.norm(torch.stack(norms))
        assert metrics["reference/move_error"] == pytest.approx(expected.item(), rel=1e-4)
        assert metrics["reference/move_error_max"] >= metrics["reference/move_error"] > 0
        lost, norms = [], []


def test_mixing_products_is_not_mixing_factors(tiny_model_dir):
    policy = trained_policy(tiny_model_dir)
    MovingAnchor(every=1).prepare(policy)
    pair = next(iter(lora_pairs(policy, REF_ADAPTER).values()))
    before = pair.B.detach() @ pair.A.detach()
    # Flipping the sign of both factors leaves the product alone; a mixture of the factors would be 0.2 of them.
    for name, parameter in policy.named_parameters():
        if "lora_" in name and ".default." in name:
            parameter.data.neg_()
    MovingAnchor(every=1, alpha=0.6).after_step(policy, 1)
    torch.testing.assert_close(pair.B.detach() @ pair.A.detach(), before, rtol=0, atol=1e-5)


def test_a_smaller_rank_truncates_and_says_so(tiny_model_dir, caplog):
    policy = trained_policy(tiny_model_dir)
    anchor = MovingAnchor(every=1, rank=2)
    anchor.prepare(policy)
    assert "rank=2" in caplog.text
    assert not anchor.starts_at_policy(policy)
    for name, delta in deltas(policy, REF_ADAPTER).items():
        assert rank_of(policy, name) == 2
        U, S, Vh = torch.linalg.svd(deltas(policy, "default")[name], full_matrices=False)
        torch.testing.assert_close(delta, U[:, :2] * S[:2] @ Vh[:2], rtol=0, atol=1e-5)


def test_a_larger_rank_holds_the_mixture_exactly(tiny_model_dir):
    policy = trained_policy(tiny_model_dir)
    anchor = MovingAnchor(every=1, alpha=0.5, rank=8)
    anchor.prepare(policy)
    assert anchor.starts_at_policy(policy)
    before = deltas(policy, REF_ADAPTER)
    move_policy(policy, 4)
    error = anchor.after_step(policy, 1)["reference/move_error"]
    assert error < 1e-7
    for name, delta in deltas(policy, REF_ADAPTER).items():
        torch.testing.assert_close(delta, 0.5 * (before[name] + deltas(policy, "default")[name]), rtol=0, atol=1e-5)


def test_the_policys_own_rank_given_is_a_copy_too(tiny_model_dir):
    policy = trained_policy(tiny_model_dir)
    MovingAnchor(every=1, rank=4).prepare(policy)
    assert_equal_weights(weights(policy, REF_ADAPTER), weights(policy, "default"))


def test_whole_modules_and_tokens_are_mixed_as_they_are(tiny_model_dir):
    policy = trained_policy(tiny_model_dir, config("lora", modules_to_save=["lm_head"], trainable_token_indices=[3, 4]))
    anchor = MovingAnchor(every=1, alpha=0.25)
    anchor.prepare(policy)
    before = weights(policy, REF_ADAPTER)
    move_policy(policy, 4)
    anchor.after_step(policy, 1)
    whole = [key for key in before if "lora_" not in key]
    assert len(whole) == 2
    policys, after = weights(policy, "default"), weights(policy, REF_ADAPTER)
    for key in whole:
        torch.testing.assert_close(after[key], 0.75 * before[key] + 0.25 * policys[key])


def test_a_fresh_adapter_starts_at_the_base(tiny_model_dir):
    policy = get_peft_model(base_model(tiny_model_dir), lora())
    anchor = MovingAnchor(every=1, alpha=0.6)
    anchor.prepare(policy)
    assert anchor.starts_at_policy(policy)
    assert not any(delta.any() for delta in deltas(policy, REF_ADAPTER).values())
    assert anchor.after_step(policy, 1) == {"reference/move_error": 0.0, "reference/move_error_max": 0.0}


@pytest.mark.parametrize(
    ("peft_config", "message"),
    [
        (LoraConfig(r=4, target_modules=["q_proj"], use_dora=True), "use_dora"),
        (LoHaConfig(r=4, target_modules=["q_proj"]), "LOHA"),
        (LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["mlp.up_proj.weight"]), "target_parameters"),
        (LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="mica"), "MiCA"),
    ],
    ids=["dora", "loha", "target-parameters", "variant"],
)
def test_what_is_more_than_a_product_is_refused(tiny_model_dir, peft_config, message):
    policy = get_peft_model(base_model(tiny_model_dir), peft_config)
    with pytest.raises(ConfigError, match=f"moving_anchor.*{message}"):
        MovingAnchor(every=1).prepare(policy)
    assert list(policy.peft_config) == ["default"]
