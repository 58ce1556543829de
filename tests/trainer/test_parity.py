"""Nothing configured is stock TRL bit for bit; the strategies that name TRL's own formulas equal it to rounding."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.trainer.runs import LOSS_TYPES, assert_same_logs, stock, train
from trl_grpo_ext import K3, GRPOExtConfig, GRPOExtTrainer, MeanCentered, ZScore

# Every loss type twice in the default run, each time under other settings; the rest of the cross is `slow`.
_QUICK = {
    (loss, *settings)
    for i, loss in enumerate(LOSS_TYPES)
    for settings in [[(1, True, 0.1), (2, False, 0.0)], [(2, True, 0.1), (1, False, 0.1)]][i % 2]
}
_CROSS = [
    pytest.param(*case, marks=[] if case in _QUICK else [pytest.mark.slow])
    for case in itertools.product(LOSS_TYPES, (1, 2), (True, False), (0.0, 0.1))
]


@pytest.mark.parametrize(("loss_type", "num_iterations", "peft", "beta"), _CROSS)
def test_nothing_configured_is_stock(tiny_model_dir, tmp_path, loss_type, num_iterations, peft, beta):
    settings = {"loss_type": loss_type, "num_iterations": num_iterations, "beta": beta, "peft": peft}
    theirs = stock(tiny_model_dir, tmp_path, **settings)
    ours = train(GRPOExtTrainer, GRPOExtConfig, tiny_model_dir, tmp_path, **settings)
    assert torch.equal(ours.weights, theirs.weights)
    assert ours.logs == theirs.logs


def test_the_plain_config_of_trl_will_do(tiny_model_dir, tmp_path):
    from trl import GRPOConfig

    theirs = stock(tiny_model_dir, tmp_path, peft=True, beta=0.1)
    ours = train(GRPOExtTrainer, GRPOConfig, tiny_model_dir, tmp_path, peft=True, beta=0.1)
    assert torch.equal(ours.weights, theirs.weights)
    assert ours.logs == theirs.logs


# Plain SGD: Adam divides tiny gradients by their own size and so blows rounding up to a step.
_SGD = {"optim": "sgd", "learning_rate": 0.5}


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_k3_and_zscore_equal_stock_to_rounding(tiny_model_dir, tmp_path, loss_type, corrected):
    settings = {"loss_type": loss_type, "num_iterations": 2, "beta": 0.1, "peft": True, **_SGD}
    theirs = stock(tiny_model_dir, tmp_path, use_bias_correction_kl=corrected, **settings)
    with pytest.warns(UserWarning, match="forward KL") if not corrected else _no_warning():
        ours = train(
            GRPOExtTrainer,
            GRPOExtConfig,
            tiny_model_dir,
            tmp_path,
            advantage="zscore",
            kl="k3",
            use_bias_correction_kl=None if corrected else False,
            **settings,
        )
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=0, atol=1e-6)
    # The first step has the same weights on both sides, so its KL is the same number; later ones differ by rounding.
    assert ours.logs[0]["kl"] == theirs.logs[0]["kl"]
    assert_same_logs(ours.logs, theirs.logs, rtol=1e-3, atol=1e-5)
    assert {"advantage/abs_max", "advantage/constant_groups", "beta"} <= set(ours.logs[0])


@pytest.mark.parametrize(
    ("strategy", "scale_rewards"), [(ZScore(), "group"), (ZScore(scale="batch"), "batch"), (MeanCentered(), "none")]
)
def test_advantages_equal_scale_rewards(tiny_model_dir, tmp_path, strategy, scale_rewards):
    theirs = stock(tiny_model_dir, tmp_path, peft=False, scale_rewards=scale_rewards, **_SGD)
    kwargs = {"advantage": strategy}
    ours = train(GRPOExtTrainer, GRPOExtConfig, tiny_model_dir, tmp_path, peft=False, trainer_kwargs=kwargs, **_SGD)
    expected = list(theirs.trainer._logs["advantages"])
    assert len(set(expected)) > 2
    torch.testing.assert_close(
        torch.tensor(list(ours.trainer._logs["advantages"])), torch.tensor(expected), rtol=0, atol=2e-6
    )
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=0, atol=1e-6)


def test_k3_with_the_second_model_of_full_fine_tuning(tiny_model_dir, tmp_path):
    settings = {"peft": False, "beta": 0.2, "num_iterations": 2, **_SGD}
    theirs = stock(tiny_model_dir, tmp_path, **settings)
    ours = train(GRPOExtTrainer, GRPOExtConfig, tiny_model_dir, tmp_path, trainer_kwargs={"kl": K3()}, **settings)
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=0, atol=1e-6)


def _no_warning():
    import contextlib

    return contextlib.nullcontext()
