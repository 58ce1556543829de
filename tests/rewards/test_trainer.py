"""Wrappers and shaping inside the trainer: what trains, and what the log says of it."""

from __future__ import annotations

import json
import logging
import math
import warnings
from pathlib import Path

import pandas as pd
import pytest
import torch
from trl import GRPOTrainer

from tests.rewards.test_shaping import longer
from tests.tiny import arguments, digits, prompts, vowels
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer
from trl_grpo_ext.advantages import Rank, ZScore
from trl_grpo_ext.errors import ConfigError
from trl_grpo_ext.rewards import (
    GroupLengthReward,
    LengthPenalty,
    PairwiseWinRate,
    PassRateLengthPenalty,
    RetryReward,
    ScaleReward,
)


def zero(completions, **kwargs):
    return [0.0] * len(completions)


async def async_digits(completions, **kwargs):
    return digits(completions)


def broken(completions, **kwargs):
    raise ConnectionError("busy")


def trainer(model, folder, reward_funcs, *, cls=GRPOExtTrainer, config=GRPOExtConfig, keywords=None, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        args = arguments(config, folder, **settings)
        return cls(model, reward_funcs, args, train_dataset=prompts(), **(keywords or {}))


def one_batch(made):
    """Generate and score one training batch."""
    made.model.train()
    inputs = [{"prompt": "1+1="}] * 4 + [{"prompt": "2+3="}] * 4
    return made._generate_and_score_completions(inputs)


def weights(made):
    return torch.cat([p.detach().flatten() for p in made.model.parameters()])


def test_a_gated_batch_of_failures_teaches_nothing(tiny_model_dir, tmp_path):  # CASES 7
    def advantages(gate):
        reward = LengthPenalty(zero, alpha=0.1, target=1, gate=gate)
        made = trainer(tiny_model_dir, tmp_path, reward, max_completion_length=12)
        return one_batch(made)["advantages"], made

    gated, made = advantages(gate=0.5)
    assert (gated == 0).all()
    before = weights(made).clone()
    made.train()
    assert torch.equal(weights(made), before)
    assert (advantages(gate=None)[0] != 0).any()


def test_two_instances_of_one_wrapper_have_two_columns(tiny_model_dir, tmp_path):  # CASES 10
    rewards = [ScaleReward(digits), ScaleReward(digits, scale=2.0), ScaleReward(vowels)]
    made = trainer(tiny_model_dir, tmp_path, rewards, max_steps=1, log_completions=True)
    made.train()
    names = ["scale_reward(digits)", "scale_reward(digits)#2", "scale_reward(vowels)"]
    log = made.state.log_history[0]
    assert log[f"rewards/{names[1]}/mean"] == pytest.approx(2 * log[f"rewards/{names[0]}/mean"])
    (table,) = Path(tmp_path, "completions").glob("*.parquet")
    table = pd.read_parquet(table)
    assert set(names) <= set(table.columns)
    assert table[names[1]].tolist() == pytest.approx([2 * x for x in table[names[0]]])


def test_async_wrappers_and_callable_objects_train(tiny_model_dir, tmp_path):  # CASES 11
    class Digits:
        def __call__(self, completions, **kwargs):
            return digits(completions)

    runs = []
    for inner in (digits, async_digits, Digits()):
        made = trainer(tiny_model_dir, tmp_path, ScaleReward(RetryReward(inner, timeout=60.0), scale=2.0), max_steps=1)
        made.train()
        runs.append(weights(made))
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


def test_retries_that_fail_leave_the_other_functions_to_train(tiny_model_dir, tmp_path):  # CASES 1, 12
    made = trainer(tiny_model_dir, tmp_path, [RetryReward(broken, retries=1, timeout=9.0), digits], max_steps=1)
    made.train()
    log = made.state.log_history[0]
    assert log["rewards/retry_reward(broken)/mean"] is None
    assert log["retry_reward(broken)/failed_tries"] == 2.0
    assert log["retry_reward(broken)/unscored_batches"] == 1.0
    assert log["reward"] == pytest.approx(log["rewards/digits/mean"])
    assert log["grad_norm"] > 0


@pytest.mark.parametrize(
    "settings",
    [
        *({"scale_rewards": x} for x in ("group", "batch", "none")),
        {"multi_objective_aggregation": "normalize_then_sum"},
    ],
    ids=str,
)
def test_shaping_alone_keeps_trls_own_advantage(tiny_model_dir, tmp_path, settings):
    outputs = []
    for cls, keywords in (GRPOTrainer, {}), (GRPOExtTrainer, {"shaping": GroupLengthReward(weight=0.0)}):
        made = trainer(tiny_model_dir, tmp_path, [digits, vowels], cls=cls, keywords=keywords, **settings)
        torch.manual_seed(1)
        metrics = made._metrics["train"]
        outputs.append((one_batch(made)["advantages"], metrics["reward"], metrics["reward_std"]))
    assert outputs[0][0].abs().max() > 0.1
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)


def test_shaping_trains_and_the_log_says_so(tiny_model_dir, tmp_path):
    shaping = [GroupLengthReward(weight=0.5), PassRateLengthPenalty(weight=0.1, max_length=6)]
    keywords = {"shaping": shaping, "advantage": Rank()}
    made = trainer(tiny_model_dir, tmp_path, digits, max_steps=1, log_completions=True, keywords=keywords)
    made.train()
    log = made.state.log_history[0]
    (table,) = Path(tmp_path, "completions").glob("*.parquet")
    table = pd.read_parquet(table)
    shaped = table["digits"] + 0.5 * table["group_length"] + 0.1 * table["pass_rate_length"]
    assert log["reward"] == pytest.approx(shaped.mean(), abs=1e-6)
    assert log["rewards/group_length/mean"] == pytest.approx(table["group_length"].mean(), abs=1e-6)
    assert log["rewards/pass_rate_length/std"] == pytest.approx(table["pass_rate_length"].std(), abs=1e-6)
    expected = Rank().normalize(torch.tensor(shaped.tolist(), dtype=torch.float64), torch.arange(8) // 4)
    assert table["advantage"].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    saved = json.loads(Path(tmp_path, "grpo_strategies.json").read_text()) if made.save_model() is None else None
    assert saved["shaping"][0] == {"kind": "group_length", "weight": 0.5, "threshold": 0.0}


def test_a_judge_replaces_the_score_but_not_the_log_of_the_functions(tiny_model_dir, tmp_path, caplog):
    def judge(prompts, firsts, seconds):
        assert all(isinstance(text, str) for text in (*prompts, *firsts, *seconds))
        return longer(prompts, firsts, seconds)

    with caplog.at_level(logging.WARNING):
        made = trainer(tiny_model_dir, tmp_path, digits, max_steps=1, keywords={"shaping": PairwiseWinRate(judge)})
    assert "can't be read back" in caplog.text  # a local function has no import path
    made.train()
    log = made.state.log_history[0]
    assert log["reward"] == pytest.approx(0.5)
    assert log["rewards/pairwise_win_rate/mean"] == pytest.approx(0.5)
    assert log["rewards/digits/mean"] > 0


def test_evaluation_with_one_completion_per_prompt(tiny_model_dir, tmp_path):  # CASES 16
    for shaping in (GroupLengthReward(), PassRateLengthPenalty(weight=0.1, max_length=6), PairwiseWinRate(longer)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            args = arguments(GRPOExtConfig, tmp_path, num_generations_eval=1, per_device_eval_batch_size=4)
            made = GRPOExtTrainer(
                tiny_model_dir, digits, args, train_dataset=prompts(), eval_dataset=prompts(4), shaping=shaping
            )
        assert math.isfinite(made.evaluate()["eval_loss"])
        assert torch.tensor(made._logs["advantages"]).isfinite().all()


def test_all_cut_off_and_no_spread_is_said_once(tiny_model_dir, tmp_path, caplog):  # CASES 13
    made = trainer(
        tiny_model_dir, tmp_path, zero, max_completion_length=2, keywords={"advantage": ZScore()}, num_generations=4
    )
    made.generation_config.suppress_tokens = [0, 1]  # never ends
    with caplog.at_level(logging.WARNING):
        made.train()
    assert caplog.text.count("Every completion was cut off at max_completion_length=2") == 1


def test_shaping_and_reward_specs_in_the_config(tiny_model_dir, tmp_path):
    inner = {"kind": "length_penalty", "alpha": 0.1, "target": 3, "inner": "tests.tiny:digits"}
    rewards = [{"kind": "clip_reward", "low": 0, "high": 1, "inner": inner}, "tests.tiny:vowels"]
    shaping = json.dumps(
        [{"kind": "group_length", "weight": 0.5}, {"kind": "pass_rate_length", "weight": 1, "max_length": 6}]
    )
    made = trainer(tiny_model_dir, tmp_path, None, rewards=rewards, shaping=shaping, max_steps=1)
    made.train()
    assert made.reward_func_names == ["clip_reward(length_penalty(digits))", "vowels"]
    assert "rewards/group_length/mean" in made.state.log_history[0]
    with pytest.raises(ConfigError, match=r"group_length"):
        trainer(tiny_model_dir, tmp_path, digits, shaping={"kind": "group_lenght"})
