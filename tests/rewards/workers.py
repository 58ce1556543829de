"""What the two-process tests run in each process: ``python -m tests.rewards.workers MODEL FOLDER``."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

import torch

from tests.rewards.test_shaping import longer
from tests.tiny import arguments, digits, prompts

torch.set_num_threads(1)


def rank() -> int:
    from accelerate import PartialState

    return PartialState().process_index


def raises(completions, **kwargs):
    if rank() == 1:
        raise ConnectionError("service is down")
    return [0.0] * len(completions)


async def async_raises(completions, **kwargs):
    return raises(completions)


def wrong_count(completions, **kwargs):
    return [1.0] * (len(completions) - rank())


def hangs(completions, **kwargs):
    time.sleep(600 * rank())
    return [0.0] * len(completions)


def judge(prompts, firsts, seconds):
    assert rank() == 0, "the judge runs on the main process"
    return longer(prompts, firsts, seconds)


def broken_judge(prompts, firsts, seconds):
    raise ConnectionError("no judge")


def trainer(model, folder, reward_funcs, ddp_timeout=300, **keywords):
    """A trainer whose groups of four span both processes: two rows each."""
    from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer

    settings = {"per_device_train_batch_size": 2, "max_steps": 2, "ddp_timeout": ddp_timeout}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        args = arguments(GRPOExtConfig, folder, **settings)
        return GRPOExtTrainer(model, reward_funcs, args, train_dataset=prompts(), **keywords)


def spanning(model, folder):
    """Advantages of groups that span both processes, under each shaping, with the batch they came from."""
    from trl_grpo_ext.rewards import GroupLengthReward, PairwiseWinRate, PassRateLengthPenalty

    results = {}
    for shaping in (
        GroupLengthReward(weight=0.7),
        PassRateLengthPenalty(weight=0.3, max_length=6),
        PairwiseWinRate(judge),
    ):
        made = trainer(model, folder, digits, shaping=shaping)
        made.model.train()
        output = made._generate_and_score_completions([{"prompt": "1+1="}] * 2)
        logs = made._logs
        results[shaping.kind] = {
            "local": output["advantages"].tolist(),
            "advantages": list(logs["advantages"]),
            "completions": list(logs["completion"]),
            "digits": list(logs["rewards"]["digits"]),
            "lengths": [int(n) for n in made.accelerator.gather(output["completion_mask"].sum(1)).tolist()],
        }
    return results


def failures(model, folder):
    """What each process raises for every kind of failure, and what it trains under `RetryReward`."""
    from trl_grpo_ext import RewardError
    from trl_grpo_ext.rewards import PairwiseWinRate, RetryReward, ScaleReward

    results = {}
    for name, reward, keywords in (
        ("raises", ScaleReward(raises), {}),
        ("async_raises", [ScaleReward(async_raises), digits], {}),
        ("wrong_count", ScaleReward(wrong_count), {}),
        ("plain_function", raises, {"advantage": "rank"}),
        ("hangs", ScaleReward(hangs), {"ddp_timeout": 4}),
        ("broken_judge", digits, {"shaping": PairwiseWinRate(broken_judge)}),
    ):
        made = trainer(model, folder, reward, **keywords)
        start = time.monotonic()
        try:
            made.train()
            results[name] = "trained"
        except RewardError as error:
            results[name] = f"{error} after {time.monotonic() - start:.0f} s"
    for name, reward in (
        ("retry_raises", RetryReward(raises, retries=1, timeout=30.0)),
        ("retry_hangs", RetryReward(hangs, retries=0, timeout=2.0)),
    ):
        made = trainer(model, folder, [reward, digits], advantage="rank")
        made.train()
        results[name] = [entry[f"{reward.__name__}/failed_tries"] for entry in made.state.log_history[:-1]]
    return results


def main() -> None:
    model, folder = sys.argv[1:]
    results = {"spanning": spanning(model, folder), "failures": failures(model, folder)}
    Path(folder, f"{rank()}.json").write_text(json.dumps(results))
    from trl_grpo_ext.rewards import ScaleReward

    trainer(model, folder, ScaleReward(raises)).train()  # nobody catches this one


if __name__ == "__main__":
    main()
