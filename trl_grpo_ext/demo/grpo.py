"""The demo's GRPO run: LoRA on the tiny model, with the strategies a newcomer should see first."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from trl_grpo_ext.config import GRPOExtConfig
from trl_grpo_ext.demo.task import MAX_ANSWER_LENGTH, Problem
from trl_grpo_ext.trainer import GRPOExtTrainer

TARGET_LENGTH = 3
"""Tokens of an answer without marks: two digits and the end of sequence."""

STRATEGIES: Mapping[str, Any] = {
    "advantage": "rank",
    "kl": "k3",
    "reference": "adapter_off",
    # The gate: without it wrong answers would be taught to be short before they are taught to be right.
    "rewards": {
        "kind": "length_penalty",
        "alpha": 0.05,
        "target": TARGET_LENGTH,
        "gate": 1.0,
        "inner": "trl_grpo_ext.demo.task:correct",
    },
}
"""What is swapped, as one would write it in YAML; the objects themselves would do as well."""

LORA_RANK = 32


def build_trainer(
    base: Path,
    output: Path,
    problems: Sequence[Problem],
    *,
    steps: int,
    seed: int,
    on_log: Callable[[int, Mapping[str, float]], None] | None = None,
) -> GRPOExtTrainer:
    """Return the trainer for the model saved in `base`; it saves its adapter to `output`.

    `on_log(step, logs)` is called after each step with what the trainer logged.
    """
    args = GRPOExtConfig(
        output_dir=str(output),
        **STRATEGIES,
        beta=0.02,
        max_steps=steps,
        learning_rate=1e-3,
        warmup_steps=min(5, steps),
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=MAX_ANSWER_LENGTH,
        temperature=1.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        seed=seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    lora = LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    rows = [{"prompt": problem.prompt, "answer": problem.answer} for problem in problems]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TRL announces changes of defaults that are set here
        trainer = GRPOExtTrainer(
            model=AutoModelForCausalLM.from_pretrained(base),
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(base),
            peft_config=lora,
        )
    trainer.remove_callback(PrinterCallback)
    if on_log is not None:
        trainer.add_callback(_OnLog(on_log))
    return trainer


class _OnLog(TrainerCallback):
    """Passes each step's log on."""

    def __init__(self, on_log: Callable[[int, Mapping[str, float]], None]) -> None:
        self._on_log = on_log

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **kwargs: Any
    ) -> None:
        if logs and "reward" in logs:
            self._on_log(state.global_step, logs)
