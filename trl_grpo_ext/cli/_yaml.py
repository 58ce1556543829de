"""Reading a config file: a YAML mapping without keys that stand in it twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from trl_grpo_ext.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which would take the last of two equal keys, made to refuse them."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (list, dict)):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not a word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises `ConfigError` that names the file, and the line if there is one."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error
    try:
        content = yaml.load(text, Loader=_Loader)  # derived from the safe one
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{path}{place} is not valid YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a YAML mapping, got {type(content).__name__}")
    return content
