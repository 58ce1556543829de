"""Tiny classifiers: a reward model trained with TRL, and one random model of every architecture."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import torch
from datasets import Dataset

from tests.tiny import ALPHABET, PROMPTS

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + '=' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a=' }}{% endif %}"
)
"""A template for the character tokenizer of `tests.tiny`."""

_SIZE = {
    "vocab_size": 3 + len(ALPHABET),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "num_labels": 1,
}
_DECODER = {**_SIZE, "num_key_value_heads": 2, "head_dim": 16, "eos_token_id": 1, "bos_token_id": None}
_ENCODER = {**_SIZE, "max_position_embeddings": 128, "type_vocab_size": 1}
_DEBERTA = {**_ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}

ARCHITECTURES = {
    "LlamaForSequenceClassification": ("LlamaConfig", _DECODER),
    "Qwen2ForSequenceClassification": ("Qwen2Config", _DECODER),
    "Qwen3ForSequenceClassification": ("Qwen3Config", _DECODER),
    "GemmaForSequenceClassification": ("GemmaConfig", _DECODER),
    "MistralForSequenceClassification": ("MistralConfig", _DECODER),
    "BertForSequenceClassification": ("BertConfig", _ENCODER),
    "RobertaForSequenceClassification": ("RobertaConfig", _ENCODER),
    "DebertaForSequenceClassification": ("DebertaConfig", _DEBERTA),
    "DebertaV2ForSequenceClassification": ("DebertaV2Config", _DEBERTA),
}


def random_classifier(folder: Path, tokenizer_dir: str, architecture: str, **changes) -> str:
    """Save a random classifier of an architecture, with the tiny model's tokenizer."""
    import transformers

    config_name, values = ARCHITECTURES[architecture]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**{**values, **changes})
    model = getattr(transformers, architecture)(config)
    with torch.no_grad():  # larger than at initialisation, so that scores differ
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(folder)
    return str(folder)


def pairs(n: int = 256) -> Dataset:
    """Return preference pairs: of two completions, the one with more digits is chosen."""
    generator = random.Random(0)
    rows = []
    while len(rows) < n:
        a, b = ("".join(generator.choices(ALPHABET, k=generator.randint(2, 10))) for _ in range(2))
        digits = [sum(c.isdigit() for c in text) for text in (a, b)]
        if digits[0] != digits[1]:
            chosen, rejected = (a, b) if digits[0] > digits[1] else (b, a)
            rows.append({"prompt": generator.choice(PROMPTS), "chosen": chosen, "rejected": rejected})
    return Dataset.from_list(rows)


def train_reward(base: str, folder: Path, *, peft_config=None, steps: int = 60) -> str:
    """Train a reward model, or with `peft_config` a reward adapter, with TRL's `RewardTrainer`; return its folder."""
    from trl import RewardConfig, RewardTrainer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = RewardConfig(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=16,
            learning_rate=5e-3,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            gradient_checkpointing=False,
            logging_steps=steps,
        )
        trainer = RewardTrainer(model=base, args=args, train_dataset=pairs(), peft_config=peft_config)
        trainer.train()
    trainer.save_model(str(folder))
    return str(folder)


def reward_lora(**changes):
    """Return a LoRA config for a reward adapter, on other layers than the policy's of `tests.tiny`."""
    from peft import LoraConfig

    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj", "down_proj"], "task_type": "SEQ_CLS"}
    return LoraConfig(**{**settings, "modules_to_save": ["score"], **changes})
