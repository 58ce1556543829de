"""docs/kl.md says what the library does: its enumerated tables are the script's, its weighting table the classes'."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from trl_grpo_ext.kl import K1, K2, K3, WEIGHTINGS, AbsK, ExactKL, K3Plus, exact_weighting
from trl_grpo_ext.specs import kinds

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/kl.md").read_text()


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("kl_estimators", ROOT / "benchmarks/kl_estimators.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["values", "gradients", "placement", "far"])
def test_enumerated_tables_are_the_scripts(script, name):
    assert script.TABLES[name]() in PAGE, "run python benchmarks/kl_estimators.py --write"


def test_every_table_of_the_page_is_filled(script):
    for name in script.TABLES:
        assert script.between_markers(PAGE, name, "") != PAGE


def test_weighting_table_says_what_the_classes_say():
    words = {"forward": "forward KL: warns", "zero": "zero: refused", "wrong": "wrong: refused"}
    words["unused"] = "not used: refused"
    for weighting in WEIGHTINGS:
        cells = []
        for estimator in (K1(), AbsK(), K2(), K3(), K3Plus(), ExactKL()):
            quality = estimator.gradient[weighting]
            word = words.get(quality, quality)
            if quality == "exact":
                word = "**exact**" if exact_weighting(estimator) == weighting else "exact on-policy"
            cells.append(word)
        assert f"| `{weighting}` | {' | '.join(cells)} |" in PAGE


def test_every_kind_and_alias_is_on_the_page():
    for family in ("kl", "beta"):
        assert {kind for kind in kinds(family) if not re.search(rf"`{re.escape(kind)}`", PAGE)} == set()
