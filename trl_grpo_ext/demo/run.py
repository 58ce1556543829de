"""The demo from start to end: build, warm-start, measure, GRPO, measure again, report."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import set_seed

from trl_grpo_ext._validate import check_number
from trl_grpo_ext.demo.grpo import TARGET_LENGTH, build_trainer
from trl_grpo_ext.demo.model import build_model, build_tokenizer
from trl_grpo_ext.demo.task import Accuracy, measure, split_problems
from trl_grpo_ext.demo.warmstart import warm_start
from trl_grpo_ext.errors import ConfigError
from trl_grpo_ext.report import BatchTap, Row, RunRecord, ends, require_matplotlib, write_report

MEASURE_SEED = 12345
"""Draws the noise of both measurements, whatever the run's seed."""

Progress = Callable[[str, int, int, Mapping[str, float]], None]
"""Called as ``progress(stage, done, total, values)`` while the demo runs."""


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """What may be changed about the demo. Raises `ConfigError` for a value out of range."""

    output: Path = Path("runs/demo")
    steps: int = 200
    """Optimiser steps of GRPO, each on 64 completions."""
    seed: int = 0
    warm_steps: int = 400
    """Batches of supervised training before."""
    wrong: float = 0.5
    """Share of wrong sums in the text the base model learns from."""
    marks: int = 4
    """At most this many marks follow an answer in that text."""
    samples: int = 16
    """Samples for each held-out sum in the two measurements."""
    hidden: int = 128
    layers: int = 4

    def __post_init__(self) -> None:
        for name in ("steps", "warm_steps", "samples", "hidden", "layers"):
            check_number(name, getattr(self, name), at_least=1, integer=True)
        check_number("seed", self.seed, at_least=0, integer=True)


class DemoResult(NamedTuple):
    """What came out, and where it lies."""

    before: Accuracy
    after: Accuracy
    record: RunRecord
    base: Path
    adapter: Path
    report: Path


def run_demo(settings: DemoSettings, progress: Progress | None = None) -> DemoResult:
    """Run the demo and write its model, adapter, strategies and report to ``settings.output``.

    Files of earlier runs of the demo there are replaced, all others are left alone. Raises `ConfigError` if that is
    not a folder one can write to, and `MissingMatplotlibError` before any training if matplotlib is missing.
    """
    require_matplotlib()
    base, adapter = _prepare_folders(settings.output)
    tell = progress or (lambda stage, done, total, values: None)
    with _one_thread():
        return _run(settings, base, adapter, tell)


def _run(settings: DemoSettings, base: Path, adapter: Path, tell: Progress) -> DemoResult:
    started = time.perf_counter()
    rng = random.Random(settings.seed)
    train, held_out = split_problems(rng)
    set_seed(settings.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, hidden=settings.hidden, layers=settings.layers)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    warm_start(
        model,
        tokenizer,
        train,
        steps=settings.warm_steps,
        wrong=settings.wrong,
        marks=settings.marks,
        rng=rng,
        on_step=lambda step, loss: tell("warm-start", step, settings.warm_steps, {"loss": loss}),
    )
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    before = measure(model, tokenizer, held_out, settings.samples, MEASURE_SEED)
    warm_seconds = time.perf_counter() - started
    tell("before", 1, 1, {"accuracy": before.rate})

    trainer = build_trainer(
        base,
        adapter,
        train,
        steps=settings.steps,
        seed=settings.seed,
        on_log=lambda step, logs: tell("grpo", step, settings.steps, {k: logs[k] for k in ("reward", "kl")}),
    )
    tap = BatchTap.attach(trainer)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    after = measure(trainer.model, tokenizer, held_out, settings.samples, MEASURE_SEED)
    tell("after", 1, 1, {"accuracy": after.rate})

    seconds = {"warm-start": warm_seconds, "total": time.perf_counter() - started}
    record = _record(settings, trainer, tap, before, after, seconds, loading_code(base, adapter))
    record.save(settings.output / "run.json")
    report = write_report(record, settings.output)
    tell("report", 1, 1, {})
    return DemoResult(before, after, record, base, adapter, report)


def loading_code(base: Path, adapter: Path) -> str:
    """Return Python code that loads the trained model and lets it do a sum."""
    return f"""\
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({str(base)!r})
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({str(base)!r}), {str(adapter)!r})
inputs = tokenizer("07+12=", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=8)[0], skip_special_tokens=True))"""


def _record(
    settings: DemoSettings,
    trainer: Any,
    tap: BatchTap | None,
    before: Accuracy,
    after: Accuracy,
    seconds: Mapping[str, float],
    usage: str,
) -> RunRecord:
    args = trainer.args
    shown = ("beta", "learning_rate", "max_steps", "per_device_train_batch_size", "num_generations", "temperature")
    return RunRecord(
        title="GRPO on sums, with swapped strategies",
        lead=(
            f"A {settings.layers}-layer character model learnt sums of numbers below 20 from a sloppy text, in which "
            f"{settings.wrong:.0%} of the answers are wrong and most trail off into exclamation marks. GRPO then "
            f"trained a LoRA adapter on the same sums. Accuracy is measured on {after.problems} sums that neither "
            f"training saw, with {after.samples:,} samples at temperature 1, in the same way before and after."
        ),
        log_history=trainer.state.log_history,
        summary=_summary(trainer.state.log_history, before, after, seconds),
        strategies=dict(trainer.strategy_specs),
        settings={name: getattr(args, name) for name in (*shown, "max_completion_length", "seed")},
        batch=tap.batch if tap is not None else None,
        guides={"completions/mean_length": (TARGET_LENGTH, "target of the length penalty")},
        usage=usage,
    )


def _summary(
    log_history: list[dict[str, Any]], before: Accuracy, after: Accuracy, seconds: Mapping[str, float]
) -> list[Row]:
    points = 100 * (after.rate - before.rate)
    rows = [
        Row(
            label="held-out accuracy",
            before=f"{before.rate:.1%}",
            after=f"{after.rate:.1%}",
            change=f"{points:+.1f} points",
        ),
        _numbers("held-out completion length, tokens", before.mean_length, after.mean_length),
    ]
    for label, key in (("training reward", "reward"), ("training KL per token", "kl")):
        first_and_last = ends(log_history, key)
        if first_and_last is not None:
            rows.append(_numbers(f"{label}, first and last steps", *first_and_last))
    grpo = seconds["total"] - seconds["warm-start"]
    rows.append(
        Row(label="seconds: warm-start, GRPO, in all", before=f"{seconds['warm-start']:.0f}", after=f"{grpo:.0f}",
            change=f"{seconds['total']:.0f}")
    )  # fmt: skip
    return rows


def _numbers(label: str, first: float, last: float) -> Row:
    return Row(label=label, before=f"{first:.3f}", after=f"{last:.3f}", change=f"{last - first:+.3f}")


def _prepare_folders(output: Path) -> tuple[Path, Path]:
    base, adapter = output / "base_model", output / "adapter"
    try:
        for folder in (base, adapter, output / "plots"):
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / ".writable"
            probe.touch()
            probe.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write to `--output {output}`: {error.strerror}: {error.filename}") from error
    return base, adapter


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: for so small a model more of them cost more than they give, most of all when busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
