"""Every problem of a config at once, without loading a model: what ``check`` prints and what ``train`` refuses."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trl_grpo_ext._construction import resolve
from trl_grpo_ext._strategy import read_json, read_number
from trl_grpo_ext._suggest import nearest
from trl_grpo_ext.cli import _rewards
from trl_grpo_ext.cli._fit import misfit
from trl_grpo_ext.cli._keys import CLASSES, key_schemas, launch_actions
from trl_grpo_ext.cli._spec_problems import field_problems
from trl_grpo_ext.config import REPLACED, GRPOExtConfig, check_settings
from trl_grpo_ext.errors import ConfigError
from trl_grpo_ext.specs import LIST_FIELDS, NEEDS_BETA, SETTINGS, SPEC_FIELDS, STRATEGY_FIELDS, build_field, to_spec

# Settings about the machine the run will be on, which need not be the one where the config is checked.
_OF_THE_MACHINE = frozenset({
    "bf16", "fp16", "tf32", "bf16_full_eval", "fp16_full_eval", "use_cpu", "deepspeed", "fsdp", "fsdp_config",
    "parallelism_config", "report_to", "torch_compile", "torch_compile_backend", "torch_compile_mode", "ddp_backend",
    "use_liger_kernel", "output_dir",
})  # fmt: skip

_STAND_IN_BETA = 0.01
"""A beta that is wrong is meant to be one: what needs it is judged as if it were."""

_BATCH = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size",
    "num_generations",
)  # fmt: skip
"""What TRL's rules about divisible batches are about, all at once."""


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
    report.problems += unknown_keys(values)
    schemas = key_schemas()
    known = {key: value for key, value in values.items() if key in schemas}
    good = _right_types(known, report)
    for name in SPEC_FIELDS:
        if good.get(name) is not None:
            found = field_problems(name, good[name])
            report.problems += found
            good[name] = None if found else read_json(good[name])
    if "beta" in known and "beta" not in good:
        good["beta"] = _STAND_IN_BETA
    good = {name: value for name, value in good.items() if value is not None}
    report.problems += _rewards.problems(good)
    report.problems += _of_the_faulty([n for n in SPEC_FIELDS if known.get(n) is not None and n not in good], good)
    args = _combined(good, processes, report)
    if args is not None:
        report.problems += _with_the_model(good, args) + _rewards.source_problems(args.rewards)
        try:
            report.resolved = resolved_strategies(args)
        except ConfigError as error:
            if known.get("kl") == args.kl:  # not if it was left out: that has been told
                report.problems.append(str(error))
    report.problems = list(dict.fromkeys(report.problems))
    return report


def resolved_strategies(args: Any) -> dict[str, Any]:
    """Return the strategies of a config with every field written out, and how the KL term is weighted."""
    strategies = resolve(args, {})
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


def unknown_keys(values: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each key of a config that is neither ours, TRL's nor accelerate's."""
    valid = {**key_schemas(), **launch_actions()}
    return [
        f"unknown key {key!r}{nearest(str(key), valid) or '; `trl-grpo-ext schema` lists the valid ones'}"
        for key in values
        if key not in valid
    ]


def _right_types(values: Mapping[str, Any], report: Report) -> dict[str, Any]:
    schemas, good = key_schemas(), {}
    for key, value in values.items():
        problem = None if key in SPEC_FIELDS else misfit(key, value, schemas[key])
        if problem is None:
            good[key] = value
        else:
            report.problems.append(problem)
    return good


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
        return read_number(value)
    return value


def _built(cls: type, values: dict[str, Any], report: Report, assumed: int | None) -> Any:
    left_out: set[str] = set()
    for _ in range(len(values) + 1):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return cls(**values)
        except (ValueError, TypeError, ImportError, OSError) as error:
            message = " ".join(str(error).split())
        except ArithmeticError as error:
            message = f"the numbers of {cls.__name__} do not go together: {error}"
        counted = "must be divisible by" in message
        if counted and assumed == 1:
            message += " With one process; say `num_processes` if there will be more."
        # What is said of a field that was left out is said of its default, which nobody set.
        if not (counted and assumed is None) and left_out.isdisjoint(re.findall(r"\w+", message)):
            report.problems.append(message)
        at_fault = [name for name in _BATCH if name in values] if counted else _named(message, values)
        if not at_fault:
            return None
        for name in at_fault:
            del values[name]
        left_out.update(at_fault)
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
    reference, uses_peft = build_field("reference", args.reference), bool(good.get("use_peft"))
    if reference is not None and reference.needs_adapter and not uses_peft:
        found.append(f"`reference` {reference.name!r} needs an adapter on the policy; set `use_peft: true`")
    if reference is not None and reference.needs_adapter is False and uses_peft:
        found.append(f"`reference` {reference.name!r} is for full fine-tuning; unset `use_peft` or use 'adapter_off'")
    if not uses_peft and any(hasattr(part, "check_adapter") for part in _rewards.parts(args.rewards)):
        found.append("`rewards` kind 'adapter_reward_model' needs a LoRA policy; set `use_peft: true`")
    return found


def raise_problems(report: Report) -> None:
    """Raise `ConfigError` with every problem, one per line, if there are any."""
    if report.problems:
        raise ConfigError("\n".join(report.problems))
