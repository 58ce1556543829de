"""`strategies` and `schema`: the catalogue, and a JSON Schema that takes the examples and rejects broken configs."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import yaml

from trl_grpo_ext.cli import main
from trl_grpo_ext.specs import FAMILIES, from_spec, kinds

jsonschema = pytest.importorskip("jsonschema")
EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "configs").glob("*.yaml"))
GOOD = {
    "model_name_or_path": "m", "dataset_name": "d", "output_dir": "o", "num_processes": 2, "learning_rate": "1e-5",
    "beta": 0.1, "kl": {"kind": "k3", "max_log_ratio": None}, "reward_funcs": ["accuracy_reward"], "env": {"A": "1"},
    "advantage": {"kind": "chain", "strategy": {"kind": "mix", "parts": [[1.0, "rank"], [0.5, {"kind": "zscore"}]]},
                  "transforms": [{"kind": "clip", "limit": 2.0}, "batch_whiten"]},
    "datasets": [{"path": "p"}], "eval_strategy": "no", "report_to": ["tensorboard"],
}  # fmt: skip


@pytest.fixture(scope="module")
def validator():
    from trl_grpo_ext.cli._keys import config_schema

    schema = json.loads(json.dumps(config_schema()))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_config_is_valid(validator, path):
    assert [error.message for error in validator.iter_errors(yaml.safe_load(path.read_text()))] == []


def test_a_config_with_everything_is_valid(validator):
    assert [error.message for error in validator.iter_errors(GOOD)] == []


@pytest.mark.parametrize(
    "change",
    [
        {"advantege": "rank"},
        {"advantage": "rnak"},
        {"advantage": {"kind": "zscore", "epz": 1}},
        {"advantage": {"eps": 1.0}},
        {"advantage": {"kind": "zscore", "eps": "tiny"}},
        {"advantage": {"kind": "zscore", "ddof": 2}},
        {"advantage": {"kind": "length_bucketed", "inner": {"kind": "rank", "eps": 1}}},
        {"advantage": {"kind": "mix", "parts": [["rank"]]}},
        {"advantage": {"kind": "mix"}},
        {"advantage": "length_bucketed", "kl": "rank"},
        {"rewards": [{"kind": "length_penalty", "inner": "accuracy_reward"}]},
        {"rewards": [{"kind": "reward_model", "model": "m", "bits": 5}]},
        {"kl_weighting": "ratoi"},
        {"num_generations": "eight"},
        {"reward_funcs": "accuracy_reward"},
        {"use_peft": "maybe"},
        {"loss_type": 3},
        {"datasets": [{"pth": "p"}]},
        {"shaping": {"kind": "pairwise_win_rate", "judge": "no path"}},
    ],
)
def test_broken_configs_are_rejected(validator, change):
    assert not validator.is_valid({**copy.deepcopy(GOOD), **change})


def test_the_schema_and_the_specs_agree_on_every_kind(validator):
    """A kind without required fields is valid as a word; with all its defaults written out it is valid as a mapping."""
    from trl_grpo_ext.cli._catalogue import describe
    from trl_grpo_ext.specs import SPEC_FIELDS

    field = {family: name for name, family in SPEC_FIELDS.items()}
    for family in sorted(field):
        for kind, cls in kinds(family).items():
            described = describe(cls)
            if any(f["required"] for f in described["fields"]):
                assert not validator.is_valid({field[family]: kind})
                continue
            spec = {"kind": kind, **{f["name"]: f["default"] for f in described["fields"]}}
            assert from_spec(spec, family=family) == from_spec(kind, family=family)
            assert [e.message for e in validator.iter_errors({field[family]: kind})] == []
            assert [e.message for e in validator.iter_errors({field[family]: spec})] == []


def test_the_schema_command_writes_it(tmp_path, capsys):
    file = tmp_path / "editor" / "schema.json"
    assert main(["schema", "--output", str(file)]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(file.read_text())["additionalProperties"] is False


def test_a_place_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    for place, reason in ((tmp_path, "Is a directory"), (tmp_path / "file" / "schema.json", "File exists")):
        assert main(["schema", "--output", str(place)]) == 2
        assert capsys.readouterr().err == f"trl-grpo-ext schema: cannot write '{place}': {reason}\n"


def test_strategies_lists_every_kind_with_its_fields(capsys):
    assert main(["strategies"]) == 0
    text = capsys.readouterr().out
    for family in FAMILIES:
        assert f"\n{family}\n" in f"\n{text}"
        for cls in kinds(family).values():
            assert f"  {cls.kind}" in text
    assert '- inner: advantage  = {"kind": "zscore"' in text
    assert "mean_centered (also dr_grpo)" in text


def test_strategies_as_json_and_of_one_family(capsys):
    assert main(["strategies", "--family", "advantage", "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert list(listing) == ["advantage"]
    entry = next(e for e in listing["advantage"] if e["kind"] == "zscore")
    assert [f["name"] for f in entry["fields"]] == ["eps", "ddof", "scale"]
    assert entry["fields"][0] == {"name": "eps", "type": "float", "required": False, "default": 1e-4}
    assert main(["strategies", "--family", "advantages"]) == 2
    assert "did you mean 'advantage'" in capsys.readouterr().err
