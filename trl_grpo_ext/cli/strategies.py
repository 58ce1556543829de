"""List every strategy: its kind, its fields with their defaults, and what it is in one line."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import Any

WIDTH = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("--family", help="only this family (default: all); a wrong name lists them")
    parser.add_argument("--json", action="store_true", help="print one JSON object: family -> list of kinds")


def run(args: argparse.Namespace) -> int:
    """Print the listing; return 0."""
    listing = listed(args.family)
    if args.json:
        print(json.dumps(listing, indent=2))
        return 0
    for family, entries in listing.items():
        print(family)
        for entry in entries:
            _print_kind(entry)
        print()
    return 0


def listed(family: str | None = None) -> dict[str, list[dict[str, Any]]]:
    """Return every kind of `family` (all families if None), described; raise `SpecError` if there is none such."""
    from trl_grpo_ext.cli._catalogue import classes, describe
    from trl_grpo_ext.specs import FAMILIES

    return {name: [describe(cls) for cls in classes(name)] for name in ([family] if family else FAMILIES)}


def _print_kind(entry: dict[str, Any]) -> None:
    aliases = f" (also {', '.join(entry['aliases'])})" if entry["aliases"] else ""
    print(f"  {entry['kind']}{aliases}")
    print(textwrap.fill(entry["summary"], WIDTH, initial_indent="      ", subsequent_indent="      "))
    for field in entry["fields"]:
        default = "required" if field["required"] else f"= {json.dumps(field['default'])}"
        print(f"      - {field['name']}: {field['type']}  {default}")
