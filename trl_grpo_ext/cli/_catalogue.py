"""Every kind of every family, described as data: for the listing, the JSON Schema and the check."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

from trl_grpo_ext._strategy import FAMILIES, Strategy, dump, kinds
from trl_grpo_ext.errors import GRPOExtError

NUMBER_TEXT = r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"
"""What YAML 1.1 takes for text and we for a number: ``1e-4``."""

Fragment = dict[str, Any]
"""A piece of JSON Schema."""

NUMBER: Fragment = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": NUMBER_TEXT}]}
IMPORT_PATH: Fragment = {"type": "string", "pattern": r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"}


def classes(family: str) -> list[type[Strategy]]:
    """Return the strategy classes of `family`, in the order of their kinds."""
    return sorted(set(kinds(family).values()), key=lambda cls: cls.kind)


def fields_of(cls: type[Strategy]) -> dict[str, dataclasses.Field]:
    """Return the fields that a spec of `cls` may hold."""
    return {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]


def summary(cls: type) -> str:
    """Return the docstring's first sentence's line, without RST's double backticks."""
    text = inspect.getdoc(cls) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("``", "`")


def is_required(field: dataclasses.Field) -> bool:
    """Whether a spec must give this field."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def default_of(field: dataclasses.Field) -> Any:
    """Return the field's default as it would stand in a spec; not for a required one."""
    value = field.default_factory() if callable(field.default_factory) else field.default
    return dump(value)


def type_name(field: dataclasses.Field) -> str:
    """Return the field's type as a reader of a spec understands it."""
    family = field.metadata.get("family")
    text = str(field.type)
    if family is None:
        return "module:function" if text.startswith("Callable") else text
    if "tuple[float" in text:
        return f"list of [weight, {family}]"
    if text.startswith("Sequence"):
        return f"list of {family}"
    if text.startswith("Mapping"):
        return f"mapping of name to {family}"
    return f"{family}"


def describe(cls: type[Strategy]) -> dict[str, Any]:
    """Return kind, aliases, one line and fields of a strategy class, JSON-able."""
    fields = []
    for name, field in fields_of(cls).items():
        entry = {"name": name, "type": type_name(field), "required": is_required(field)}
        fields.append(entry if is_required(field) else {**entry, "default": default_of(field)})
    return {
        "kind": cls.kind,
        "aliases": list(cls.aliases),
        "class": cls.__name__,
        "summary": summary(cls),
        "fields": fields,
    }


def choices(cls: type[Strategy], name: str) -> list[Any] | None:
    """Return the values that the class itself says a field must be one of; None if it names none.

    The class is the only place that knows them, so it is asked: with a value that can't be right.
    """
    impossible: Any = -987654321 if str(fields_of(cls)[name].type).startswith("int") else "?"
    bare = object.__new__(cls)
    for other, field in fields_of(cls).items():
        object.__setattr__(bare, other, "name" if is_required(field) else _raw_default(field))
    object.__setattr__(bare, name, impossible)
    try:
        cls.validate(bare)
    except GRPOExtError as error:
        listed = re.search(rf"`{name}` must be one of (.*), got", str(error))
        return [_word(text) for text in listed.group(1).split(", ")] if listed else None
    except (TypeError, AttributeError, ValueError):  # a check that can't be asked: a required field was in its way
        return None
    return None


def _raw_default(field: dataclasses.Field) -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default


def _word(text: str) -> Any:
    text = text.strip("'\"`")
    if text == "None":
        return None
    return int(text) if text.lstrip("-").isdigit() else text


# JSON Schema


def field_schema(cls: type[Strategy], name: str) -> Fragment:
    """Return the JSON Schema of one field of a spec."""
    field = fields_of(cls)[name]
    known = choices(cls, name) if field.metadata.get("family") is None else None
    schema = {"enum": known} if known else _value_schema(field)
    return schema if is_required(field) else {**schema, "default": default_of(field)}


def _value_schema(field: dataclasses.Field) -> Fragment:
    text, family = str(field.type), field.metadata.get("family")
    if family is not None:
        return _nested_schema(text, {"$ref": f"#/$defs/{family}"})
    parts = [_scalar_schema(part.strip()) for part in re.split(r"\s*\|\s*(?![^\[]*\])", text)]
    return parts[0] if len(parts) == 1 else {"anyOf": parts}


def _nested_schema(text: str, spec: Fragment) -> Fragment:
    if "tuple[float" in text:
        # Draft 7 and 2020-12 disagree on how to write a tuple; every reader knows these three.
        pair = {"type": "array", "minItems": 2, "maxItems": 2, "items": {"anyOf": [{"type": "number"}, spec]}}
        return {"type": "array", "minItems": 1, "items": pair}
    if text.startswith("Sequence"):
        return {"type": "array", "items": spec}
    if text.startswith("Mapping"):
        return {"type": ["object", "null"], "additionalProperties": spec}
    return spec if "None" not in text else {"anyOf": [spec, {"type": "null"}]}


def _scalar_schema(text: str) -> Fragment:
    if text.startswith("Callable"):
        return IMPORT_PATH
    if text.startswith(("Sequence", "list", "tuple")):
        return {"type": "array", "items": NUMBER if "float" in text else {}}
    simple: dict[str, Fragment] = {
        "float": NUMBER,
        "int": {"type": "integer"},
        "bool": {"type": "boolean"},
        "str": {"type": "string"},
        "None": {"type": "null"},
    }
    return simple.get(text, {})


def spec_schema(family: str) -> Fragment:
    """Return the JSON Schema of a spec of `family`: a kind, an import path, or an object of one of the kinds."""
    words = [
        kind for kind, cls in kinds(family).items() if not any(is_required(field) for field in fields_of(cls).values())
    ]
    if family == "reward":
        from trl_grpo_ext.rewards import TRL_FUNCTIONS

        words = [*words, *TRL_FUNCTIONS]
    foreign = {"type": "object", "properties": {"kind": IMPORT_PATH}, "required": ["kind"]}
    options = [*([{"enum": words}] if words else []), IMPORT_PATH, *map(_object_schema, classes(family)), foreign]
    return {"oneOf": options, "description": f"A spec of family {family}."}


def _object_schema(cls: type[Strategy]) -> Fragment:
    names = [cls.kind, *cls.aliases]
    properties: dict[str, Fragment] = {"kind": {"const": cls.kind} if len(names) == 1 else {"enum": names}}
    properties |= {name: field_schema(cls, name) for name in fields_of(cls)}
    return {
        "type": "object",
        "title": cls.kind,
        "description": summary(cls),
        "properties": properties,
        "required": ["kind", *(name for name, field in fields_of(cls).items() if is_required(field))],
        "additionalProperties": False,
    }


def definitions() -> dict[str, Fragment]:
    """Return the JSON Schema of every family, by name."""
    return {family: spec_schema(family) for family in FAMILIES}
