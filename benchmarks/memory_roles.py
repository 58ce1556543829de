"""What policy, reference and reward model cost in weights: stock, on one backbone, and with a 4-bit reward model.

    python benchmarks/memory_roles.py --model FOLDER

Loads the roles as a run does, in bf16, and counts the bytes of every tensor once, however many modules share it. The
same arithmetic gives the figures for a 7B model (Llama 2's shape, the default of transformers' `LlamaConfig`), which
is not loaded. Prints a markdown table.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
from reward_model_fidelity import weight_bytes

from trl_grpo_ext.rewards import AdapterRewardModel, RewardModel

RANK = 8
"""Of the policy's and the reward adapter, both on the query and value projections."""
DTYPE = torch.bfloat16


def lora(**options: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["q_proj", "v_proj"], **options)


def save_reward(model: str, folder: Path) -> tuple[str, str]:
    """Save a reward model, and a reward adapter, on the base model; untrained, which costs the same."""
    from peft import get_peft_model
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    whole = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=DTYPE)
    whole.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(model).save_pretrained(folder / "model")
    adapter = get_peft_model(whole, lora(task_type="SEQ_CLS", modules_to_save=["score"]))
    adapter.save_pretrained(folder / "adapter")
    return str(folder / "model"), str(folder / "adapter")


def policy(model: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=DTYPE)


def measured(model: str) -> dict[str, int]:
    """Return bytes of weights: one backbone, and each set-up."""
    from peft import get_peft_model
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as name:
        whole, adapter = save_reward(model, Path(name))
        backbone = weight_bytes(policy(model))
        full = RewardModel(whole, bits=None).load().module
        stock = weight_bytes(policy(model), policy(model), full)
        ours = get_peft_model(policy(model), lora(task_type="CAUSAL_LM"))
        shared = AdapterRewardModel(adapter)
        shared.bind(ours, AutoTokenizer.from_pretrained(model))
        shared(["What is two plus two?"], [" Four."])
        one = weight_bytes(ours, shared.load().module)
        small = RewardModel(whole, bits=4).load().module
        return {"backbone": backbone, "stock": stock, "adapter": one, "4-bit": weight_bytes(ours, small)}


def computed(config: Any) -> dict[str, float]:
    """Return the same from the shapes alone, for 16-bit weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}  # tied ones once
    linear = sum(size for name, size in sizes.items() if "_proj" in name)
    embedding, norms = sizes["model.embed_tokens.weight"], sum(n for name, n in sizes.items() if "norm" in name)
    hidden, vocabulary = config.hidden_size, config.vocab_size
    backbone = 2 * sum(sizes.values())
    full = 2 * (linear + embedding + norms + hidden)
    # nf4: half a byte, a byte for the scale of 64 values, 4 bytes for the scale of 256 such scales
    quantized = linear * (0.5 + 1 / 64 + 4 / (64 * 256))
    small = quantized + embedding + 4 * vocabulary + 2 * (norms + hidden)
    shapes = [p.shape for name, p in model.named_parameters() if "q_proj" in name or "v_proj" in name]
    adapter = 4 * RANK * sum(a + b for a, b in shapes)  # PEFT keeps adapters in 32 bits
    return {
        "backbone": backbone,
        "stock": 2 * backbone + full,
        "adapter": backbone + 2 * adapter,
        "4-bit": backbone + adapter + small,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder or Hub id of a Llama-like base model")
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from transformers import AutoConfig, LlamaConfig

    here, formula = measured(args.model), computed(AutoConfig.from_pretrained(args.model))
    large = computed(LlamaConfig())
    rows = {
        "backbone": "the backbone alone",
        "stock": "stock: policy, reference copy, reward model",
        "adapter": "LoRA policy, adapter-off reference, `AdapterRewardModel`",
        "4-bit": "LoRA policy, adapter-off reference, 4-bit `RewardModel`",
    }
    print("| weights of | measured MB | computed MB | x backbone | 7B, computed GB | x backbone |")
    print("|---|---:|---:|---:|---:|---:|")
    for key, name in rows.items():
        share, large_share = here[key] / here["backbone"], large[key] / large["backbone"]
        print(
            f"| {name} | {here[key] / 1e6:.1f} | {formula[key] / 1e6:.1f} | {share:.2f} | {large[key] / 1e9:.1f} | "
            f"{large_share:.2f} |"
        )


if __name__ == "__main__":
    main()
