"""Reading a config file: a YAML mapping without keys that stand in it twice."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from trl_grpo_ext._strategy import check_size
from trl_grpo_ext.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which would take the last of two equal keys, made to refuse them; its errors name a line."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except (ValueError, KeyError, AttributeError, TypeError, OverflowError) as error:  # 2020-13-45, !!bool maybe
            text = str(node.value)[:50]
            problem = f"{text!r} can't be read as {node.tag.rpartition(':')[2]}; quote it if it is text"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        seen: dict[Any, Any] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not a word", key_node.start_mark)
            if key in seen:
                first = seen[key]  # 1 and true are equal
                twice = f"key {key!r} stands twice" if type(first) is type(key) else f"keys {first!r} and {key!r} clash"
                raise yaml.constructor.ConstructorError(None, None, twice, key_node.start_mark)
            seen[key] = key
        return super().construct_mapping(node, deep)


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises `ConfigError` that names the file, and the line if there is one."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # a name with a NUL in it, or bytes that are no text
        raise ConfigError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error
    try:
        content = yaml.load(text, Loader=_Loader)  # derived from the safe one
        check_size(content)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}" if mark is not None else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError(f"{path}{place} is not valid YAML: {problem}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is not valid YAML: it nests too deep") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if content is None:
        raise ConfigError(f"{path} is empty")
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a YAML mapping, got {type(content).__name__}")
    return content
