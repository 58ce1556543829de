"""What is saved beside the weights: `grpo_strategies.json` and the model card's section."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

STRATEGIES_FILE = "grpo_strategies.json"
STATE_FILE = "grpo_strategy_state.json"

DEPENDENCIES = ("trl-grpo-ext", "trl", "transformers", "peft", "torch")
CARD_HEADING = "## Training strategies"


def versions() -> dict[str, str]:
    """Return the installed versions that a run depends on."""
    found = {name: _version(name) for name in DEPENDENCIES}
    return {name: number for name, number in found.items() if number is not None}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def write_strategies(folder: str | Path, specs: Mapping[str, Any]) -> None:
    """Write `grpo_strategies.json` into `folder`: config field -> spec, and `_meta` with versions."""
    content = {**specs, "_meta": {"versions": versions()}}
    write_json(Path(folder) / STRATEGIES_FILE, content)


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that a reader, or a crash half-way, never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def card_section(specs: Mapping[str, Any]) -> str:
    """Return the model card's "Training strategies" section: the resolved strategies as YAML, and versions."""
    listed = ", ".join(f"{name} {number}" for name, number in versions().items())
    return (
        f"{CARD_HEADING}\n\nTrained with [trl-grpo-ext](https://pypi.org/project/trl-grpo-ext/) "
        f"({listed}).\n\n```yaml\n{yaml.safe_dump(dict(specs), sort_keys=False).strip()}\n```\n"
    )


def add_card_section(path: Path, specs: Mapping[str, Any]) -> None:
    """Put the section into the card at `path`, before its "Framework versions" if it has them. Nothing if no card."""
    if not path.exists():
        return
    card = path.read_text(encoding="utf-8")
    if CARD_HEADING in card:
        return
    before, marker, after = card.partition("### Framework versions")
    path.write_text(f"{before.rstrip()}\n\n{card_section(specs)}\n{marker}{after}", encoding="utf-8")
