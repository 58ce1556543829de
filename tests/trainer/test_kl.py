"""The KL in the trainer: exact KL, logged estimators, beta control, and the KL in the reward."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer

from tests.tiny import arguments, digits, lora, prompts
from tests.trainer.runs import train
from trl_grpo_ext import (
    K2,
    K3,
    ConfigError,
    GRPOExtConfig,
    GRPOExtTrainer,
    GRPOExtWarning,
    StateError,
    _trl,
)


def run(model, folder, **settings):
    settings = {"peft": True, "beta": 0.1, "num_iterations": 2, **settings}
    kwargs = settings.pop("trainer_kwargs", None)
    return train(GRPOExtTrainer, GRPOExtConfig, model, folder, trainer_kwargs=kwargs, **settings)


@pytest.mark.parametrize("kl", ["k1", "k2", "k3+", "exact"])
@pytest.mark.parametrize("peft", [True, False])
def test_every_estimator_trains_and_logs(tiny_model_dir, tmp_path, kl, peft):
    result = run(tiny_model_dir, tmp_path, kl=kl, peft=peft)
    assert result.logs[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert result.logs[2]["kl"] != 0
    assert result.logs[0]["beta"] == pytest.approx(0.1)
    assert torch.isfinite(result.weights).all()


def test_exact_kl_equals_the_full_softmax(tiny_model_dir, tmp_path):
    terms = []

    class Spy(GRPOExtTrainer):
        def _exact_terms(self, policy, reference, mask):
            value = super()._exact_terms(policy, reference, mask)
            terms.append((value.detach(), mask))
            return value

        def _compute_loss(self, model, inputs):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            width = inputs["completion_ids"].size(1)
            with torch.no_grad():
                policy = self.model(ids, attention_mask=attention).logits[:, -width - 1 : -1]
                with self.model.disable_adapter():
                    reference = self.model(ids, attention_mask=attention).logits[:, -width - 1 : -1]
            p, q = (torch.log_softmax(x / self.temperature, -1) for x in (policy, reference))
            loss = super()._compute_loss(model, inputs)
            value, mask = terms[-1]
            expected = torch.where(mask.bool(), (p.exp() * (p - q)).sum(-1), 0.0)
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)
            return loss

    result = train(
        Spy,
        GRPOExtConfig,
        tiny_model_dir,
        tmp_path,
        peft=True,
        kl="exact",
        beta=0.1,
        num_iterations=2,
        temperature=0.7,
        learning_rate=0.1,
    )
    assert result.logs[-2]["kl"] > 1e-3
    assert len(terms) == 6


@pytest.mark.parametrize("reference", ["adapter_off", "frozen_adapter"])
def test_exact_kl_of_a_head_that_is_part_of_the_adapter(tiny_model_dir, tmp_path, reference):
    """The reference's head is then another than the policy's; checked against both models' full logits."""
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model_dir), config)
    generator = torch.Generator().manual_seed(3)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    seen = []

    class Spy(GRPOExtTrainer):
        def _compute_loss(self, model, inputs):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            width = inputs["completion_ids"].size(1)
            with torch.no_grad():
                p = self.model(ids, attention_mask=attention).logits[:, -width - 1 : -1].log_softmax(-1)
                with _trl.reference_model(self) as other:
                    q = other(ids, attention_mask=attention).logits[:, -width - 1 : -1].log_softmax(-1)
            loss = super()._compute_loss(model, inputs)
            expected = (p.exp() * (p - q)).sum(-1)[inputs["completion_mask"].bool()].mean()
            seen.append((self._metrics["train"]["kl"][-1], expected.item()))
            return loss

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    args = arguments(GRPOExtConfig, tmp_path, beta=0.1, kl="exact", reference=reference)
    Spy(policy, digits, args, train_dataset=prompts(), processing_class=tokenizer).train()
    assert [logged for logged, _ in seen] == pytest.approx([expected for _, expected in seen], rel=1e-3, abs=1e-6)
    assert seen[-1][1] > (1.0 if reference == "adapter_off" else 1e-3)


def test_an_explicit_weighting_goes_with_an_estimator_given_as_a_keyword(tiny_model_dir, tmp_path):
    args = arguments(GRPOExtConfig, tmp_path, beta=0.1, kl_weighting="none")
    with pytest.warns(GRPOExtWarning, match="that of the forward KL"):
        trainer = GRPOExtTrainer(tiny_model_dir, digits, args, train_dataset=prompts(), kl=K3())
    assert trainer.kl_weighting == "none"
    with pytest.raises(ConfigError, match="has no effect without `kl`"):
        GRPOExtTrainer(tiny_model_dir, digits, args, train_dataset=prompts())


def test_a_bare_trainer_with_an_estimator_weights_it_rightly(tiny_model_dir, tmp_path):
    args = arguments(GRPOExtConfig, tmp_path, beta=0.1)
    trainer = GRPOExtTrainer(tiny_model_dir, digits, args, train_dataset=prompts())
    bare = object.__new__(GRPOExtTrainer)
    vars(bare).update({name: value for name, value in vars(trainer).items() if not name.startswith("kl")})
    bare.kl = K2()
    logps = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.int64)
    inputs = {
        "completion_mask": mask,
        "ref_per_token_logps": torch.tensor([[-1.5, -1.0]]),
        "num_items_in_batch": mask.sum(),
    }
    inputs["old_per_token_logps"] = logps.detach() - 0.3
    bare.current_gradient_accumulation_steps = 1
    expected = 0.1 * (torch.tensor([0.5, -1.0]) ** 2 / 2 * torch.tensor(0.3).exp()).sum() / 2  # rho held fixed
    assert bare._kl_loss(logps, inputs).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_a_beta_control_sees_each_step_also_with_the_kl_in_the_reward(tiny_model_dir, tmp_path, num_iterations):
    """One generation serves two steps, or four: each is told its KL and its own completions."""
    calls = []

    class Spy(GRPOExtTrainer):
        def _update_beta(self):
            total, tokens, completions = self._kl_window
            calls.append((total / tokens, completions))
            super()._update_beta()

    args = arguments(
        GRPOExtConfig, tmp_path, beta=0.1, kl_placement="reward", per_device_train_batch_size=4, max_steps=8,
        gradient_accumulation_steps=2, steps_per_generation=4, num_iterations=num_iterations,
    )  # fmt: skip
    Spy(
        tiny_model_dir,
        digits,
        args,
        train_dataset=prompts(),
        beta_control={"kind": "linear_beta", "start": 0.1, "end": 0.2, "steps": 8},
    ).train()
    assert [completions for _, completions in calls] == [8] * 8
    kls = [kl for kl, _ in calls]
    assert kls[0] == kls[1] == pytest.approx(0.0, abs=1e-6)
    served = 2 * num_iterations
    assert all(len(set(kls[i : i + served])) == 1 for i in range(0, 8, served))
    assert kls[-1] > 0


@pytest.mark.parametrize("bypassed", ["_generate_and_score_completions", "_compute_loss"])
def test_a_kl_in_the_reward_that_is_bypassed_is_an_error(tiny_model_dir, tmp_path, bypassed):
    stock = type("Stock", (GRPOExtTrainer,), {bypassed: getattr(GRPOTrainer, bypassed)})
    args = arguments(GRPOExtConfig, tmp_path, beta=0.1, kl_placement="reward")
    with pytest.raises(StateError, match="did not call the configured strategies"):
        stock(tiny_model_dir, digits, args, train_dataset=prompts(), peft_config=lora()).train()


def test_watched_estimators_cost_no_forward_and_change_nothing(tiny_model_dir, tmp_path):
    plain = run(tiny_model_dir, tmp_path, kl="k3")
    watched = run(tiny_model_dir, tmp_path, kl="k3", kl_log=["k1", "k2", "abs"])
    assert torch.equal(plain.weights, watched.weights)
    entry = watched.logs[2]
    assert {"kl", "kl/k1", "kl/k2", "kl/k3", "kl/abs", "kl/clipped_frac", "beta"} <= set(entry)
    assert entry["kl/k2"] >= 0
    assert entry["kl/clipped_frac"] == 0
    assert entry["kl/abs"] >= abs(entry["kl/k1"])


def test_watching_alone_is_trls_k3(tiny_model_dir, tmp_path):
    alone = run(tiny_model_dir, tmp_path, kl_log="k1")
    named = run(tiny_model_dir, tmp_path, kl="k3", kl_log="k1")
    assert torch.equal(alone.weights, named.weights)


def test_linear_beta_follows_the_steps(tiny_model_dir, tmp_path):
    spec = {"kind": "linear_beta", "start": 0.2, "end": 0.0, "steps": 2}
    result = run(tiny_model_dir, tmp_path, kl="k3", beta_control=spec, max_steps=4)
    assert [entry["beta"] for entry in result.logs[:-1]] == pytest.approx([0.2, 0.1, 0.0, 0.0])
    assert result.logs[3]["kl"] > 0  # still measured


def test_adaptive_beta_sees_the_steps_kl_and_completions(tiny_model_dir, tmp_path):
    control = {"kind": "adaptive_beta", "target": 1e-9, "horizon": 80.0}
    result = run(tiny_model_dir, tmp_path, kl="k3", beta_control=control, max_steps=4)
    # 8 completions per step: while the KL is 0, error = -0.2 and beta shrinks by 1 - 0.2 * 8 / 80; then it grows.
    betas = [entry["beta"] for entry in result.logs[:-1]]
    assert betas[0] == pytest.approx(0.1)
    assert betas[1] == pytest.approx(0.1 * 0.98)
    assert betas[2] == pytest.approx(0.1 * 0.98 * 1.02)
    assert betas[3] == pytest.approx(0.1 * 0.98 * 1.02**2)


def test_beta_control_resumes_exactly(tiny_model_dir, tmp_path):
    control = {"kind": "adaptive_beta", "target": 0.01, "horizon": 20.0}
    settings = {"kl": "k3", "beta_control": control, "max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    whole = run(tiny_model_dir, tmp_path / "whole", **settings)
    again = run(tiny_model_dir, tmp_path / "again", **settings)
    assert torch.equal(whole.weights, again.weights)
    from tests.tiny import arguments, lora, prompts, vowels

    resumed = GRPOExtTrainer(
        tiny_model_dir,
        [digits, vowels],
        arguments(
            GRPOExtConfig,
            tmp_path / "again",
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            beta=0.1,
            num_iterations=2,
            **settings,
        ),
        train_dataset=prompts(),
        peft_config=lora(),
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "again" / "checkpoint-4"))
    weights = torch.cat([p.detach().flatten() for p in resumed.model.parameters()])
    assert torch.equal(weights, whole.weights)
    assert resumed.beta == whole.trainer.beta


@pytest.mark.parametrize("advantage", [None, "rank", "mean_centered"])
def test_kl_in_the_reward(tiny_model_dir, tmp_path, advantage):
    seen = []

    class Spy(GRPOExtTrainer):
        def _with_kl_penalty(self, batch, output):
            penalised = super()._with_kl_penalty(batch, output)
            seen.append((batch, output, penalised))
            return penalised

    result = train(
        Spy,
        GRPOExtConfig,
        tiny_model_dir,
        tmp_path,
        peft=True,
        kl_placement="reward",
        beta=5.0,
        advantage=advantage,
        max_steps=4,
        log_completions=True,
    )
    batch, output, penalised = seen[-1]
    mask = output["completion_mask"]
    with torch.no_grad():
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
        assert ids.shape[0] == 8
    penalty = penalised.rewards[:, -1]
    assert penalised.names[-1] == "kl_penalty"
    assert penalty.abs().max() > 0
    torch.testing.assert_close(penalised.scores, batch.scores + penalty)
    entry = result.logs[3]
    assert entry["reward"] == pytest.approx(penalised.scores.mean().item(), abs=1e-6)
    assert entry["rewards/kl_penalty/mean"] == pytest.approx(penalty.mean().item(), abs=1e-6)
    assert entry["kl"] == pytest.approx(-penalty.sum().item() / 5.0 / mask.sum().item(), abs=1e-6)
    if advantage == "mean_centered":
        logged = torch.tensor(list(result.trainer._logs["advantages"])).view(2, 4)
        scores = penalised.scores.view(2, 4)
        torch.testing.assert_close(logged, scores - scores.mean(1, keepdim=True), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kl_placement": "reward", "beta": 0.0}, "has no effect with `beta=0`"),
        ({"kl_placement": "reward", "kl": "k3"}, "takes `beta \\* sum of k1` off the score"),
        ({"kl_placement": "reward", "kl_weighting": "ratio"}, "no term in the loss to weight"),
        ({"kl_placement": "reward", "use_bias_correction_kl": True}, "no term in the loss to weight"),
        ({"kl_placement": "reward", "kl_log": "k1"}, "unset `kl_log`"),
        ({"kl_placement": "reward", "advantage": "per_reward"}, "normalises each reward on its own"),
        ({"kl_placement": "reward", "multi_objective_aggregation": "normalize_then_sum"}, "normalises each reward"),
        ({"kl_placement": "rewards"}, "`kl_placement` must be one of"),
        ({"kl_log": "exact"}, "watches without an extra forward pass"),
        ({"kl_log": "k1", "beta": 0.0}, "has no effect with `beta=0`"),
        ({"beta_control": {"kind": "linear_beta", "start": 0.1, "end": 0.1, "steps": 0}}, "`steps` must be"),
        ({"beta_control": "constant_beta", "beta": 0.0}, "has no effect with `beta=0`"),
        ({"kl": "exact", "kl_weighting": "ratio"}, "sums over the vocabulary"),
    ],
)
def test_refused_combinations(tmp_path, fields, message):
    from tests.tiny import arguments
    from trl_grpo_ext import ConfigError

    with pytest.raises(ConfigError, match=message):
        arguments(GRPOExtConfig, tmp_path, **{"beta": 0.1, **fields})
