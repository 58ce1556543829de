"""A run that goes on from a checkpoint: with the strategies it was trained with, or with a word about what differs."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger

from trl_grpo_ext import hub
from trl_grpo_ext.errors import ConfigError, StateError
from trl_grpo_ext.reference import ReferenceStrategy

logger = get_logger(__name__)

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def read_saved(path: Path) -> dict[str, Any]:
    """Return what a JSON file of a checkpoint holds, nothing if there is none.

    Raises `StateError` that names the file if it can't be read, or holds something else than an object.
    """
    if not path.exists():
        return {}
    try:
        return hub.read_object(path)
    except ConfigError as error:
        raise StateError(f"{error}; resume from another checkpoint") from error


def check_resumed_strategies(
    checkpoint: str, specs: Mapping[str, Any], stateful: Collection[str], reference: ReferenceStrategy | None
) -> None:
    """Compare the strategies of a run (`specs`: field -> spec) with those that the checkpoint was trained with.

    Raises `StateError` if one whose saved state would be misread is of another kind: one of the `stateful` fields, or a
    reference with weights of its own. Warns of whatever else differs; that may be meant.
    """
    saved = read_saved(Path(checkpoint) / hub.STRATEGIES_FILE)
    meta = saved.pop("_meta", {})
    if not saved:  # stock TRL, or none of our files
        return
    for name in stateful:
        if name in saved and _kind(saved[name]) != _kind(specs[name]):
            raise _other_kind(checkpoint, name, _kind(saved[name]), _kind(specs[name]))
    measured = meta.get("reference") if isinstance(meta, dict) else None
    if reference is not None and reference.keeps_adapter and measured not in (None, reference.name):
        raise _other_kind(checkpoint, "reference", measured, reference.name)
    differing = sorted(n for n in {*saved, *specs} if _comparable(saved.get(n)) != _comparable(specs.get(n)))
    if differing:
        told = "; ".join(f"`{n}` was {saved.get(n, 'unset')}, is {specs.get(n, 'unset')}" for n in differing)
        logger.warning("Resuming %s with other strategies than it was trained with: %s", checkpoint, told)


def _other_kind(checkpoint: str, name: str, was: Any, now: Any) -> StateError:
    return StateError(
        f"{checkpoint} was trained with `{name}` {was!r}, whose state is not that of {now!r}; resume with the "
        "strategies it was trained with, or start a new run from its weights"
    )


def _kind(spec: Any) -> Any:
    return spec.get("kind") if isinstance(spec, Mapping) else spec


def _comparable(spec: Any) -> str:
    """Return the spec as text, without the addresses that the text of an unwritable strategy holds."""
    return _ADDRESS.sub("", json.dumps(spec, sort_keys=True, default=str))
