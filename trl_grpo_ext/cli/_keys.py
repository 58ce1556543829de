"""Every key that a config file for ``trl-grpo-ext train`` may hold: ours, TRL's, and accelerate's; with their types."""

from __future__ import annotations

import dataclasses
import enum
import types
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from trl import DatasetMixtureConfig, ModelConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments

from trl_grpo_ext.cli._catalogue import IMPORT_PATH, NUMBER, Fragment
from trl_grpo_ext.config import GRPOExtConfig
from trl_grpo_ext.specs import LIST_FIELDS, SETTINGS, SPEC_FIELDS

MINIMUM = {
    "beta": 0,
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "num_generations",
            "generation_batch_size",
            "steps_per_generation",
            "num_iterations",
            "max_completion_length",
        ),
        1,
    ),
}
"""Key -> the least it can be. TRL takes less, and then divides by it or trains the wrong way."""

BEYOND_THEIR_TYPE: dict[str, Fragment] = {
    "lora_target_modules": {"type": "string"},  # all-linear
    "resume_from_checkpoint": {"type": "boolean"},  # from the last one
}
"""Key -> what TRL takes from YAML although the field's type does not say so."""

JSON_TEXT: Fragment = {"type": "string", "pattern": r"^\s*[\[{]"}


@dataclass
class ScriptArguments(GRPOScriptArguments):
    """TRL's script arguments, and where to take strategies from."""

    strategies_from: str | None = field(
        default=None,
        metadata={"help": "Take the strategies saved in this folder or Hub repository, where none is set here."},
    )
    strategies_revision: str | None = field(
        default=None, metadata={"help": "Branch, tag or commit of `strategies_from` on the Hub."}
    )


CLASSES = (ScriptArguments, GRPOExtConfig, ModelConfig, DatasetMixtureConfig)


class Parser(TrlParser):
    """TRL's parser of flags and YAML for `CLASSES`; a wrong flag is a ``ValueError`` in one line, without the usage."""

    def __init__(self, prog: str | None = None) -> None:
        super().__init__(CLASSES, prog=prog, allow_abbrev=False)

    def error(self, message: str) -> Any:
        raise ValueError(message)


@cache
def launch_actions() -> dict[str, Any]:
    """Return the options of ``accelerate launch``: name -> argparse action; and TRL's `accelerate_config`."""
    from accelerate.commands.launch import launch_command_parser

    actions: dict[str, Any] = {"accelerate_config": None}
    for action in launch_command_parser()._actions:
        for option in action.option_strings:
            actions[option.lstrip("-").replace("-", "_")] = action
    return {name: action for name, action in actions.items() if len(name) > 1 and name != "help"}


def fields_by_name() -> dict[str, dataclasses.Field]:
    """Return every field of `CLASSES` by its name, which is the key in YAML."""
    return {f.name: f for cls in CLASSES for f in dataclasses.fields(cls) if f.init}


@cache
def key_schemas() -> dict[str, Fragment]:
    """Return key -> JSON Schema, without accelerate's."""
    schemas: dict[str, Fragment] = {"env": {"type": "object", "description": "Environment variables to set."}}
    for cls in CLASSES:
        hints = get_type_hints(cls)
        for f in dataclasses.fields(cls):
            if f.init:
                schemas[f.name] = _described(_key_schema(f, hints[f.name]), f)
    return schemas


def _key_schema(f: dataclasses.Field, annotation: Any) -> Fragment:
    if f.name in SPEC_FIELDS:
        spec = {"$ref": f"#/$defs/{SPEC_FIELDS[f.name]}"}
        many = [{"type": "array", "items": spec}] if f.name in LIST_FIELDS else []
        return {"oneOf": [spec, *many, JSON_TEXT, {"type": "null"}]}
    special: dict[str, Fragment] = {
        **{name: {"enum": list(words)} for name, words in SETTINGS.items()},
        "scale_rewards": {"enum": ["group", "batch", "none", True, False]},
    }
    if f.name in special:
        return special[f.name]
    if f.metadata.get("choices"):
        values = list(f.metadata["choices"])
        return {"enum": [*values, None] if type(None) in get_args(annotation) else values}
    schema = annotation_schema(annotation)
    if f.name in BEYOND_THEIR_TYPE:
        return {"anyOf": [*schema.get("anyOf", [schema]), BEYOND_THEIR_TYPE[f.name]]}
    return schema


def annotation_schema(annotation: Any) -> Fragment:
    """Return the JSON Schema of what YAML may hold for a type."""
    origin = get_origin(annotation) or annotation
    simple: dict[Any, Fragment] = {
        bool: {"type": "boolean"},
        int: {"type": "integer"},
        float: NUMBER,
        str: {"type": "string"},
        type(None): {"type": "null"},
    }
    if origin in simple:
        return simple[origin]
    if origin is dict:
        return {"type": "object"}
    if origin in (Union, types.UnionType):
        return {"anyOf": [annotation_schema(part) for part in get_args(annotation)]}
    if origin is Literal:
        return {"enum": list(get_args(annotation))}
    if origin is list:
        (item,) = get_args(annotation) or (Any,)
        # TRL's parser reads a number that YAML takes for text, such as 1e-1, but not inside a list.
        return {"type": "array", "items": {"type": "number"} if item is float else annotation_schema(item)}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return {"enum": [member.value for member in annotation]}
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return _dataclass_schema(annotation)
    return {}


def _dataclass_schema(cls: type) -> Fragment:
    hints = get_type_hints(cls)
    fields = dataclasses.fields(cls)
    required = [f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    properties = {f.name: annotation_schema(hints[f.name]) for f in fields}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _described(schema: Fragment, f: dataclasses.Field) -> Fragment:
    text = f.metadata.get("help")
    described = {**schema, "description": " ".join(text.split())} if text else dict(schema)
    if f.name in MINIMUM:
        described["minimum"] = MINIMUM[f.name]
    if isinstance(f.default, (bool, int, float, str)) and not isinstance(f.default, enum.Enum):
        described["default"] = f.default
    return described


def launch_schemas() -> dict[str, Fragment]:
    """Return the keys that go to ``accelerate launch``, loosely typed."""
    return {
        name: {"type": ["string", "number", "boolean"], "description": "Passed to `accelerate launch`."}
        for name in launch_actions()
    }


def config_schema() -> Fragment:
    """Return the JSON Schema of a config file."""
    from trl_grpo_ext.cli._catalogue import definitions

    keys = key_schemas()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Config of trl-grpo-ext train",
        "type": "object",
        "properties": {**launch_schemas(), **keys},
        "additionalProperties": False,
        "$defs": definitions(),
    }


__all__ = ["CLASSES", "IMPORT_PATH", "Parser", "ScriptArguments", "config_schema", "key_schemas", "launch_actions"]
