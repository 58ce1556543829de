"""Does a value fit a JSON Schema fragment, and if not, what was expected: the few keywords that `_keys` writes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from trl_grpo_ext._suggest import did_you_mean, shortened

Fragment = Mapping[str, Any]

_WORDS = {
    "null": "empty",
    "boolean": "true or false",
    "integer": "an integer",
    "number": "a finite number",
    "string": "text",
    "array": "a list",
    "object": "a mapping",
}


def fits(value: Any, schema: Fragment) -> bool:
    """Whether `value` is what `schema` describes. A number must be finite, and an integer have no decimal point."""
    if "minimum" in schema and _is(value, "number") and value < schema["minimum"]:
        return False
    if "anyOf" in schema:
        return any(fits(value, part) for part in schema["anyOf"])
    if "enum" in schema:
        return any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in schema["enum"])
    types = schema.get("type", [])
    if types and not any(_is(value, name) for name in ([types] if isinstance(types, str) else types)):
        return False
    if isinstance(value, str) and "pattern" in schema:
        return re.search(schema["pattern"], value) is not None
    if isinstance(value, list) and "items" in schema:
        return all(fits(item, schema["items"]) for item in value)
    if isinstance(value, Mapping) and "properties" in schema:
        known = schema["properties"]
        return set(schema.get("required", ())) <= set(value) <= set(known) and all(
            fits(item, known[key]) for key, item in value.items()
        )
    return True


def misfit(key: str, value: Any, schema: Fragment) -> str | None:
    """Return a sentence about a `value` that does not fit, with the nearest choice if there are some."""
    infinite = isinstance(value, float) and math.isinf(value)
    if fits(value, schema) or (infinite and value == schema.get("default")):
        return None
    if "enum" in schema:
        listed = [str(choice) for choice in schema["enum"]]
        return f"`{key}` must be one of its choices, got {shortened(value)}{did_you_mean(str(value), listed)}"
    hint = ""
    if isinstance(value, str) and _wants(schema, "array"):
        hint = f"; write [{value}] for a list of one"
    elif isinstance(value, float) and value.is_integer() and _wants(schema, "integer"):
        hint = f"; write {value:.0f}"
    least = f" (at least {schema['minimum']})" if "minimum" in schema else ""
    return f"`{key}` must be {expected(schema)}{least}, got {shortened(value)}{hint}"


def expected(schema: Fragment) -> str:
    """Return in words what `schema` describes."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(expected(part) for part in schema["anyOf"] if "pattern" not in part))
    if "enum" in schema:
        return "one of " + ", ".join(map(repr, schema["enum"]))
    name = schema.get("type")
    if name == "array" and schema.get("items"):
        return f"a list (each {expected(schema['items'])})"
    return " or ".join(_WORDS[n] for n in ([name] if isinstance(name, str) else name or [])) or "something else"


def _wants(schema: Fragment, name: str) -> bool:
    return schema.get("type") == name or any(_wants(part, name) for part in schema.get("anyOf", ()))


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "number":
        return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    kinds: dict[str, Any] = {
        "null": type(None),
        "boolean": bool,
        "integer": int,
        "string": str,
        "array": list,
        "object": Mapping,
    }
    return isinstance(value, kinds[name])
