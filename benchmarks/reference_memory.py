"""The weights that each reference adds to the policy, in bytes, and what a move of the anchor costs.

    python benchmarks/reference_memory.py            # prints two markdown tables
    python benchmarks/reference_memory.py --hidden 512 --layers 8 --rank 32

The first table is measured on a trainer with a small model: all weights that the trainer holds (policy and second
model, each storage counted once), less those of the same policy alone. The second has the shapes of a 7B model: the
sizes that follow, and the measured CPU time of one move of the anchor (one block's factors, times the blocks).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("ACCELERATE_USE_CPU", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer
from trl_grpo_ext.functional.low_rank import truncated_sum
from trl_grpo_ext.reference import AdapterOff, FrozenAdapter, FullCopy, MovingAnchor, ReferenceStrategy

REFERENCES: list[ReferenceStrategy] = [AdapterOff(), FrozenAdapter(), MovingAnchor(every=100), FullCopy()]
MIB = 2**20

# Qwen2.5-7B: (inputs, outputs) of the linear layers of one block.
HIDDEN_7B, INNER_7B, KV_7B, LAYERS_7B, VOCABULARY_7B = 3584, 18944, 512, 28, 152064
SHAPES_7B = {
    "q_proj": (HIDDEN_7B, HIDDEN_7B), "k_proj": (HIDDEN_7B, KV_7B), "v_proj": (HIDDEN_7B, KV_7B),
    "o_proj": (HIDDEN_7B, HIDDEN_7B), "gate_proj": (HIDDEN_7B, INNER_7B), "up_proj": (HIDDEN_7B, INNER_7B),
    "down_proj": (INNER_7B, HIDDEN_7B),
}  # fmt: skip

torch.set_num_threads(1)


def weight_bytes(*modules: Any) -> int:
    """Return the size of all parameters and buffers, each storage counted once."""
    storages = {}
    for module in modules:
        for tensor in [*module.parameters(), *module.buffers()] if module is not None else ():
            storage = tensor.untyped_storage()
            storages[storage.data_ptr() or id(tensor)] = storage.nbytes()
    return sum(storages.values())


def save_model(folder: Path, hidden: int, layers: int) -> None:
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *"0123456789+="])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")),
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
    config = LlamaConfig(
        vocab_size=4096, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def lora(rank: int) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def measured(folder: Path, reference: ReferenceStrategy, rank: int) -> tuple[int, int, int]:
    """Return the bytes of the policy, of its adapter, and of what the reference adds."""
    full = isinstance(reference, FullCopy)
    policy = AutoModelForCausalLM.from_pretrained(folder)
    base = weight_bytes(policy)
    if not full:
        policy = get_peft_model(policy, lora(rank))
    alone = weight_bytes(policy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        args = GRPOExtConfig(
            str(folder / "out"), beta=0.01, num_generations=4, per_device_train_batch_size=4, report_to="none",
            bf16=False, use_cpu=True,
        )  # fmt: skip
        trainer = GRPOExtTrainer(
            policy,
            lambda completions, **kwargs: [0.0] * len(completions),
            args,
            train_dataset=Dataset.from_dict({"prompt": ["1+1="]}),
            reference=reference,
        )
    return base, alone - base, weight_bytes(trainer.model, trainer.ref_model) - alone


def small_table(hidden: int, layers: int, rank: int) -> str:
    lines = ["| reference | policy | its adapter | extra weights | extra / policy |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name), hidden, layers)
        for reference in REFERENCES:
            base, adapter, extra = measured(Path(name), reference, rank)
            lines.append(
                f"| `{reference.name}` | {base:,} B | {f'{adapter:,} B' if adapter else '-'} | {extra:,} B "
                f"| {extra / (base + adapter):.1%} |"
            )
    return "\n".join(lines)


def time_of_move(rank: int) -> float:
    """Return the CPU seconds of mixing and truncating one block's adapters, times the number of blocks."""
    terms = {
        name: [(0.6, torch.randn(o, rank), torch.randn(rank, i)), (0.4, torch.randn(o, rank), torch.randn(rank, i))]
        for name, (i, o) in SHAPES_7B.items()
    }
    start = time.process_time()
    for pair in terms.values():
        truncated_sum(pair, rank)
    return LAYERS_7B * (time.process_time() - start)


def big_table(rank: int) -> str:
    adapter = 4 * LAYERS_7B * sum(rank * (i + o) for i, o in SHAPES_7B.values())
    config = LlamaConfig(
        vocab_size=VOCABULARY_7B, hidden_size=HIDDEN_7B, intermediate_size=INNER_7B, num_hidden_layers=LAYERS_7B,
        num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False, dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("meta"):
        base = LlamaForCausalLM(config).to(torch.bfloat16)
    model = 2 * sum(p.numel() for p in base.parameters())
    extra = {"adapter_off": 0, "frozen_adapter": adapter, "moving_anchor": adapter, "full_copy": model}
    lines = ["| reference | extra weights | one move (CPU time) |", "|---|---|---|"]
    for name, size in extra.items():
        cost = f"{time_of_move(rank):.1f} s" if name == "moving_anchor" else "-"
        lines.append(f"| `{name}` | {size / MIB:,.0f} MiB | {cost} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    print(f"A Llama of width {options.hidden} with {options.layers} layers in float32, LoRA of rank {options.rank}:\n")
    print(small_table(options.hidden, options.layers, options.rank))
    print(f"\nA 7B model's shapes in bfloat16, LoRA of rank {options.rank} in float32 on all linear layers:\n")
    print(big_table(options.rank))


if __name__ == "__main__":
    main()
