"""What the trainer adds around the strategies: logs that tell what trained, refusals, saved files, bare use."""

from __future__ import annotations

import inspect
import json
import logging
import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

from tests.tiny import arguments, digits, lora, prompts, vowels
from tests.trainer.runs import train
from trl_grpo_ext import (
    K3,
    ConfigError,
    GRPOExtConfig,
    GRPOExtTrainer,
    LengthPenalty,
    MeanCentered,
    Rank,
    StateError,
    ZScore,
    from_spec,
    load_strategies,
)


def make(model, folder, *, reward_funcs=digits, config=None, peft=True, **kwargs):
    settings = config or {}
    return GRPOExtTrainer(
        model,
        reward_funcs,
        arguments(GRPOExtConfig, folder, **settings),
        train_dataset=prompts(),
        peft_config=lora() if peft else None,
        **kwargs,
    )


def constant(completions, **kwargs):
    return [1.0] * len(completions)


def half_scored(completions, **kwargs):
    return [None if i % 2 else float(i) for i in range(len(completions))]


def nothing(completions, **kwargs):
    return [None] * len(completions)


def infinite(completions, **kwargs):
    return [float("-inf"), *(float(len(c)) for c in completions[1:])]


# Logs


def test_logged_advantages_are_the_ones_that_trained(tiny_model_dir, tmp_path):
    seen = []

    class Spy(GRPOExtTrainer):
        def _compute_loss(self, model, inputs):
            seen.append(inputs["advantages"])
            return super()._compute_loss(model, inputs)

    run = train(Spy, GRPOExtConfig, tiny_model_dir, tmp_path, peft=True, advantage="rank", log_completions=True)
    trained = torch.cat(seen[-2:]).sort().values  # two micro-batches of 4 make the last batch; it was shuffled
    logged = torch.tensor(list(run.trainer._logs["advantages"]))
    assert torch.equal(logged.sort().values, trained)
    assert torch.equal(logged.view(2, 4).sum(1), torch.zeros(2))  # ranks of each group sum to zero, in group order
    assert set(logged.mul(6).frac().abs().tolist()) == {0.0}  # multiples of 1/6: ranks of four with ties

    table = pd.read_parquet(Path(tmp_path) / "completions" / "completions_00003.parquet")
    assert table["advantage"].tolist() == logged.tolist()


@pytest.mark.parametrize("strategy", [Rank(), ZScore(), MeanCentered()], ids=repr)
def test_frac_reward_zero_std_counts_the_groups_that_teach_nothing(tiny_model_dir, tmp_path, strategy):
    run = train(
        GRPOExtTrainer,
        GRPOExtConfig,
        tiny_model_dir,
        tmp_path,
        peft=True,
        trainer_kwargs={"advantage": strategy, "reward_funcs": constant},
    )
    assert run.logs[0]["frac_reward_zero_std"] == 1.0
    assert run.logs[0]["advantage/constant_groups"] == 1.0
    assert list(run.trainer._logs["advantages"]) == [0.0] * 8


def test_the_length_penalty_reaches_the_scores(tiny_model_dir, tmp_path):
    reward = LengthPenalty(constant, alpha=0.5, target=4)
    run = train(
        GRPOExtTrainer,
        GRPOExtConfig,
        tiny_model_dir,
        tmp_path,
        peft=True,
        advantage="mean_centered",
        trainer_kwargs={"reward_funcs": [reward]},
    )
    entry = run.logs[0]
    name = "rewards/length_penalty(constant)/mean"
    # Lengths 5 and 6 only (see the log): 1 - 0.5 * (mean length - 4).
    assert entry["completions/min_length"] >= 4
    assert entry[name] == pytest.approx(1 - 0.5 * (entry["completions/mean_length"] - 4))


def test_two_instances_of_one_wrapper_have_two_columns(tiny_model_dir, tmp_path):
    """CASES 10."""
    rewards = [LengthPenalty(digits, alpha=0.1, target=2), LengthPenalty(digits, alpha=0.9, target=2)]
    run = train(
        GRPOExtTrainer,
        GRPOExtConfig,
        tiny_model_dir,
        tmp_path,
        peft=True,
        log_completions=True,
        trainer_kwargs={"reward_funcs": rewards},
    )
    names = ["length_penalty(digits)", "length_penalty(digits)#2"]
    first, second = (run.logs[0][f"rewards/{name}/mean"] for name in names)
    assert first > second
    table = pd.read_parquet(Path(tmp_path) / "completions" / "completions_00001.parquet")
    assert set(names) <= set(table.columns)
    assert len(rewards) == 2  # the caller's list is left alone


@pytest.mark.parametrize("strategy", [Rank(), ZScore(), MeanCentered()], ids=repr)
def test_a_function_that_scores_nothing_does_not_silence_the_other(tiny_model_dir, tmp_path, strategy):
    """CASES 1."""
    run = train(
        GRPOExtTrainer,
        GRPOExtConfig,
        tiny_model_dir,
        tmp_path,
        peft=True,
        trainer_kwargs={"advantage": strategy, "reward_funcs": [digits, nothing]},
    )
    assert all(entry["grad_norm"] > 0 for entry in run.logs[:-1])
    assert torch.isfinite(run.weights).all()


def test_rows_without_a_score_get_exactly_zero(tiny_model_dir, tmp_path):
    run = train(
        GRPOExtTrainer,
        GRPOExtConfig,
        tiny_model_dir,
        tmp_path,
        peft=True,
        trainer_kwargs={"advantage": ZScore(), "reward_funcs": half_scored},
    )
    logged = list(run.trainer._logs["advantages"])
    assert logged[1::2] == [0.0] * 4
    assert all(value != 0 for value in logged[0::2])


def test_infinite_rewards_are_counted_and_said_once(tiny_model_dir, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        run = train(
            GRPOExtTrainer,
            GRPOExtConfig,
            tiny_model_dir,
            tmp_path,
            peft=True,
            trainer_kwargs={"advantage": Rank(), "reward_funcs": infinite},
        )
    assert run.logs[0]["rewards/infinite_frac"] == pytest.approx(1 / 8)
    assert sum("infinite value" in message for message in caplog.messages) == 1
    assert run.trainer._logs["advantages"][0] == 0.0


def test_all_truncated_without_spread_is_said_once(tiny_model_dir, tmp_path, caplog):
    """CASES 13."""
    with caplog.at_level(logging.WARNING):
        train(
            GRPOExtTrainer,
            GRPOExtConfig,
            tiny_model_dir,
            tmp_path,
            peft=True,
            max_completion_length=1,
            trainer_kwargs={"advantage": Rank(), "reward_funcs": constant},
        )
    assert sum("cut off at max_completion_length=1" in message for message in caplog.messages) == 1


def test_evaluation_with_one_generation_has_no_nan(tiny_model_dir, tmp_path):
    """CASES 16."""
    for strategy in (Rank(), ZScore(), MeanCentered()):
        trainer = make(
            tiny_model_dir,
            tmp_path,
            config={"num_generations_eval": 1, "per_device_eval_batch_size": 4, "beta": 0.1},
            advantage=strategy,
            kl=K3(),
            eval_dataset=prompts(4),
        )
        metrics = trainer.evaluate()
        assert metrics["eval_loss"] == pytest.approx(0.0, abs=1e-6)
        assert metrics["eval_kl"] == pytest.approx(0.0, abs=1e-6)


def test_the_start_line_and_the_saved_file_name_the_strategies(tiny_model_dir, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        trainer = make(
            tiny_model_dir,
            tmp_path,
            config={
                "beta": 0.1,
                "save_strategy": "steps",
                "save_steps": 2,
                "kl": {"kind": "k3", "max_log_ratio": 10.0},
            },
            advantage=ZScore(ddof=0),
        )
    (line,) = [message for message in caplog.messages if "trl-grpo-ext:" in message]
    assert '"ddof": 0' in line
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    expected = {
        "advantage": {"kind": "zscore", "eps": 1e-4, "ddof": 0, "scale": "group"},
        "kl": {"kind": "k3", "max_log_ratio": 10.0},
    }
    for folder in (tmp_path / "checkpoint-2", tmp_path / "final"):
        saved = json.loads((folder / "grpo_strategies.json").read_text())
        assert saved.pop("_meta")["versions"]["trl"]
        assert saved == expected
    card = (tmp_path / "README.md").read_text()
    assert "## Training strategies" in card
    assert "kind: zscore" in card
    assert card.index("## Training strategies") < card.index("### Framework versions")


def test_reward_functions_given_in_python_are_saved_if_they_can_be_used_elsewhere(tiny_model_dir, tmp_path):
    wrapped = LengthPenalty(accuracy_reward, alpha=0.1, target=3)
    trainer = make(tiny_model_dir, tmp_path, reward_funcs=[wrapped, accuracy_reward])
    trainer.save_model(str(tmp_path / "final"))
    saved = load_strategies(tmp_path / "final")
    assert from_spec(saved["rewards"][0], family="reward") == wrapped
    assert saved["rewards"][1] == "accuracy_reward"

    own = make(tiny_model_dir, tmp_path, reward_funcs=[wrapped, digits], advantage="rank")  # digits: tests.tiny only
    assert set(own.strategy_specs) == {"advantage"}
    plain = make(tiny_model_dir, tmp_path, reward_funcs=accuracy_reward)  # stock TRL
    assert not plain.strategy_specs


def test_the_output_folder_holds_the_strategies_from_the_first_checkpoint_on(tiny_model_dir, tmp_path):
    """It is what a push during training uploads."""
    trainer = make(
        tiny_model_dir, tmp_path, config={"save_strategy": "steps", "save_steps": 2, "max_steps": 2}, advantage="rank"
    )
    trainer.train()
    assert load_strategies(tmp_path) == load_strategies(tmp_path / "checkpoint-2") == {"advantage": {"kind": "rank"}}


def test_a_reward_functions_name_is_not_taken_for_a_model(tiny_model_dir, tmp_path):
    trainer = make(tiny_model_dir, tmp_path, reward_funcs=["accuracy_reward", "tests.tiny:digits"])
    assert trainer.reward_funcs == [accuracy_reward, digits]


def test_infinite_rewards_are_told_of_and_the_logged_reward_is_what_trained(tiny_model_dir, tmp_path):
    trainer = make(tiny_model_dir, tmp_path, reward_funcs=[infinite, digits], config={"max_steps": 1}, advantage="rank",
                   shaping=[{"kind": "group_length"}])  # fmt: skip
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert entry["rewards/infinite_frac"] == pytest.approx(1 / 16)  # of the two functions' cells, not of shaping's
    plain = make(tiny_model_dir, tmp_path, reward_funcs=[infinite], config={"max_steps": 1}, advantage="rank")
    plain.train()
    (entry,) = [entry for entry in plain.state.log_history if "reward" in entry]
    assert math.isfinite(entry["reward"])


def test_nothing_is_saved_or_logged_without_strategies(tiny_model_dir, tmp_path):
    trainer = make(tiny_model_dir, tmp_path)
    trainer.save_model(str(tmp_path / "final"))
    assert not (tmp_path / "final" / "grpo_strategies.json").exists()


# Construction


def test_a_keyword_and_the_field_of_the_same_name(tiny_model_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"`advantage` is set both as a keyword .* and in the config"):
        make(tiny_model_dir, tmp_path, config={"advantage": "rank"}, advantage="zscore")


def test_rewards_in_both_places(tiny_model_dir, tmp_path):
    with pytest.raises(ConfigError, match="set both as `reward_funcs`"):
        make(tiny_model_dir, tmp_path, config={"rewards": "think_format_reward"})


def test_an_estimator_needs_beta():
    """CASES 22: said before anything is loaded, so the model need not exist."""
    with pytest.raises(ConfigError, match="has no effect with `beta=0`"):
        GRPOExtTrainer("no/such-model", digits, arguments(GRPOConfig, "unused"), kl=K3())


def test_conflicts_are_said_before_the_model_is_loaded():
    args = arguments(GRPOConfig, "unused", scale_rewards="batch")
    with pytest.raises(ConfigError, match="replaces TRL's `scale_rewards`"):
        GRPOExtTrainer("no/such-model", digits, args, advantage=Rank())


def test_plain_config_with_its_default_flag_leaves_the_choice_to_us(tiny_model_dir, tmp_path):
    trainer = GRPOExtTrainer(
        tiny_model_dir,
        digits,
        arguments(GRPOConfig, tmp_path, beta=0.1),
        train_dataset=prompts(),
        peft_config=lora(),
        kl="k2",
    )
    assert trainer.kl_weighting == "detached"


def test_rewards_from_the_config(tiny_model_dir, tmp_path):
    spec = {"kind": "length_penalty", "inner": "tests.tiny:vowels", "alpha": 0.1, "target": 3}
    trainer = make(tiny_model_dir, tmp_path, reward_funcs=None, config={"rewards": [spec]})
    assert trainer.reward_funcs == [LengthPenalty(vowels, alpha=0.1, target=3)]
    assert trainer.strategy_specs["rewards"] == [spec]


def test_callers_lists_and_dicts_are_left_alone(tiny_model_dir, tmp_path):
    rewards = [{"kind": "length_penalty", "inner": "tests.tiny:vowels", "alpha": 0.1, "target": 3}]
    spec = {"kind": "zscore"}
    before = json.dumps([rewards, spec])
    make(tiny_model_dir, tmp_path, reward_funcs=rewards, advantage=spec)
    assert json.dumps([rewards, spec]) == before


def test_the_signature_is_trls_plus_ours():
    stock = list(inspect.signature(GRPOTrainer.__init__).parameters)
    ours = list(inspect.signature(GRPOExtTrainer.__init__).parameters)
    assert ours[: len(stock)] == stock
    assert ours[len(stock) :] == ["advantage", "kl", "beta_control", "reference", "shaping"]


def test_without_args_the_trainer_makes_our_config(tiny_model_dir, monkeypatch):
    made = []
    monkeypatch.setattr(
        "trl_grpo_ext.trainer.GRPOExtConfig", lambda folder: made.append(folder) or pytest.skip.Exception
    )
    with pytest.raises(AttributeError):
        GRPOExtTrainer(tiny_model_dir, digits)
    assert made == [Path(tiny_model_dir).name + "-GRPO"]


# Faults


def test_a_strategy_that_is_bypassed_stops_the_run(tiny_model_dir, tmp_path):
    class Bypass(GRPOExtTrainer):
        def _compute_loss(self, model, inputs):
            return GRPOTrainer._compute_loss(self, model, inputs)

    trainer = Bypass(
        tiny_model_dir,
        digits,
        arguments(GRPOExtConfig, tmp_path, kl="k3", beta=0.1),
        train_dataset=prompts(),
        peft_config=lora(),
    )
    with pytest.raises(StateError, match=r"did not call the configured strategies \['kl'\]"):
        trainer.train()


def test_a_wrong_number_of_rewards_names_the_inner_function(tiny_model_dir, tmp_path):
    """CASES 9."""

    def one_value(completions, **kwargs):
        return [1.0]

    trainer = make(tiny_model_dir, tmp_path, reward_funcs=LengthPenalty(one_value, alpha=0.1, target=3))
    with pytest.raises(ValueError, match="'one_value' returned 1 scores for 8 completions"):
        trainer.train()


def test_a_bare_trainer_has_every_attribute_of_ours():
    bare = object.__new__(GRPOExtTrainer)
    for name in ("advantage", "kl", "kl_weighting", "beta_control", "reference", "shaping", "_scored", "_called"):
        assert getattr(bare, name) is None
    assert dict(bare.strategy_specs) == {}


def test_masked_tool_tokens_change_neither_kl_nor_loss(tiny_model_dir, tmp_path):
    """CASES 19."""
    trainer = make(tiny_model_dir, tmp_path, config={"beta": 0.1}, kl=K3())
    trainer.current_gradient_accumulation_steps = 1
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0]])
    inputs = {
        "completion_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]]),
        "tool_mask": torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1]]),
        "num_items_in_batch": torch.tensor(4),
        "ref_per_token_logps": torch.tensor([[-1.0, -2.0, -3.0, -4.0], [-1.0, -2.0, -3.0, -4.0]]),
    }
    trainer.model.train()
    logps = torch.full((2, 4), -1.5)
    losses = []
    for garbage in (0.0, 1e4, float("inf"), float("nan")):
        changed = torch.where(mask.bool(), logps, garbage).requires_grad_()
        loss = trainer._kl_loss(changed, inputs)
        loss.backward()
        losses.append((loss.item(), changed.grad.tolist(), trainer._metrics["train"]["kl"][-1]))
    assert all(loss == losses[0] for loss in losses)
    assert losses[0][0] > 0
