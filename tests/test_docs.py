"""The pages on advantages say what the library does: their code runs, their tables are the script's."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from trl_grpo_ext.specs import kinds

ROOT = Path(__file__).parents[1]
ADVANTAGES = (ROOT / "docs/advantages.md").read_text(encoding="utf-8")
OWN_STRATEGY = (ROOT / "docs/own-strategy.md").read_text(encoding="utf-8")


def run_blocks(page: str, folder: Path) -> dict:
    """Run the page's Python blocks in order; a block that starts with ``# path.py`` becomes that file instead."""
    namespace: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        name = re.match(r"# (\S+\.py)\n", block)
        if name is None:
            exec(compile(block, "<docs>", "exec"), namespace)
        else:
            path = folder / name[1]
            path.parent.mkdir(parents=True)
            path.write_text(block, encoding="utf-8")
    return namespace


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to import from, forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "my_pkg"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def script():
    path = ROOT / "benchmarks/advantages_side_by_side.py"
    spec = importlib.util.spec_from_file_location("advantages_side_by_side", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestAdvantagesPage:
    def test_code_runs(self, folder):
        assert run_blocks(ADVANTAGES, folder)["by_function"].kind == "per_reward"

    def test_tables_are_the_scripts(self, script):
        for name in script.GROUPS:
            assert script.between_markers(ADVANTAGES, name, script.table(name)) == ADVANTAGES, (
                "run python benchmarks/advantages_side_by_side.py --write"
            )

    def test_every_strategy_is_laid_side_by_side(self, script):
        assert {type(strategy) for strategy in script.STRATEGIES.values()} == set(kinds("advantage").values())

    def test_figure_can_be_drawn(self, script, tmp_path):
        script.draw(tmp_path / "figure.png")
        assert (tmp_path / "figure.png").stat().st_size > 10_000
        assert (ROOT / "docs/img/advantages_groups.png").exists()

    def test_every_kind_and_alias_is_on_the_page(self):
        assert [kind for kind in kinds("advantage") if f"`{kind}`" not in ADVANTAGES] == []
        transforms = {cls.__name__ for cls in kinds("transform").values()}
        assert [name for name in transforms if f"`{name}`" not in ADVANTAGES] == []


class TestOwnStrategyPage:
    def test_is_short(self):
        assert len(OWN_STRATEGY.splitlines()) < 40

    def test_code_runs_from_outside_the_package(self, folder):
        import torch

        strategy = run_blocks(OWN_STRATEGY, folder)["strategy"]
        # Cells 1, 2 and 3, 5: the best of each gets 2 - 1, the other 0 - 1
        values, lengths = torch.tensor([1.0, 2.0, 3.0, 5.0]), torch.tensor([1, 2, 30, 40])
        result = strategy.normalize(values, torch.zeros(4, dtype=torch.int64), lengths=lengths)
        assert result.tolist() == [-1.0, 1.0, -1.0, 1.0]

    def test_a_bad_field_is_refused_by_name(self, folder):
        run_blocks(OWN_STRATEGY, folder)
        from my_pkg.mod import BestOfGroup

        with pytest.raises(ValueError, match="`bonus` must be > 0, got -1"):
            BestOfGroup(bonus=-1)
