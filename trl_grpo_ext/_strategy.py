"""What every strategy is: a frozen dataclass with a `kind`, that can be written as a spec and read back.

This module is the bottom layer: it imports no strategy, and finds the kinds of a family by looking at what the
family's package exports. So adding a strategy means writing the class and exporting it; there is no list to keep.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import islice
from numbers import Real
from typing import Any, ClassVar

from trl_grpo_ext._suggest import did_you_mean, shortened
from trl_grpo_ext._validate import plain
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

MAX_DEPTH, MAX_VALUES = 50, 10_000
"""How deep a spec may nest, and how many values it may hold: far beyond any that is meant, and safe to walk."""

_code_refused: ContextVar[bool] = ContextVar("code_refused", default=False)

_written: dict[int, tuple[Any, str]] = {}
"""``id`` of an imported object -> the object, held so that its id stays its own, and the path it was imported by."""


class Strategy:
    """Base of all strategies. Subclasses are frozen dataclasses; nested strategies may be given as specs.

    A field that holds strategies says so with ``nested(family, ...)``; its value may then be an object, a spec, or a
    list or mapping of these, and is turned into objects at construction. Other fields hold plain numbers and text
    afterwards, whatever passed for such.
    """

    family: ClassVar[str]
    kind: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            family, value = field.metadata.get("family"), getattr(self, field.name)
            if family is not None:
                object.__setattr__(self, field.name, _resolve(value, family))
            elif field.init:
                object.__setattr__(self, field.name, _plain_field(value, whole=is_whole(field)))
        self.validate()

    def validate(self) -> None:
        """Raise `ConfigError` if a field is out of range. Called at construction."""


def nested(family: str, **kwargs: Any) -> Any:
    """Return a dataclass field that holds strategies (or reward functions) of `family`."""
    return dataclasses.field(metadata={"family": family}, **kwargs)


def is_whole(field: dataclasses.Field) -> bool:
    """Whether a field holds integers only, by its annotation."""
    return "int" in _words(field) and "float" not in _words(field)


def as_numbers(value: Any, field: dataclasses.Field) -> Any:
    """Read the numbers for `field` that arrived as text: YAML 1.1 takes ``1e-4`` and ``5e2`` (no dot) for such."""
    if type(value) in (list, tuple):
        return type(value)(as_numbers(item, field) for item in value)
    exponent = is_whole(field) and isinstance(value, str) and "e" in value.lower()
    return read_number(value) if "float" in _words(field) or exponent else value


def read_number(value: Any) -> Any:
    """Return the number that a text is, anything else as it is."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _words(field: dataclasses.Field) -> list[str]:
    """Return the words of a field's annotation, which is text or, without postponed annotations, a type."""
    return re.findall(r"\w+", field.type.__name__ if isinstance(field.type, type) else str(field.type))


def _plain_field(value: Any, *, whole: bool) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_plain_field(item, whole=whole) for item in value)
    return plain(value, whole=whole)


def kinds(family: str) -> dict[str, type[Strategy]]:
    """Return every kind and alias of `family` with its class, in alphabetical order."""
    if not isinstance(family, str) or family not in FAMILIES:
        raise SpecError(f"unknown strategy family {shortened(family)}{did_you_mean(str(family), FAMILIES)}")
    return _kinds(family)


@cache
def _kinds(family: str) -> dict[str, type[Strategy]]:
    package = importlib.import_module(FAMILIES[family])
    found: dict[str, type[Strategy]] = {}
    for name in package.__all__:
        cls = getattr(package, name)
        if isinstance(cls, type) and issubclass(cls, Strategy) and cls.family == family and "kind" in vars(cls):
            found.update(dict.fromkeys((cls.kind, *cls.aliases), cls))
    return dict(sorted(found.items()))


@contextmanager
def refuse_code() -> Iterator[None]:
    """While active, a spec that would run code from elsewhere is an error: an import path, `trust_remote_code`."""
    token = _code_refused.set(True)
    try:
        yield
    finally:
        _code_refused.reset(token)


def import_object(path: str) -> Any:
    """Import ``"module:Name"``; refused for specs that come from elsewhere (see `refuse_code`)."""
    if _code_refused.get():
        raise SpecError(
            f"the spec names {path!r}, which would import and run code that is not part of this package; "
            "read that code, then pass `trust_remote_code=True` to allow it"
        )
    module_name, _, name = path.partition(":")
    target = imported(module_name, name, path)
    _written[id(target)] = (target, path)
    return target


def imported(module_name: str, name: str, path: str) -> Any:
    """Return what a module calls `name`; `path` is how the user wrote it. Raises `SpecError` for whatever it raises."""
    try:
        target: Any = importlib.import_module(module_name)
        for part in name.split("."):
            target = getattr(target, part)
    except (Exception, SystemExit) as error:  # the module is the user's, and may raise anything when it is imported
        reason = " ".join(str(error).split())
        raise SpecError(f"cannot import {path!r}: {type(error).__name__}: {reason}") from error
    return target


def read_json(spec: Any) -> Any:
    """Return what JSON text says: a string that starts with ``{`` or ``[``. Any other spec is returned as it is."""
    if not isinstance(spec, str) or not spec.lstrip().startswith(("{", "[")):
        return spec
    try:
        return json.loads(spec)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"not valid JSON ({error}), got {shortened(spec)}") from error


def check_size(spec: Any) -> None:
    """Raise `SpecError` if lists and mappings nest deeper, or hold more, than can be meant: YAML's can hold themselves.

    A value that stands in several places counts in each.
    """
    level, count = [spec], 0
    for _ in range(MAX_DEPTH):
        level = list(islice((item for value in level for item in _items(value)), MAX_VALUES + 1))
        count += len(level)
        if not level:
            return
        if count > MAX_VALUES:
            break
    raise SpecError(
        f"lists and mappings must nest at most {MAX_DEPTH} deep and hold at most {MAX_VALUES} values in all; "
        "is there one that holds itself?"
    )


def _items(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


def build(spec: Any, family: str) -> Any:
    """Return the object that `spec` describes; an object of the family is returned as it is.

    A spec is a kind (``"rank"``), a mapping with a `kind` and the fields of its class, or one as JSON text. In the
    reward family a spec may also name a function (see `trl_grpo_ext.rewards.resolve_function`), and a callable is an
    object of the family.
    """
    table = kinds(family)
    if isinstance(spec, Strategy):
        if spec.family != family:
            raise SpecError(f"expected a strategy of family {family!r}, got {spec!r} of family {spec.family!r}")
        return spec
    if family == "reward" and callable(spec) and not isinstance(spec, type):
        return spec
    spec = read_json(spec)
    check_size(spec)
    if isinstance(spec, str):
        spec = {"kind": spec}
    if not isinstance(spec, Mapping):
        raise SpecError(
            f"a spec of family {family!r} must be a kind, a mapping with a `kind`, or an object; "
            f"got {shortened(spec)} of type {type(spec).__name__}"
        )
    fields = dict(spec)
    kind = fields.pop("kind", None)
    if not isinstance(kind, str):
        raise SpecError(
            f"a spec of family {family!r} needs a `kind`{did_you_mean('', table)} Got {shortened(dict(spec))}."
        )
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
    value = plain(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if callable(value):
        function_spec: Callable[[Any], str] = importlib.import_module(FAMILIES["reward"]).function_spec
        return function_spec(value)
    raise SpecError(f"cannot write {shortened(value)} of type {type(value).__name__} into a spec")


def import_path(value: Any) -> str:
    """Return ``"module:Name"`` of a class or function, or the path by which `import_object` found something else.

    Raises `SpecError` if it can't be imported.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is not None and name is not None and "<" not in name and not inspect.ismethod(value):
        return f"{module}:{name}"
    if id(value) in _written:
        return _written[id(value)][1]
    raise SpecError(
        f"cannot write {shortened(value)} into a spec: only classes and functions at the top of a module have a path, "
        "and other objects there if they are given by it, as 'module:name'"
    )


def _resolve(value: Any, family: str) -> Any:
    """Build every spec inside `value`; lists become tuples, numbers (such as weights) stay."""
    value = plain(value)
    if value is None or isinstance(value, Real):
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
    arguments = {name: as_numbers(value, fields[name]) for name, value in values.items()}
    if _code_refused.get() and arguments.get("trust_remote_code"):
        raise SpecError(
            f"{cls.family} kind {kind!r} sets `trust_remote_code`, which would run code of a model's repository; read "
            "that code, then pass `trust_remote_code=True` to allow it"
        )
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
