"""What must not train: strategies that return something else than they should, and settings that would ruin a run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from tests.tiny import arguments, digits, lora, prompts, vowels
from trl_grpo_ext import (
    AdapterRewardModel,
    ArgumentError,
    ConfigError,
    GRPOExtConfig,
    GRPOExtTrainer,
    LengthPenalty,
    Mix,
    PerReward,
    Rank,
    ShapeError,
    StateError,
    ZScore,
    _trl,
)
from trl_grpo_ext.advantages import AdvantageOutput, AdvantageStrategy
from trl_grpo_ext.kl import BetaControl, KLEstimator
from trl_grpo_ext.rewards import ShapingStrategy


@dataclass(frozen=True, kw_only=True)
class Returns(AdvantageStrategy):
    """An advantage that returns what it is told to."""

    what: Any

    def normalize(self, values, segments, **context):
        raise NotImplementedError

    def evaluate(self, batch, **context):
        return self.what(batch)


@dataclass(frozen=True, kw_only=True)
class Shapes(ShapingStrategy):
    what: Any

    def __call__(self, batch):
        return self.what(batch)


@dataclass(frozen=True, kw_only=True)
class Terms(KLEstimator):
    gradient: ClassVar[dict] = {"none": "biased", "ratio": "biased", "detached": "biased"}
    what: Any

    def __call__(self, logps, ref_logps, **context):
        return self.what(logps)


@dataclass(frozen=True, kw_only=True)
class Betas(BetaControl):
    first_beta: float = 0.1
    next_beta: float = 0.1

    def initial(self, beta):
        return self.first_beta

    def after(self, step, *, beta, kl, n):
        return self.next_beta


def make(model, folder, reward_funcs=digits, peft=True, config=None, **kwargs):
    args = arguments(GRPOExtConfig, folder, **{"beta": 0.1, "max_steps": 1, **(config or {})})
    return GRPOExtTrainer(
        model, reward_funcs, args, train_dataset=prompts(), peft_config=lora() if peft else None, **kwargs
    )


def judge(prompts, firsts, seconds):
    return [0.5] * len(firsts)


def advantages(make_tensor):
    return lambda batch: AdvantageOutput(make_tensor(len(batch.rewards)), {})


def weights(trainer):
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        (advantages(lambda n: torch.full((n,), torch.nan)), StateError, "8 of 8 advantages that are not finite"),
        (advantages(lambda n: torch.tensor([torch.inf] + [0.0] * (n - 1))), StateError, "1 of 8 advantages"),
        (advantages(lambda n: torch.zeros(n + 8)), ShapeError, r"\(8,\), got Tensor of shape \(16,\)"),
        (advantages(lambda n: torch.zeros(n, 1)), ShapeError, r"got Tensor of shape \(8, 1\)"),
        (advantages(lambda n: [0.0] * n), ShapeError, "got list"),
        (lambda batch: torch.zeros(8), ShapeError, r"AdvantageOutput\(advantages, metrics\)`, got Tensor"),
        (lambda batch: None, ShapeError, "got NoneType"),
    ],
)
def test_advantages_of_the_wrong_kind_never_train(tiny_model_dir, tmp_path, what, error, message):
    trainer = make(tiny_model_dir, tmp_path, advantage=Returns(what=what))
    before = weights(trainer)
    with pytest.raises(error, match=message) as caught:
        trainer.train()
    assert "advantage Returns(" in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float64])
def test_advantages_of_another_dtype_are_converted(tiny_model_dir, tmp_path, dtype):
    what = advantages(lambda n: (torch.arange(n) % 4 - 1).to(dtype).requires_grad_(dtype.is_floating_point))
    trainer = make(tiny_model_dir, tmp_path, advantage=Returns(what=what))
    trainer.train()
    assert list(trainer._logs["advantages"]) == [-1.0, 0.0, 1.0, 2.0] * 2


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda batch: None, "must return a RewardBatch, got NoneType"),
        (lambda batch: dataclasses.replace(batch, num_generations=8), "in groups of 4, got 8 in groups of 8"),
    ],
)
@pytest.mark.parametrize("once", [False, True])
def test_shaping_keeps_the_batch(tiny_model_dir, tmp_path, monkeypatch, what, message, once):
    monkeypatch.setattr(Shapes, "runs_once", once)
    trainer = make(tiny_model_dir, tmp_path, shaping=[Shapes(what=what)])
    with pytest.raises(ShapeError, match=message):
        trainer.train()


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        (lambda logps: logps.sum(), ShapeError, "a term per token"),
        (lambda logps: logps[:, :-1], ShapeError, "a term per token"),
        (lambda logps: logps.detach(), ShapeError, "terms without a gradient"),
        (lambda logps: logps * torch.nan, StateError, "is nan on this batch"),
        (lambda logps: logps * -torch.inf, StateError, "is inf on this batch"),
    ],
)
@pytest.mark.filterwarnings("ignore:KL estimator:UserWarning")
def test_kl_terms_of_the_wrong_kind_never_train(tiny_model_dir, tmp_path, what, error, message):
    trainer = make(tiny_model_dir, tmp_path, kl=Terms(what=what))
    before = weights(trainer)
    with pytest.raises(error, match=message):
        trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))


@pytest.mark.parametrize("beta", [float("nan"), float("inf"), -1.0, None])
def test_a_beta_control_gives_a_beta(tiny_model_dir, tmp_path, beta):
    with pytest.raises(ConfigError, match="beta of Betas"):
        make(tiny_model_dir, tmp_path, beta_control=Betas(first_beta=beta))
    trainer = make(tiny_model_dir, tmp_path, beta_control=Betas(next_beta=beta))
    with pytest.raises(ConfigError, match="beta of Betas"):
        trainer.train()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kl": "k3", "beta": float("nan")}, "`beta` must be >= 0, got nan"),
        ({"kl": "k3", "beta": float("inf")}, "`beta` must be >= 0, got inf"),
        ({"kl": "k3", "beta": -0.1}, "`beta` must be >= 0, got -0.1"),
        (
            {"advantage": "rank", "reward_weights": [1.0, float("nan")]},
            r"`reward_weights\[1\]` must be a finite number",
        ),
        ({"kl": "k3", "loss_type": "grpoo"}, "`loss_type` must be one of .*did you mean 'grpo'"),
        ({"beta_control": {"kind": "adaptive_beta", "target": 0.1, "min": 0.5}, "beta": 0.01}, "beta"),
        (
            {"kl_placement": "reward", "advantage": {"kind": "mix", "parts": [[1, "gdpo"], [1, "rank"]]}},
            "normalises each reward on its own",
        ),
        (
            {"shaping": ["group_length", {"kind": "pairwise_win_rate", "judge": "tests.trainer.test_misuse:judge"}]},
            "what stands before it is lost; put it first",
        ),
        ({"kl_placement": "reward", "mask_truncated_completions": True}, "needs the KL of every completion"),
        ({"kl_placement": "reward", "advantage": {"kind": "chain", "strategy": "gdpo"}}, "normalises each reward"),
    ],
)
def test_settings_that_would_ruin_a_run_are_refused_by_the_config(tmp_path, config, message):
    with pytest.raises(ConfigError, match=message):
        arguments(GRPOExtConfig, tmp_path, **{"beta": 0.1, **config})


def test_without_a_strategy_trls_numbers_are_trls_business(tmp_path):
    assert arguments(GRPOExtConfig, tmp_path, beta=-0.1).beta == -0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reference": "adapter_off", "peft": False}, "needs a PEFT policy"),
        ({"reference": {"kind": "moving_anchor", "every": 1}, "peft": False}, "needs a PEFT policy"),
        ({"reference": "full_copy"}, "is for full fine-tuning"),
        ({"reward_funcs": LengthPenalty(AdapterRewardModel("x"), alpha=1, target=2), "peft": False}, "PEFT policy"),
        ({"advantage": PerReward(strategies={"digit": Rank()})}, "'digit', which is no reward.*did you mean 'digits'"),
        ({"advantage": Mix(parts=[(1, PerReward(strategies={"x": Rank()}))])}, "names 'x'"),
    ],
)
def test_what_the_arguments_say_is_refused_before_a_model_is_loaded(
    tiny_model_dir, tmp_path, monkeypatch, settings, message
):
    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("trl.trainer.grpo_trainer.create_model_from_path", load)
    with pytest.raises(ConfigError, match=message):
        make(tiny_model_dir, tmp_path, **{"reward_funcs": [digits, vowels], **settings})


def test_a_misspelt_keyword_is_told_from_those_of_trl_and_ours(tmp_path):
    args = arguments(GRPOExtConfig, tmp_path)
    with pytest.raises(TypeError, match=r"takes no keyword 'advantag'; did you mean 'advantage'\?") as caught:
        GRPOExtTrainer("no/such-model", digits, args, advantag="rank")
    assert isinstance(caught.value, ArgumentError)
    with pytest.raises(ArgumentError, match="did you mean 'eval_dataset'"):
        GRPOExtTrainer("no/such-model", digits, args, evl_dataset=None)


def test_names_in_per_reward_are_those_that_trl_will_log(tiny_model_dir, tmp_path):
    twice = [digits, digits, vowels]
    trainer = make(tiny_model_dir, tmp_path, twice, advantage=PerReward(strategies={"digits#2": ZScore()}))
    assert trainer.reward_func_names == ["digits", "digits#2", "vowels"] == [
        *map(_trl.reward_name, twice[:1]), "digits#2", "vowels"
    ]  # fmt: skip
    assert _trl.reward_name("org/model") == "model"


@pytest.mark.parametrize("peft_config", [lora(), None])
def test_arguments_are_found_by_position_and_by_name(peft_config):
    names = list(GRPOExtTrainer.__init__.__signature__.parameters)
    position = names.index("peft_config") - names.index("args") - 1
    assert _trl.argument("peft_config", (None,) * position + (peft_config,), {}) is peft_config
    assert _trl.argument("peft_config", (), {"peft_config": peft_config}) is peft_config
