"""Our strategies against the advantages that TRL's own trainers compute from the same rewards."""

from __future__ import annotations

import warnings

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from tests.advantages.table import batch_of
from tests.tiny import PROMPTS, arguments, digits, prompts, vowels
from trl_grpo_ext.advantages import BatchWhiten, Chain, LeaveOneOut, MeanCentered, PerReward, ZScore

WEIGHTS = [1.0, 0.25]
G = 4


def rewards_of(name: str) -> torch.Tensor:
    """Return `(8, 2)` injected rewards: two groups of four, two functions."""
    rewards = torch.randn(8, 2, generator=torch.Generator().manual_seed(5)) * torch.tensor([1.0, 20.0])
    if name == "missing cells":
        rewards[0, 0] = rewards[2, 1] = rewards[5, 1] = torch.nan
    if name == "missing rows":
        rewards[1] = rewards[6] = torch.nan
    if name == "one function silent":
        rewards[:, 1] = torch.nan
    if name == "binary":
        rewards = (rewards > 0).float()
    if name == "constant group":
        rewards[:4] = torch.tensor([1.0, 3.0])
    return rewards


INJECTED = ("plain", "missing cells", "missing rows", "one function silent", "binary", "constant group")


def make_trainer(trainer_class, config_class, model, folder):
    settings = {"num_generations": G, "max_completion_length": 2, "reward_weights": WEIGHTS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return trainer_class(
            model, [digits, vowels], arguments(config_class, folder, **settings), train_dataset=prompts()
        )


@pytest.fixture(scope="module")
def grpo(tiny_model_dir, tmp_path_factory):
    return make_trainer(GRPOTrainer, GRPOConfig, tiny_model_dir, tmp_path_factory.mktemp("grpo"))


@pytest.fixture(scope="module")
def rloo(tiny_model_dir, tmp_path_factory):
    return make_trainer(RLOOTrainer, RLOOConfig, tiny_model_dir, tmp_path_factory.mktemp("rloo"))


def advantages_of(trainer, rewards: torch.Tensor, monkeypatch, **attributes) -> torch.Tensor:
    """Run TRL's own generation and scoring, with the rewards in the place of those of the functions."""
    for name, value in attributes.items():
        monkeypatch.setattr(trainer, name, value)
    monkeypatch.setattr(trainer, "_calculate_rewards", lambda *args: rewards.clone())
    inputs = [{"prompt": PROMPTS[row // G]} for row in range(len(rewards))]
    return trainer._generate_and_score_completions(inputs)["advantages"]


@pytest.mark.parametrize("injected", INJECTED)
class TestEqualsTRL:
    @pytest.mark.parametrize(
        ("scale", "strategy"),
        [("group", ZScore()), ("batch", ZScore(scale="batch")), ("none", MeanCentered())],
        ids=["group", "batch", "none"],
    )
    def test_scale_rewards(self, grpo, monkeypatch, injected, scale, strategy):
        rewards = rewards_of(injected)
        expected = advantages_of(
            grpo, rewards, monkeypatch, scale_rewards=scale, multi_objective_aggregation="sum_then_normalize"
        )
        result = strategy(batch_of(rewards, G, weights=WEIGHTS)).advantages
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)

    def test_per_reward_is_normalize_then_sum(self, grpo, monkeypatch, injected):
        rewards = rewards_of(injected)
        expected = advantages_of(grpo, rewards, monkeypatch, multi_objective_aggregation="normalize_then_sum")
        result = PerReward()(batch_of(rewards, G, weights=WEIGHTS)).advantages
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("normalize", [False, True])
    def test_leave_one_out_is_rloo(self, rloo, monkeypatch, injected, normalize):
        rewards = rewards_of(injected)
        expected = advantages_of(rloo, rewards, monkeypatch, normalize_advantages=normalize, beta=0.0)
        strategy = Chain(LeaveOneOut(), transforms=[BatchWhiten()]) if normalize else LeaveOneOut()
        result = strategy(batch_of(rewards, G, weights=WEIGHTS)).advantages
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
