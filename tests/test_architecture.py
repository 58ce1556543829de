"""What the package promises about itself: layers, lazy import, exported names, documented names."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import trl_grpo_ext

ROOT = Path(trl_grpo_ext.__file__).parent

# Lower numbers know nothing of higher ones.
LAYERS = {
    "errors": 0, "_suggest": 0, "_validate": 1, "_strategy": 1, "functional": 1, "batch": 1,
    "advantages": 2, "kl": 2, "rewards": 2, "reference": 2,
    "specs": 3, "hub": 3, "_trl": 3, "config": 4, "_construction": 5, "_outputs": 4, "_resume": 4,
    "_trainer_kl": 5, "_trainer_reference": 5, "_trainer_rewards": 5,
    "trainer": 6, "report": 6, "demo": 7, "schema": 6, "cli": 8,
}  # fmt: skip
MAY_IMPORT_TRL = {
    "_trl", "config", "trainer", "cli", "demo", "schema"
}  # fmt: skip
HEAVY = {"torch", "transformers", "trl", "peft", "accelerate", "datasets", "bitsandbytes", "numpy", "matplotlib"}


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            if node.module == "trl_grpo_ext":
                found.update(f"trl_grpo_ext.{alias.name}" for alias in node.names)
    return found


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


FILES = [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downwards(path):
    layer = LAYERS[part_of(path)]
    for module in imports(path):
        if module.startswith("trl_grpo_ext.") and (target := module.split(".")[1]) in LAYERS:
            assert LAYERS[target] <= layer, f"{path} imports {module}, which is above it"
        if module.split(".")[0] == "trl" and not module.startswith("trl.rewards"):
            assert part_of(path) in MAY_IMPORT_TRL, f"{path} imports {module}"
        if part_of(path) in ("functional", "advantages", "kl", "batch") and module.split(".")[0] in HEAVY:
            assert module.split(".")[0] == "torch", f"{path} imports {module}"


def test_importing_the_package_imports_nothing_heavy():
    code = f"import sys, trl_grpo_ext; print(sorted({HEAVY!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_every_exported_name_is_there_and_documented():
    assert trl_grpo_ext.__all__ == sorted(trl_grpo_ext.__all__)
    for name in trl_grpo_ext.__all__:
        value = getattr(trl_grpo_ext, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"{name} has no docstring"
    with pytest.raises(AttributeError, match="no attribute 'Rnak'"):
        _ = trl_grpo_ext.Rnak
    assert set(trl_grpo_ext.__all__) <= set(dir(trl_grpo_ext))


@pytest.mark.parametrize("family", ["advantages", "kl", "rewards", "reference"])
def test_family_packages_export_sorted_public_names(family):
    module = importlib.import_module(f"trl_grpo_ext.{family}")
    assert sorted(module.__all__, key=str.lower) == sorted(set(module.__all__), key=str.lower)
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value):
            assert inspect.getdoc(value), f"{family}.{name} has no docstring"


def test_every_strategy_is_exported_at_the_top():
    from trl_grpo_ext.specs import FAMILIES, kinds

    for family in FAMILIES:
        for cls in kinds(family).values():
            assert getattr(trl_grpo_ext, cls.__name__) is cls


def test_the_stub_names_what_the_package_exports():
    tree = ast.parse((ROOT / "__init__.pyi").read_text(encoding="utf-8"))
    named: dict[str, list[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            named.setdefault(node.module.removeprefix("trl_grpo_ext."), []).extend(alias.asname for alias in node.names)
    assert {module: sorted(names) for module, names in named.items()} == {
        module: sorted(names) for module, names in trl_grpo_ext._EXPORTS.items()
    }
