"""Speed and memory of scoring in packed batches, against TRL's single padded batch, on rows of very different lengths.

    python benchmarks/reward_model_throughput.py --model FOLDER

64 rows whose lengths are drawn log-normally and clipped to 16 to 1024 tokens. `--model` is a reward model, or a base
model, which then gets a random score head (speed does not depend on its values). Each way runs in a process of its own
and scores the same rows; on the CPU, time is that of the CPU, summed over threads, so that a busy machine does not
distort it, and memory is the highest resident set above what was resident before. Prints a markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from trl_grpo_ext.rewards import RewardModel

WORDS = "the of and to in is that for it as was with be by on not he this are or his from at which but have an"
SHORTEST, LONGEST = 16, 1024


def lengths(rows: int, seed: int) -> list[int]:
    """Return the log-normal lengths, median 110."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(rows, generator=generator) * 1.0 + torch.tensor(110.0).log()).exp()
    return drawn.round().clamp(SHORTEST, LONGEST).int().tolist()


def texts(rows: int, seed: int, tokenizer: Any) -> list[str]:
    """Return texts of these lengths, of words that are one token each."""
    generator = torch.Generator().manual_seed(seed)
    words = [word for word in WORDS.split() if len(tokenizer(" " + word, add_special_tokens=False)["input_ids"]) == 1]
    picks = [torch.randint(len(words), (n,), generator=generator).tolist() for n in lengths(rows, seed)]
    return ["".join(" " + words[i] for i in pick) for pick in picks]


def trl_path(reward: RewardModel, completions: list[str]) -> list[float]:
    """Score as `GRPOTrainer._calculate_rewards` does with a model: all rows in one batch padded to the longest."""
    module, tokenizer = reward.module, reward.state.encoder.tokenizer
    inputs = tokenizer(
        text=completions, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
    ).to(module.device)
    with torch.inference_mode():
        return module(**inputs).logits[:, 0].float().tolist()


def peak(device: torch.device, reset: bool = False) -> int:
    """Return the highest memory in use since the last reset, or what is in use now (after a reset)."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status: this benchmark needs Linux")


def measure(arm: str, model: str, rows: int, seed: int, repeats: int, dtype: str) -> dict[str, Any]:
    """Score the rows one way; return seconds, bytes and the scores."""
    reward = RewardModel(model, bits=None, dtype=dtype).load()
    reward.module.config.use_cache = arm == "trl"  # transformers' default, which TRL leaves as it is
    device = reward.module.device
    completions = texts(rows, seed, reward.state.encoder.tokenizer)
    prompts = [""] * rows

    def run() -> list[float]:
        return trl_path(reward, completions) if arm == "trl" else reward(prompts, completions)

    trl_path(reward, completions[:2])  # warm up
    before = peak(device, reset=True)
    clock = time.monotonic if device.type == "cuda" else time.process_time
    start, wall = clock(), time.monotonic()
    for _ in range(repeats):
        scores = run()
    seconds, wall = (clock() - start) / repeats, (time.monotonic() - wall) / repeats
    return {"seconds": seconds, "wall": wall, "bytes": peak(device) - before, "scores": scores, "device": device.type}


def with_head(model: str, folder: Path) -> str:
    """Return the model, or if it is a base model a copy of it with a random score head."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    if any("SequenceClassification" in name for name in AutoConfig.from_pretrained(model).architectures or ()):
        return model
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder or Hub id of a reward model or base model")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--arm", choices=("trl", "ours"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        print(json.dumps(measure(args.arm, args.model, args.rows, args.seed, args.repeats, args.dtype)))
        return
    found = {}
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    with tempfile.TemporaryDirectory() as folder:
        model = with_head(args.model, Path(folder))
        for arm in ("trl", "ours"):
            command = [sys.executable, __file__, "--arm", arm, "--model", model, "--dtype", args.dtype]
            command += ["--rows", str(args.rows), "--seed", str(args.seed), "--repeats", str(args.repeats)]
            output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
            found[arm] = json.loads(output.splitlines()[-1])
            print(f"{arm}: {found[arm]['wall']:.1f} s", file=sys.stderr, flush=True)
    drawn = lengths(args.rows, args.seed)
    padded, real = max(drawn) * len(drawn), sum(drawn)
    unit = "s" if found["ours"]["device"] == "cuda" else "CPU s"
    print(f"{args.rows} rows, {min(drawn)} to {max(drawn)} tokens, {real} in all; padded to the longest: {padded}\n")
    print(f"| way | rows per {unit} | {unit} | activations MB |\n|---|---:|---:|---:|")
    for arm, name in (("trl", "TRL, one padded batch"), ("ours", "`RewardModel`, packed")):
        seconds, size = found[arm]["seconds"], found[arm]["bytes"]
        print(f"| {name} | {args.rows / seconds:.2f} | {seconds:.1f} | {size / 1e6:.0f} |")
    speed = found["trl"]["seconds"] / found["ours"]["seconds"]
    memory = found["ours"]["bytes"] / found["trl"]["bytes"]
    differ = max(abs(a - b) for a, b in zip(found["trl"]["scores"], found["ours"]["scores"], strict=True))
    print(f"\nPadded / real tokens: {padded / real:.2f}. Speed: {speed:.2f} times TRL's, that is ", end="")
    print(f"{speed / (padded / real):.2f} of the ratio. Memory: {memory:.3f} of TRL's. Scores differ by {differ:.1e}.")


if __name__ == "__main__":
    main()
