"""GRPO of SmolLM2-135M-Instruct on reasoning-gym's sums, with swapped strategies; runs on a GPU or on two CPU cores.

LoRA policy, rank advantages, the k3 estimator against the adapter-off reference, and a length penalty on right answers:

    pip install "trl-grpo-ext[examples]"
    python examples/smollm2_arithmetic.py --output runs/smollm2

Held-out problems, none of them trained on, are sampled before, during and after training with the same settings and
seed. Writes to the output folder: the adapter, `grpo_strategies.json`, `metrics.json` and `curves.png`.
"""

import argparse
import json
import re
import statistics
from pathlib import Path

import matplotlib as mpl
import reasoning_gym
import torch
from datasets import Dataset
from peft import LoraConfig
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer, LengthPenalty

mpl.use("Agg")
from matplotlib import pyplot as plt

TASK = "chain_sum"
SYSTEM = "You are a calculator."
score_answer = reasoning_gym.get_score_answer_fn(TASK)


def make_problems(heldout: int, train: int, seed: int) -> tuple[list[dict], list[dict]]:
    """Return held-out and training problems: sums and differences of two numbers of one or two digits.

    The held-out problems are all different, and no training problem is among them.
    """
    task = reasoning_gym.create_dataset(
        TASK, size=4 * (heldout + train), seed=seed, min_terms=2, max_terms=2, min_digits=1, max_digits=2
    )
    held: dict[str, dict] = {}
    rest: list[dict] = []
    for entry in task:
        if len(held) < heldout:
            held[entry["question"]] = entry
        elif entry["question"] not in held and len(rest) < train:
            rest.append(entry)
    return list(held.values()), rest


def make_prompt(entry: dict) -> list[dict]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": entry["question"]}]


def final_number(text: str) -> str | None:
    """Return the last number in a completion: its answer."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
    return numbers[-1] if numbers else None


def task_score(completions: list, answer: list[str], **columns) -> list[float]:
    """Reward: the task's own scorer. It gives partial credit where the answer is part of a longer number."""
    texts = [completion[0]["content"] for completion in completions]
    return [score_answer(final_number(text), {"answer": a}) for text, a in zip(texts, answer, strict=True)]


def exact_match(completions: list, answer: list[str], **columns) -> list[float]:
    """1 where the answer is right, else 0. Only logged: its weight in the reward is 0."""
    return [float(score == 1.0) for score in task_score(completions, answer)]


@torch.no_grad()
def evaluate(model, tokenizer, problems: list[dict], args: argparse.Namespace) -> dict:
    """Sample answers to `problems` as in training and return the accuracy, with a 95% interval over problems."""
    was_training = model.training
    model.eval()
    right, lengths = [], []
    with torch.random.fork_rng():  # leaves the random numbers of training as they were
        torch.manual_seed(args.seed)
        for start in range(0, len(problems), 16):
            batch = problems[start : start + 16]
            inputs = tokenizer.apply_chat_template(
                [make_prompt(entry) for entry in batch],
                add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True,
            ).to(model.device)  # fmt: skip
            output = model.generate(
                **inputs, do_sample=True, temperature=args.temperature, top_k=0, top_p=1.0,
                max_new_tokens=args.max_completion_length, num_return_sequences=args.samples,
            )[:, inputs["input_ids"].shape[1] :]  # fmt: skip
            texts = tokenizer.batch_decode(output, skip_special_tokens=True)
            answers = [entry["answer"] for entry in batch for _ in range(args.samples)]
            hits = exact_match([[{"content": text}] for text in texts], answers)
            right += torch.tensor(hits).view(len(batch), -1).mean(1).tolist()
            ended = output == tokenizer.eos_token_id
            lengths += ((~ended).long().cumprod(1).sum(1) + ended.any(1)).tolist()
    model.train(was_training)
    accuracy, interval = mean_with_interval(right)
    return {
        "accuracy": accuracy, "interval": interval, "problems": len(problems), "n": len(lengths),
        "length": statistics.mean(lengths), "per_problem": right, "example": texts[0],
    }  # fmt: skip


def mean_with_interval(values: list[float]) -> tuple[float, list[float]]:
    """Return the mean and its 95% interval (normal approximation)."""
    mean = statistics.mean(values)
    half = 1.96 * statistics.stdev(values) / len(values) ** 0.5
    return mean, [mean - half, mean + half]


class Monitor(TrainerCallback):
    """A progress bar, and the held-out accuracy every few steps."""

    def __init__(self, measure, every: int):
        self.measure, self.every = measure, every
        self.heldout: list[dict] = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.bar = tqdm(total=state.max_steps, unit="step")
        self._measure(state, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.bar.update()
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self._measure(state, model)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in logs:
            self.bar.set_postfix(
                reward=f"{logs['reward']:.2f}", kl=f"{logs['kl']:.3f}", length=f"{logs['completions/mean_length']:.0f}"
            )

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()

    def _measure(self, state, model):
        found = {"step": state.global_step, **self.measure(model)}
        self.heldout.append(found)
        low, high = found["interval"]
        self.bar.write(
            f"step {found['step']}: held-out accuracy {found['accuracy']:.3f} [{low:.3f}, {high:.3f}] "
            f"(n={found['n']}), mean length {found['length']:.1f}, e.g. {found['example']!r}"
        )


def plot(heldout: list[dict], history: list[dict], path: Path) -> None:
    """Draw held-out accuracy and the training curves; steps with a running mean of ten."""
    figure, axes = plt.subplots(2, 3, figsize=(12, 6), layout="constrained")
    steps = [h["step"] for h in heldout]
    accuracy = [h["accuracy"] for h in heldout]
    half = [h["interval"][1] - h["accuracy"] for h in heldout]
    axes[0, 0].errorbar(steps, accuracy, yerr=half, marker="o", capsize=3)
    axes[0, 0].set(title=f"Held-out accuracy (n={heldout[0]['n']}, 95% interval)", ylim=(0, 1))
    panels = {
        "reward": "Reward",
        "exact_match": "Exact match in training samples",
        "kl": "KL to the adapter-off reference, per token",
        "length": "Completion length, tokens",
        "step_time": "Step time, s",
    }
    for axis, (name, title) in zip(axes.flat[1:], panels.items(), strict=True):
        values = [h[name] for h in history]
        means = [statistics.mean(values[max(0, i - 9) : i + 1]) for i in range(len(values))]
        steps = [h["step"] for h in history]
        axis.plot(steps, values, alpha=0.3, color="C0")
        axis.plot(steps, means, color="C0")
        axis.set(title=title)
    for axis in axes[1]:
        axis.set_xlabel("optimiser step")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="Hub id or local folder")
    parser.add_argument("--output", type=Path, default=Path("runs/smollm2"), help="folder for everything written")
    parser.add_argument("--steps", type=int, default=60, help="optimiser steps")
    parser.add_argument("--prompts", type=int, default=2, help="problems per step")
    parser.add_argument("--generations", type=int, default=8, help="completions per problem (G)")
    parser.add_argument("--max-completion-length", type=int, default=24, help="tokens, in training and evaluation")
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampling, in training and evaluation")
    parser.add_argument("--learning-rate", type=float, default=4e-4)
    parser.add_argument("--beta", type=float, default=0.01, help="weight of the KL term")
    parser.add_argument("--alpha", type=float, default=0.002, help="length penalty per token above --target")
    parser.add_argument("--target", type=int, default=8, help="completion tokens that cost nothing")
    parser.add_argument("--heldout", type=int, default=100, help="held-out problems")
    parser.add_argument("--samples", type=int, default=2, help="samples per held-out problem")
    parser.add_argument("--eval-every", type=int, default=30, help="steps between held-out evaluations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads; fewer if other programs use the cores")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict:
    args = parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    heldout, train = make_problems(args.heldout, args.steps * args.prompts, args.seed)
    monitor = Monitor(lambda model: evaluate(model, tokenizer, heldout, args), args.eval_every)

    trainer = GRPOExtTrainer(
        model=args.model,
        reward_funcs=[LengthPenalty(task_score, alpha=args.alpha, target=args.target, gate=1.0), exact_match],
        args=GRPOExtConfig(
            output_dir=str(args.output),
            advantage="rank",
            kl="k3",
            beta=args.beta,
            reward_weights=[1.0, 0.0],
            max_steps=args.steps,
            per_device_train_batch_size=args.prompts * args.generations,
            num_generations=args.generations,
            max_completion_length=args.max_completion_length,
            temperature=args.temperature,
            learning_rate=args.learning_rate,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=5,
            logging_steps=1,
            save_strategy="no",
            model_init_kwargs={"dtype": "float32"},
            bf16=torch.cuda.is_available(),
            gradient_checkpointing=False,
            disable_tqdm=True,
            report_to="none",
            seed=args.seed,
        ),
        train_dataset=Dataset.from_list([{"prompt": make_prompt(e), "answer": e["answer"]} for e in train]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[monitor],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model()

    history = [
        {
            "step": log["step"],
            "reward": log["reward"],
            "exact_match": log["rewards/exact_match/mean"],
            "kl": log["kl"],
            "length": log["completions/mean_length"],
            "step_time": log["step_time"],
        }
        for log in trainer.state.log_history
        if "reward" in log
    ]
    before, after = monitor.heldout[0], monitor.heldout[-1]
    changes = [b - a for a, b in zip(before["per_problem"], after["per_problem"], strict=True)]
    gain, interval = mean_with_interval(changes)
    metrics = {
        "settings": {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()},
        "gain": gain,
        "gain_interval": interval,
        "median_step_time": statistics.median(h["step_time"] for h in history),
        "heldout": monitor.heldout,
        "heldout_questions": [entry["question"] for entry in heldout],
        "history": history,
    }
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "metrics.json").write_text(json.dumps(metrics, indent=1))
    plot(monitor.heldout, history, args.output / "curves.png")
    print(
        f"held-out accuracy {before['accuracy']:.3f} -> {after['accuracy']:.3f}, gain {gain:+.3f} "
        f"[{interval[0]:+.3f}, {interval[1]:+.3f}]; metrics, curves and adapter in {args.output}"
    )
    return metrics


if __name__ == "__main__":
    main()
