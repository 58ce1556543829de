"""How far a quantized reward model agrees with the same one in full precision, on groups of real completions.

    python benchmarks/reward_model_fidelity.py --model FOLDER --reward runs/reward

`--reward` is a folder of `reward_training.py`; it is trained first if there is nothing in it. Prints a markdown table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trl_grpo_ext.functional.segments import ScoredSegments
from trl_grpo_ext.rewards import RewardModel

VARIANTS = {
    "full precision (fp32)": {"bits": None},
    "8-bit": {"bits": 8},
    "4-bit nf4 (the default)": {"bits": 4},
    "4-bit nf4, no double quantization": {"bits": 4, "double_quant": False},
    "4-bit fp4": {"bits": 4, "quant_type": "fp4"},
}
COLUMNS = (
    "Spearman", "Kendall", "pairs kept", "gap of changed pairs", "group orderings kept", "best kept", "weights MB",
    "of which linear MB",
)  # fmt: skip


def tensors(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that holds weights, with the scales of quantized ones."""
    yield from module.named_parameters()
    yield from module.named_buffers()
    for name, parameter in module.named_parameters():
        state = getattr(parameter, "quant_state", None)
        for part in (state, getattr(state, "state2", None)):
            for key in ("absmax", "code", "offset"):
                if isinstance(value := getattr(part, key, None), Tensor):
                    yield f"{name}.{key}", value
        for key in ("CB", "SCB"):
            if isinstance(value := getattr(parameter, key, None), Tensor):
                yield f"{name}.{key}", value


def weight_bytes(*modules: torch.nn.Module, only: str = "") -> int:
    """Return the bytes of all weights with `only` in their name, each storage once."""
    seen = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for module in modules
        for name, tensor in tensors(module)
        if only in name
    }
    return sum(seen.values())


def ranks(values: Tensor) -> Tensor:
    """Return average ranks."""
    return ScoredSegments(values, torch.zeros(len(values), dtype=torch.int64)).rank()


def spearman(a: Tensor, b: Tensor) -> float:
    return torch.corrcoef(torch.stack([ranks(a), ranks(b)]))[0, 1].item()


def differences(values: Tensor) -> Tensor:
    """Return the difference of each pair of a group, pairs in the last dimension."""
    first, second = torch.triu_indices(values.shape[-1], values.shape[-1], offset=1)
    return values[..., first] - values[..., second]


def signs(values: Tensor) -> Tensor:
    return differences(values).sign()


def kendall(a: Tensor, b: Tensor) -> float:
    return ((signs(a) * signs(b)).sum() / (signs(a).ne(0) & signs(b).ne(0)).sum()).item()


def agreement(scores: Tensor, full: Tensor) -> list[float]:
    """Return how `(groups, size)` scores agree with those of full precision, as the table's first six columns.

    The gap is how far apart full precision saw the pairs that changed their order, over how far apart it saw all.
    """
    spearmans = [spearman(a, b) for a, b in zip(scores, full, strict=True)]
    kendalls = [kendall(a, b) for a, b in zip(scores, full, strict=True)]
    same = signs(scores) == signs(full)
    gaps = differences(full).abs()
    gap = gaps[~same].mean() / gaps.mean() if not same.all() else torch.tensor(0.0)
    best = scores.argmax(dim=1) == full.argmax(dim=1)
    return [
        sum(spearmans) / len(spearmans),
        sum(kendalls) / len(kendalls),
        same.double().mean().item(),
        gap.item(),
        same.all(dim=1).double().mean().item(),
        best.double().mean().item(),
    ]


def score(reward: RewardModel, groups: list[dict[str, Any]]) -> Tensor:
    """Return `(groups, size)` scores."""
    prompts = [[{"role": "user", "content": g["prompt"]}] for g in groups for _ in g["completions"]]
    completions = [[{"role": "assistant", "content": text}] for g in groups for text in g["completions"]]
    return torch.tensor(reward(prompts, completions), dtype=torch.float64).view(len(groups), -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder or Hub id of the base model")
    parser.add_argument("--reward", type=Path, default=Path("runs/reward"), help="folder of the trained reward model")
    args = parser.parse_args()
    if not (args.reward / "groups.json").exists():
        training = Path(__file__).with_name("reward_training.py")
        subprocess.run([sys.executable, training, "--model", args.model, "--output", args.reward], check=True)
    trained = json.loads((args.reward / "groups.json").read_text())
    groups = trained["groups"]
    # A completion that was sampled twice in a group has no order with itself.
    groups = [g for g in groups if len(set(g["completions"])) == len(g["completions"])]
    size = len(groups[0]["completions"])
    print(f"{len(groups)} groups of {size}; the reward model is right on {trained['accuracy']:.1%} of held-out pairs\n")
    print("| reward model | " + " | ".join(COLUMNS) + " |")
    print("|---" + "|---:" * len(COLUMNS) + "|")
    full = None
    for name, options in VARIANTS.items():
        start = time.monotonic()
        reward = RewardModel(str(args.reward / "model"), **options).load()
        scores = score(reward, groups)
        full = scores if full is None else full
        cells = [f"{value:.3f}" for value in agreement(scores, full)]
        cells += [f"{weight_bytes(reward.module) / 1e6:.1f}", f"{weight_bytes(reward.module, only='_proj') / 1e6:.1f}"]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    spread = full.std(dim=1)
    print(f"\nSpread of the scores within a group (fp32): {spread.mean():.2f} on average, {spread.min():.2f} at least")


if __name__ == "__main__":
    main()
