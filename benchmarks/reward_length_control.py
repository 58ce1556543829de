"""Which cure does what against length hacking: the same short GRPO run on a tiny model, once per cure.

    python benchmarks/reward_length_control.py --plot docs/img/reward_length.png

The reward model of this experiment likes what it should, even digits among the first four characters, and what it
should not, length: ``quality + 0.03 * tokens``. Nothing after the fourth character adds quality. The table shows
where length and quality stand after training, without a cure and with each. A second table shows what a length
penalty without a gate does when every answer is wrong. Everything is built here; all of it takes some minutes on one
core.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import torch
from datasets import Dataset

from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer
from trl_grpo_ext.demo.model import build_model, build_tokenizer
from trl_grpo_ext.rewards import GroupLengthReward, LengthPenalty, PassRateLengthPenalty, SoftOverlong

LONGEST, GOOD = 32, 4
PROMPTS = [f"{a}+{b}=" for a in range(1, 9) for b in range(1, 5)]


def quality(completions: list[str]) -> list[float]:
    return [sum(c in "02468" for c in text[:GOOD]) / GOOD for text in completions]


def likes_length(
    completions: list[str], completion_ids: list[list[int]], log_metric: Any = None, **kw: Any
) -> list[float]:
    """The reward of the experiment; logs the part of it that is meant."""
    meant = quality(completions)
    if log_metric is not None:
        log_metric("quality", sum(meant) / len(meant))
    return [good + 0.03 * len(ids) for good, ids in zip(meant, completion_ids, strict=True)]


def always_wrong(completions: list[str], **kw: Any) -> list[float]:
    return [0.0] * len(completions)


CURES: dict[str, dict[str, Any]] = {
    "none": {},
    "`LengthPenalty(alpha=0.06, target=12)`": {"reward": LengthPenalty(likes_length, alpha=0.06, target=12)},
    "`SoftOverlong(max_length=24, buffer=12)`": {"reward": SoftOverlong(likes_length, max_length=24, buffer=12)},
    "`GroupLengthReward(weight=0.6)`": {"shaping": GroupLengthReward(weight=0.6)},
    "`GroupLengthReward(weight=1)`": {"shaping": GroupLengthReward(weight=1.0)},
    "`PassRateLengthPenalty(weight=1, max_length=32)`": {
        "shaping": PassRateLengthPenalty(weight=1.0, max_length=LONGEST)
    },
    "`LengthBucketed(buckets=4)`": {"advantage": {"kind": "length_bucketed", "buckets": 4}},
    "`LengthBucketed(edges=[4, 8, ..., 28], small='zero')`": {
        "advantage": {"kind": "length_bucketed", "edges": list(range(4, 32, 4)), "small": "zero"}
    },
    "`max_completion_length=16`": {"max_completion_length": 16},
}
WRONG = {
    "no penalty": {"reward": always_wrong},
    "`LengthPenalty(alpha=0.05, target=2)`": {"reward": LengthPenalty(always_wrong, alpha=0.05, target=2)},
    "the same with `gate=0.5`": {"reward": LengthPenalty(always_wrong, alpha=0.05, target=2, gate=0.5)},
}


def run(
    steps: int, *, reward: Any = likes_length, shaping: Any = None, advantage: Any = None, **settings: Any
) -> list[dict]:
    """Train and return the log."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, hidden=32, layers=2)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = GRPOExtConfig(
            output_dir=folder,
            per_device_train_batch_size=64,
            num_generations=16,
            max_steps=steps,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            seed=0,
            **{"max_completion_length": LONGEST, **settings},
        )
        trainer = GRPOExtTrainer(
            model,
            reward,
            args,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tokenizer,
            shaping=shaping,
            advantage=advantage,
        )
        trainer.train()
    return [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]


def last(log: list[dict], key: str) -> float:
    """Return the mean of the last five steps."""
    return sum(entry[key] for entry in log[-5:]) / 5


def plot(logs: dict[str, list[dict]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axis, key, label in zip(
        axes, ("completions/mean_length", "quality"), ("completion tokens", "quality"), strict=True
    ):
        for name, log in logs.items():
            axis.plot([entry[key] for entry in log], label=name.replace("`", ""), linewidth=1.5)
        axis.set(xlabel="step", ylabel=label)
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--plot", help="where to save the curves")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logs = {name: run(args.steps, **options) for name, options in CURES.items()}
    first = next(iter(logs.values()))[0]
    print(f"\nBefore: {first['completions/mean_length']:.1f} tokens, quality {first['quality']:.2f}. After:\n")
    print("| cure | tokens | cut off | quality | step at which 24 tokens were passed |\n|---|---:|---:|---:|---:|")
    for name, log in logs.items():
        long = [i + 1 for i, entry in enumerate(log) if entry["completions/mean_length"] > 24]
        print(
            f"| {name} | {last(log, 'completions/mean_length'):.1f} | {last(log, 'completions/clipped_ratio'):.2f} | "
            f"{last(log, 'quality'):.2f} | {long[0] if long else 'never'} |"
        )
    print("\n| every answer is wrong | tokens, first step | tokens, last steps |\n|---|---:|---:|")
    for name, options in WRONG.items():
        log = run(args.steps, **options)
        first, end = log[0]["completions/mean_length"], last(log, "completions/mean_length")
        print(f"| {name} | {first:.1f} | {end:.1f} |")
    if args.plot:
        Path(args.plot).parent.mkdir(parents=True, exist_ok=True)
        plot(logs, args.plot)


if __name__ == "__main__":
    main()
