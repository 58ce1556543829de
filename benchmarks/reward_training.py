"""A real reward model without downloads: TRL's `RewardTrainer` on generated preference pairs, over a given base model.

    python benchmarks/reward_training.py --model FOLDER --output runs/reward

Saves a LoRA reward adapter (`adapter/`), the same merged into a model of its own (`model/`), and groups of completions
sampled from the base model for prompts that the reward model has not seen (`groups.json`). The other reward benchmarks
start from that folder.

Preferences: answers to simple requests, written from templates, with words dropped, doubled, replaced or moved, or with
the answer to another request. Of two, the less damaged one is chosen. So the reward model learns to grade how coherent
and how much to the point an answer is, which the base model's samples differ in.
"""

from __future__ import annotations

import argparse
import json
import random
import warnings
from pathlib import Path

import torch
from datasets import Dataset

_LISTS = {
    "animals": "dog cat horse otter sparrow whale goat tiger rabbit eagle salmon wolf",
    "fruits": "apple pear mango cherry banana plum lemon grape peach melon fig kiwi",
    "tools": "hammer saw drill wrench chisel ladder shovel rake pliers file axe clamp",
    "cities": "Paris Cairo Lima Oslo Tokyo Rome Delhi Berlin Quito Dublin Madrid Seoul",
    "colours": "red green blue purple orange yellow white black brown silver pink grey",
}
WORDS = {kind: line.split() for kind, line in _LISTS.items()}
OPPOSITES = {"hot": "cold", "big": "small", "fast": "slow", "early": "late", "happy": "sad", "light": "dark"}
HELD_OUT = (
    "Name three {}.",
    "Tell me something about a {}.",
    "Write a sentence with the word {}.",
    "Why do people like {}?",
)
"""Requests that the trained groups are sampled for; none of them is in the training templates."""


def request(generator: random.Random) -> tuple[str, str]:
    """Return a request and a good answer."""
    kind, words = generator.choice(list(WORDS.items()))
    a, b, c = generator.sample(words, 3)
    opposite = generator.choice(list(OPPOSITES.items()))
    x, y = generator.randint(2, 40), generator.randint(2, 40)
    return generator.choice(
        [
            (f"List some {kind}.", f"Three {kind} are {a}, {b} and {c}. There are many more."),
            (f"Is {a} one of the {kind}?", f"Yes, {a} is one of the {kind}, and so are {b} and {c}."),
            (f"Use {a} and {b} in a sentence.", f"I thought of {a} first, but then I remembered {b} as well."),
            (f"What is the opposite of {opposite[0]}?", f"The opposite of {opposite[0]} is {opposite[1]}."),
            (f"What is {x} plus {y}?", f"{x} plus {y} is {x + y}. You add the two numbers."),
        ]
    )


def damaged(answer: str, share: float, generator: random.Random) -> str:
    """Return the answer with about `share` of its words dropped, doubled, replaced or moved."""
    other = [word for words in WORDS.values() for word in words]
    words: list[str] = []
    for word in answer.split():
        change = generator.choice(("drop", "double", "replace", "move")) if generator.random() < share else "keep"
        if change == "replace":
            words.append(generator.choice(other))
        elif change == "move":
            words.insert(generator.randint(0, len(words)), word)
        elif change != "drop":
            words += [word] * (1 if change == "keep" else generator.randint(2, 4))
    return " ".join(words) or generator.choice(other)


def pairs(n: int, seed: int) -> Dataset:
    """Return `n` conversational preference pairs."""
    generator = random.Random(seed)
    rows = []
    for _ in range(n):
        prompt, answer = request(generator)
        low = generator.choice((0.0, 0.0, 0.2, 0.4))
        off_topic = generator.random() < 0.3
        rejected = request(generator)[1] if off_topic else answer
        rejected = damaged(rejected, low if off_topic else low + generator.uniform(0.25, 0.6), generator)
        chosen = damaged(answer, low, generator)
        if chosen != rejected:
            rows.append([prompt, chosen, rejected])
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": prompt}],
                "chosen": [{"role": "assistant", "content": chosen}],
                "rejected": [{"role": "assistant", "content": rejected}],
            }
            for prompt, chosen, rejected in rows
        ]
    )


def train(model: str, output: Path, steps: int, rows: int) -> float:
    """Train the adapter; save it and its merged model; return the accuracy on held-out pairs."""
    from peft import LoraConfig
    from transformers import AutoConfig
    from trl import RewardConfig, RewardTrainer

    layers = AutoConfig.from_pretrained(model).num_hidden_layers
    warnings.simplefilter("ignore")
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(
            output_dir=str(output / "trainer"),
            max_steps=steps,
            per_device_train_batch_size=rows,
            per_device_eval_batch_size=rows,
            learning_rate=5e-4,
            lr_scheduler_type="cosine",
            warmup_steps=5,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            bf16=torch.cuda.is_available(),
            gradient_checkpointing=False,
            disable_tqdm=True,
            seed=0,
        ),
        train_dataset=pairs(steps * rows, seed=1),
        eval_dataset=pairs(48, seed=2),
        peft_config=LoraConfig(
            task_type="SEQ_CLS",
            r=16,
            lora_alpha=32,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            layers_to_transform=list(range(layers // 2, layers)),  # the lower half costs time and teaches little
            modules_to_save=["score"],
        ),
    )
    trainer.train()
    accuracy = trainer.evaluate()["eval_accuracy"]
    trainer.save_model(str(output / "adapter"))
    merged = trainer.model.merge_and_unload()
    merged.save_pretrained(output / "model")
    trainer.processing_class.save_pretrained(output / "model")
    return accuracy


@torch.no_grad()
def sample_groups(model: str, groups: int, size: int, tokens: int) -> list[dict]:
    """Return groups of completions that the base model samples at temperature 1."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    generator = random.Random(3)
    torch.manual_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(model).eval()
    policy.to("cuda" if torch.cuda.is_available() else "cpu")
    prompts = []
    for i in range(groups):
        template = HELD_OUT[i % len(HELD_OUT)]
        kind, words = generator.choice(list(WORDS.items()))
        prompts.append(template.format(kind if "three" in template or "Why" in template else generator.choice(words)))
    found = []
    for start in range(0, groups, 4):
        asked = prompts[start : start + 4]
        texts = [
            tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
            for p in asked
        ]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(policy.device)
        ids = policy.generate(
            **inputs, max_new_tokens=tokens, do_sample=True, temperature=1.0, num_return_sequences=size
        )
        answers = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        found += [
            {"prompt": prompt, "completions": answers[i * size : (i + 1) * size]} for i, prompt in enumerate(asked)
        ]
        print(f"sampled {len(found)} of {groups} groups", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder or Hub id of the base model")
    parser.add_argument("--output", type=Path, default=Path("runs/reward"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rows", type=int, default=6, help="pairs per step")
    parser.add_argument("--groups", type=int, default=24, help="groups of sampled completions")
    parser.add_argument("--size", type=int, default=8, help="completions per group")
    parser.add_argument("--tokens", type=int, default=32, help="longest completion")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    accuracy = train(args.model, args.output, args.steps, args.rows)
    groups = sample_groups(args.model, args.groups, args.size, args.tokens)
    content = {"accuracy": accuracy, "groups": groups}
    (args.output / "groups.json").write_text(json.dumps(content, indent=1))
    print(f"held-out pairs right: {accuracy:.3f}; saved to {args.output}")


if __name__ == "__main__":
    main()
