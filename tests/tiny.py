"""A tiny real model, its tokenizer, a task and trainer factories for the tests."""

from __future__ import annotations

import warnings
from pathlib import Path

from datasets import Dataset

ALPHABET = "0123456789+=abcdefghijklmnop "
PROMPTS = ["1+1=", "2+3=", "4+4=", "7+1=", "5+2=", "6+3=", "8+1=", "0+9="]


def save_tiny_model(folder: Path, hidden: int = 32, layers: int = 2) -> Path:
    """Save a random Llama and a character tokenizer to `folder`."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *ALPHABET])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def prompts(n: int = 16) -> Dataset:
    """Return `n` prompts."""
    return Dataset.from_dict({"prompt": [PROMPTS[i % len(PROMPTS)] for i in range(n)]})


def digits(completions, **kwargs):
    """Score: the share of digits in a completion."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def vowels(completions, **kwargs):
    """Score: the number of vowels in a completion."""
    return [float(sum(c in "aeio" for c in text)) for text in completions]


def arguments(config_class, folder, **overrides):
    """Return training arguments for a few fast deterministic steps."""
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 7,
        **overrides,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return config_class(**settings)


def lora():
    """Return a LoRA config for the tiny model."""
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
