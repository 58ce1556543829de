"""A real reward model without downloads: TRL's `RewardTrainer` on generated preference pairs, over a given base model.

    python benchmarks/reward_training.py --model FOLDER --output runs/reward

Saves a LoRA reward adapter (`adapter/`), the same merged into a model of its own (`model/`), and groups of completions
that the base model sampled for requests the reward model was not trained on (`groups.json`). The other reward
benchmarks start from that folder.

Preferences: the base model answers requests for things of a kind ("List some animals."), at temperature 1. Of two
answers to one request, that one is chosen which names more things of that kind in fewer words. A list of words decides,
so the preferences need no judge; the reward model sees only which answer was chosen.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from datasets import Dataset

_LISTS = {
    "animals": "dog cat horse otter sparrow whale goat tiger rabbit eagle salmon wolf lion elephant bear cow dolphin",
    "fruits": "apple pear mango cherry banana plum lemon grape peach melon fig kiwi orange strawberry pineapple lime",
    "tools": "hammer saw drill wrench chisel ladder shovel rake pliers file axe clamp screwdriver knife level tape",
    "cities": "Paris Cairo Lima Oslo Tokyo Rome Delhi Berlin Quito Dublin Madrid Seoul London Sydney Chicago Boston",
    "colours": "red green blue purple orange yellow white black brown silver pink grey gold turquoise violet gray",
    "vegetables": "carrot onion potato tomato spinach cabbage pea bean broccoli pepper cucumber lettuce garlic celery",
    "sports": "football tennis basketball hockey swimming golf rugby cricket boxing running baseball soccer volleyball",
    "drinks": "water tea coffee juice milk wine beer lemonade soda cocoa smoothie cola cider whiskey",
    "instruments": "piano guitar violin drum flute trumpet cello harp saxophone clarinet organ bass banjo tuba",
    "countries": "France Egypt Peru Norway Japan Italy India Germany China Ireland Spain Korea Brazil Canada Mexico",
}
THINGS = {kind: [word.lower() for word in line.split()] for kind, line in _LISTS.items()}
REQUESTS = (
    "List some {}.",
    "Give me examples of {}.",
    "I need the names of {} for a quiz.",
    "What {} are there?",
    "Which {} do you know?",
    "Tell me your favourite {}.",
)
HELD_OUT = ("Name three {}.", "Can you think of any {}?", "Write one sentence about {}.", "Which {} are well known?")
"""Requests whose answers are scored in the benchmarks; the reward model is not trained on any of them."""

WORDS_PER_THING = 12
"""As many words cost as much as one more thing is worth."""

CLEAR = 0.5
"""Two answers nearer to each other than this make no pair."""


class Group(NamedTuple):
    """A request, and answers that the base model sampled for it."""

    kind: str
    prompt: str
    completions: list[str]

    def worth(self) -> list[float]:
        """Return what each answer is worth: things named, less its length."""
        found = [set(re.findall(r"[a-z]+", text.lower())) for text in self.completions]
        named = [sum(t in words or f"{t}s" in words for t in THINGS[self.kind]) for words in found]
        return [n - len(t.split()) / WORDS_PER_THING for n, t in zip(named, self.completions, strict=True)]


def requests(templates: Sequence[str], count: int, generator: random.Random) -> list[tuple[str, str]]:
    """Return `count` different pairs of a kind and a request, in random order."""
    every = [(kind, template.format(kind)) for kind in THINGS for template in templates]
    return generator.sample(every, min(count, len(every)))


def pairs(groups: Sequence[Group], per_group: int, generator: random.Random) -> Dataset:
    """Return conversational preference pairs, at most so many of a group."""
    rows = []
    for group in groups:
        ranked = sorted(zip(group.worth(), group.completions, strict=True))
        clear = [(low[1], high[1]) for low, high in itertools.combinations(ranked, 2) if high[0] - low[0] >= CLEAR]
        rows += [(group.prompt, *pair) for pair in generator.sample(clear, min(per_group, len(clear)))]
    generator.shuffle(rows)
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": prompt}],
                "chosen": [{"role": "assistant", "content": chosen}],
                "rejected": [{"role": "assistant", "content": rejected}],
            }
            for prompt, rejected, chosen in rows
        ]
    )


def train(model: str, output: Path, train_pairs: Dataset, eval_pairs: Dataset, epochs: float, rows: int) -> float:
    """Train the adapter; save it and its merged model; return the accuracy on the held-out pairs."""
    from peft import LoraConfig
    from transformers import AutoConfig
    from trl import RewardConfig, RewardTrainer

    layers = AutoConfig.from_pretrained(model).num_hidden_layers
    warnings.simplefilter("ignore")
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(
            output_dir=str(output / "trainer"),
            num_train_epochs=epochs,
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
        train_dataset=train_pairs,
        eval_dataset=eval_pairs,
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
def sample_groups(model: str, asked: Sequence[tuple[str, str]], size: int, tokens: int, label: str) -> list[Group]:
    """Return groups of completions that the base model samples at temperature 1."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(model).eval()
    policy.to("cuda" if torch.cuda.is_available() else "cpu")
    found: list[Group] = []
    for start in range(0, len(asked), 4):
        some = asked[start : start + 4]
        texts = [
            tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
            for _, p in some
        ]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(policy.device)
        ids = policy.generate(
            **inputs, max_new_tokens=tokens, do_sample=True, temperature=1.0, num_return_sequences=size
        )
        answers = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        found += [Group(*request, answers[i * size : (i + 1) * size]) for i, request in enumerate(some)]
        print(f"{label}: sampled {len(found)} of {len(asked)} groups", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder or Hub id of the base model")
    parser.add_argument("--output", type=Path, default=Path("runs/reward"))
    parser.add_argument("--requests", type=int, default=60, help="requests to train on")
    parser.add_argument("--pairs", type=int, default=12, help="pairs of answers to each of them, at most")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--rows", type=int, default=6, help="pairs per step")
    parser.add_argument("--groups", type=int, default=32, help="held-out groups of sampled completions")
    parser.add_argument("--size", type=int, default=8, help="completions per group")
    parser.add_argument("--tokens", type=int, default=32, help="longest completion")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    generator = random.Random(3)
    torch.manual_seed(3)
    wanted = requests(REQUESTS, args.requests, generator), requests(HELD_OUT, args.groups, generator)
    training = sample_groups(args.model, wanted[0], args.size, args.tokens, "training")
    held_out = sample_groups(args.model, wanted[1], args.size, args.tokens, "held out")
    train_pairs, eval_pairs = pairs(training, args.pairs, generator), pairs(held_out, 4, generator)
    print(f"{len(train_pairs)} pairs to train on, {len(eval_pairs)} held out", flush=True)
    accuracy = train(args.model, args.output, train_pairs, eval_pairs, args.epochs, args.rows)
    groups = [{"prompt": group.prompt, "completions": group.completions} for group in held_out]
    content = {"accuracy": accuracy, "groups": groups}
    (args.output / "groups.json").write_text(json.dumps(content, indent=1))
    print(f"held-out pairs right: {accuracy:.3f}; saved to {args.output}")


if __name__ == "__main__":
    main()
