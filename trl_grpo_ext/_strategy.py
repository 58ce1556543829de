"""What every strategy is: a frozen dataclass with a `kind`, that can be written as a spec and read back.

This module is the bottom layer: it imports no strategy, and finds the kinds of a family by looking at what the
family's package exports. So adding a strategy means writing the class and exporting it; there is no list to keep.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, ClassVar

from trl_grpo_ext._suggest import did_you_mean
from trl_grpo_ext.errors import ConfigError, SpecError

FAMILIES: Mapping[str, str] = {
    "advantage": "trl_grpo_ext.advantages",
    "transform": "trl_grpo_ext.advantages",
    "kl": "trl_grpo_ext.kl",
    "beta": "trl_grpo_ext.kl",
    "reward": "trl_grpo_ext.rewards",
    "shaping": "trl_grpo_ext.rewards",
    "reference": "trl_grpo_ext.reference",
}
"""Family name -> the package whose exported classes of that family are its kinds."""

_imports_refused: ContextVar[bool] = ContextVar("imports_refused", default=False)


class Strategy:
    """Base of all strategies. Subclasses are frozen dataclasses; nested strategies may be given as specs.

    A field that holds strategies says so with ``nested(family, ...)``; its value may then be an object, a spec, or a
    list or mapping of these, and is turned into objects at construction.
    """

    family: ClassVar[str]
    kind: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            family = field.metadata.get("family")
            if family is not None:
                object.__setattr__(self, field.name, _resolve(getattr(self, field.name), family))
        self.validate()

    def validate(self) -> None:
        """Raise `ConfigError` if a field is out of range. Called at construction."""


def nested(family: str, **kwargs: Any) -> Any:
    """Return a dataclass field that holds strategies (or reward functions) of `family`."""
    return dataclasses.field(metadata={"family": family}, **kwargs)


@cache
def kinds(family: str) -> dict[str, type[Strategy]]:
    """Return every kind and alias of `family` with its class, in alphabetical order."""
    if family not in FAMILIES:
        raise SpecError(f"unknown strategy family {family!r}{did_you_mean(family, FAMILIES)}")
    package = importlib.import_module(FAMILIES[family])
    found: dict[str, type[Strategy]] = {}
    for name in package.__all__:
        cls = getattr(package, name)
        if isinstance(cls, type) and issubclass(cls, Strategy) and cls.family == family and "kind" in vars(cls):
            found.update(dict.fromkeys((cls.kind, *cls.aliases), cls))
    return dict(sorted(found.items()))


@contextmanager
def refuse_imports() -> Iterator[None]:
    """While active, a spec with an import path (``"module:Name"``) is an error instead of an import."""
    token = _imports_refused.set(True)
    try:
        yield
    finally:
        _imports_refused.reset(token)


def import_object(path: str) -> Any:
    """Import ``"module:Name"``; refused for specs that come from elsewhere (see `refuse_imports`)."""
    if _imports_refused.get():
        raise SpecError(
            f"the spec names {path!r}, which would import and run code that is not part of this package; "
            "read that code, then pass `trust_remote_code=True` to allow it"
        )
    module_name, _, attribute = path.partition(":")
    try:
        target: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise SpecError(f"cannot import {path!r}: {error}") from error
    return target


def build(spec: Any, family: str) -> Any:
    """Return the object that `spec` describes; an object of the family is returned as it is.

    A spec is a kind (``"rank"``) or a mapping with a `kind` and the fields of its class. In the reward family a spec
    may also name a function (see `trl_grpo_ext.rewards.resolve_function`), and a callable is an object of the family.
    """
    table = kinds(family)
    if isinstance(spec, Strategy):
        if spec.family != family:
            raise SpecError(f"expected a strategy of family {family!r}, got {spec!r} of family {spec.family!r}")
        return spec
    if family == "reward" and callable(spec) and not isinstance(spec, type):
        return spec
    if isinstance(spec, str):
        spec = {"kind": spec}
    if not isinstance(spec, Mapping):
        raise SpecError(
            f"a spec of family {family!r} must be a kind, a mapping with a `kind`, or an object; "
            f"got {spec!r} of type {type(spec).__name__}"
        )
    fields = dict(spec)
    kind = fields.pop("kind", None)
    if not isinstance(kind, str):
        raise SpecError(f"a spec of family {family!r} needs a `kind`{did_you_mean('', table)} Got {dict(spec)!r}.")
    cls = table.get(kind)
    if cls is None:
        resolved = _resolve_unknown_kind(kind, family, has_fields=bool(fields))
        if not isinstance(resolved, type):
            return resolved
        cls = resolved
    return _construct(cls, kind, fields)


def dump(value: Any) -> Any:
    """Return the JSON-able spec of a strategy, with every field; inverse of `build`."""
    if isinstance(value, Strategy):
        cls = type(value)
        fields = {f.name: dump(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}  # type: ignore[arg-type]
        kind = vars(cls).get("kind")
        # A class from outside may name itself too, but only the kinds of this package are found by their name.
        known = kind is not None and kinds(cls.family).get(kind) is cls
        return {"kind": kind if known else import_path(cls), **fields}
    if isinstance(value, Mapping):
        return {key: dump(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [dump(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if callable(value):
        function_spec: Callable[[Any], str] = importlib.import_module(FAMILIES["reward"]).function_spec
        return function_spec(value)
    raise SpecError(f"cannot write {value!r} of type {type(value).__name__} into a spec")


def import_path(value: Any) -> str:
    """Return ``"module:Name"`` of a class or function, or raise `SpecError` if it can't be imported by that path."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None or name is None or "<" in name:
        raise SpecError(
            f"cannot write {value!r} into a spec: only classes and functions at the top of a module have a path"
        )
    return f"{module}:{name}"


def _resolve(value: Any, family: str) -> Any:
    """Build every spec inside `value`; lists become tuples, numbers (such as weights) stay."""
    if value is None or (isinstance(value, (bool, int, float))):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_resolve(item, family) for item in value)
    if isinstance(value, Mapping) and "kind" not in value:
        return {key: _resolve(item, family) for key, item in value.items()}
    return build(value, family)


def _resolve_unknown_kind(kind: str, family: str, *, has_fields: bool) -> Any:
    """Return the class (or, in the reward family, the function) that a kind outside the table names."""
    if family == "reward":
        resolve_function: Callable[[str], Any] = importlib.import_module(FAMILIES[family]).resolve_function
        target = resolve_function(kind)
        if not isinstance(target, type) and has_fields:
            raise SpecError(f"the reward function {kind!r} takes no fields in a spec")
        if not isinstance(target, type):
            return target
    elif ":" in kind:
        target = import_object(kind)
    else:
        raise SpecError(f"unknown {family} kind {kind!r}{did_you_mean(kind, kinds(family))}")
    if not (isinstance(target, type) and issubclass(target, Strategy) and getattr(target, "family", None) == family):
        raise SpecError(f"{kind!r} must be a strategy class of family {family!r}, got {target!r}")
    return target


def _construct(cls: type[Strategy], kind: str, values: dict[str, Any]) -> Strategy:
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            valid = did_you_mean(str(name), fields) if fields else "; it has no fields."
            raise SpecError(f"{cls.family} kind {kind!r} has no field {name!r}{valid}")
    arguments = {
        name: _as_number(value) if "float" in str(fields[name].type) else value for name, value in values.items()
    }
    missing = [
        name
        for name, f in fields.items()
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise SpecError(f"{cls.family} kind {kind!r} needs {', '.join(f'`{name}`' for name in missing)}")
    try:
        return cls(**arguments)
    except SpecError:
        raise
    except ConfigError as error:
        raise type(error)(f"{cls.family} kind {kind!r}: {error}") from error


def _as_number(value: Any) -> Any:
    """Read a number that arrived as text: YAML 1.1 takes ``1e-4`` (no dot) for a string."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
