"""Every problem of a config at once, without loading a model: what ``check`` prints and what ``train`` refuses."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trl_grpo_ext._suggest import did_you_mean
from trl_grpo_ext.cli import _rewards
from trl_grpo_ext.cli._fit import misfit
from trl_grpo_ext.cli._keys import CLASSES, JSON_TEXT, key_schemas, launch_actions
from trl_grpo_ext.cli._spec_problems import spec_problems
from trl_grpo_ext.config import REPLACED, GRPOExtConfig, build_field, check_settings
from trl_grpo_ext.errors import ConfigError
from trl_grpo_ext.specs import LIST_FIELDS, SETTINGS, SPEC_FIELDS, STRATEGY_FIELDS, to_spec

# Settings about the machine the run will be on, which need not be the one where the config is checked.
_OF_THE_MACHINE = frozenset({
    "bf16", "fp16", "tf32", "bf16_full_eval", "fp16_full_eval", "use_cpu", "deepspeed", "fsdp", "fsdp_config",
    "parallelism_config", "report_to", "torch_compile", "torch_compile_backend", "torch_compile_mode", "ddp_backend",
    "use_liger_kernel", "output_dir",
})  # fmt: skip

NEEDS_BETA = ("kl", "kl_log", "beta_control", "reference")
_PEFT_ONLY = ("adapter_off", "frozen_adapter", "moving_anchor")


@dataclass
class Report:
    """What a check found: one sentence per problem, and the strategies as they would train."""

    problems: list[str] = field(default_factory=list)
    resolved: dict[str, Any] = field(default_factory=dict)


def check_config(values: Mapping[str, Any], *, processes: int | None = 1) -> Report:
    """Check a whole config, given as the mapping that its YAML holds. Nothing in `values` is changed.

    `processes` is how many will train, for TRL's rules about batch sizes; None leaves those rules to the run itself.
    """
    report = Report()
    known = _known_keys(values, report)
    good = _right_types(known, report)
    for name in SPEC_FIELDS:
        if good.get(name) is not None:
            good[name] = _checked_specs(name, good[name], report)
    good = {name: value for name, value in good.items() if value is not None}
    report.problems += _rewards.problems(good)
    report.problems += _of_the_faulty([n for n in SPEC_FIELDS if known.get(n) is not None and n not in good], good)
    args = _combined(good, processes, report)
    if args is not None:
        report.problems += _with_the_model(good, args)
        report.resolved = resolved_strategies(args)
    report.problems = list(dict.fromkeys(report.problems))
    return report


def resolved_strategies(args: Any) -> dict[str, Any]:
    """Return the strategies of a config with every field written out, and how the KL term is weighted."""
    strategies = {name: build_field(name, getattr(args, name)) for name in SPEC_FIELDS}
    resolved: dict[str, Any] = {}
    for name, strategy in strategies.items():
        if strategy is not None:
            resolved[name] = [to_spec(s) for s in strategy] if name in LIST_FIELDS else to_spec(strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weighting = check_settings(args, strategies)
    if weighting is not None:
        resolved["kl_weighting"] = weighting
    if args.kl_placement != SETTINGS["kl_placement"][0]:
        resolved["kl_placement"] = args.kl_placement
    if args.beta:
        resolved["beta"] = args.beta
    return resolved


def _known_keys(values: Mapping[str, Any], report: Report) -> dict[str, Any]:
    ours, theirs = key_schemas(), launch_actions()
    known = {}
    for key, value in values.items():
        if key in ours:
            known[key] = value
        elif key not in theirs:
            report.problems.append(f"unknown key {key!r}{_short(did_you_mean(str(key), [*ours, *theirs]))}")
    return known


def _short(hint: str) -> str:
    """Return a hint without its list of all valid names, which here are hundreds."""
    return hint.split(" Valid:")[0].rstrip(".") or "; `trl-grpo-ext schema` lists the valid ones"


def _right_types(values: Mapping[str, Any], report: Report) -> dict[str, Any]:
    schemas, good = key_schemas(), {}
    for key, value in values.items():
        problem = None if key in SPEC_FIELDS else misfit(key, value, schemas[key])
        if problem is None:
            good[key] = value
        else:
            report.problems.append(problem)
    return good


def _checked_specs(name: str, value: Any, report: Report) -> Any:
    """Return the value of a strategy field, read if it is JSON text; None if it has problems."""
    if isinstance(value, str) and re.search(JSON_TEXT["pattern"], value):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            report.problems.append(f"`{name}` is not valid JSON ({error}), got {value!r}")
            return None
    if name in LIST_FIELDS and isinstance(value, (list, tuple)):
        found = [p for i, spec in enumerate(value) for p in spec_problems(spec, SPEC_FIELDS[name], f"{name}[{i}]")]
    else:
        found = spec_problems(value, SPEC_FIELDS[name], name)
    report.problems += found
    return None if found else value


def _of_the_faulty(names: list[str], good: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with having these fields at all, whatever their specs should have been."""
    found = []
    for name in names:
        for option, unset in REPLACED.get(name, {}).items():
            if good.get(option, unset) not in (unset, True if unset == "group" else unset):
                found.append(f"`{name}` replaces TRL's `{option}`, which is set to {good[option]!r}; set one of them")
        if name in NEEDS_BETA and good.get("beta", 0) in (0, "0"):
            found.append(f"`{name}` has no effect with `beta=0` (TRL's default); set beta, e.g. `beta=0.01`")
    return found


def _combined(good: Mapping[str, Any], processes: int | None, report: Report) -> Any:
    """Build TRL's dataclasses from the values that are right by themselves; return the training arguments.

    A combination at fault is noted and one of its fields left out, until the rest goes together.
    """
    args = None
    for cls in CLASSES:
        names = {f.name for f in dataclasses.fields(cls) if f.init} - _OF_THE_MACHINE
        values = {k: _converted(cls, k, v) for k, v in good.items() if k in names and v is not None}
        if cls is GRPOExtConfig:
            values.update(bf16=False, use_cpu=True, report_to="none", output_dir=good.get("output_dir") or "out")
            args = _built(cls, _scaled(values, processes), report, assumed=processes)
        else:
            _built(cls, values, report, assumed=processes)
    return args


def _scaled(values: dict[str, Any], processes: int | None) -> dict[str, Any]:
    """Let one process stand for `processes`: TRL's rules are about the product."""
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        values[name] = values.get(name, 8) * (processes or 1)
    return values


def _converted(cls: type, name: str, value: Any) -> Any:
    """Read a number that YAML takes for text, as TRL's parser does."""
    of_float = "float" in str(cls.__dataclass_fields__[name].type)  # type: ignore[attr-defined]
    if name not in SPEC_FIELDS and of_float and isinstance(value, str):
        return float(value)
    return value


def _built(cls: type, values: dict[str, Any], report: Report, assumed: int | None) -> Any:
    for _ in range(len(values) + 1):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return cls(**values)
        except (ValueError, TypeError, ImportError, OSError) as error:
            message = " ".join(str(error).split())
        counted = "must be divisible by" in message
        if counted and assumed == 1:
            message += " With one process; say `num_processes` if there will be more."
        if not (counted and assumed is None):
            report.problems.append(message)
        at_fault = _named(message, values)
        if not at_fault:
            return None
        for name in at_fault:
            del values[name]
    return None


def _named(message: str, values: Mapping[str, Any]) -> list[str]:
    """Return the first of our fields that a message names, else all of TRL's that it names."""
    quoted = [name for name in re.findall(r"`(\w+)", message) if name in values]
    ours = [name for name in quoted if name in STRATEGY_FIELDS]
    if ours:
        return ours[:1]
    words = set(re.findall(r"\w+", message))
    return [name for name in values if name in words]


def _with_the_model(good: Mapping[str, Any], args: Any) -> list[str]:
    """Return problems between the strategies and how the model is loaded."""
    found = []
    reference = args.reference["kind"] if isinstance(args.reference, dict) else args.reference
    uses_peft = bool(good.get("use_peft"))
    if reference in _PEFT_ONLY and not uses_peft:
        found.append(f"`reference` {reference!r} needs an adapter on the policy; set `use_peft: true`")
    if reference == "full_copy" and uses_peft:
        found.append("`reference` 'full_copy' is for full fine-tuning; unset `use_peft` or use 'adapter_off'")
    if not uses_peft and "adapter_reward_model" in _kinds_in(args.rewards):
        found.append("`rewards` kind 'adapter_reward_model' needs a LoRA policy; set `use_peft: true`")
    return found


def _kinds_in(spec: Any) -> set[str]:
    if isinstance(spec, Mapping):
        return {str(spec.get("kind"))}.union(*map(_kinds_in, spec.values()))
    if isinstance(spec, (list, tuple)):
        return set().union(*map(_kinds_in, spec))
    return {spec} if isinstance(spec, str) else set()


def raise_problems(report: Report) -> None:
    """Raise `ConfigError` with every problem, one per line, if there are any."""
    if report.problems:
        raise ConfigError("\n".join(report.problems))
