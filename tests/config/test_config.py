"""GRPOExtConfig: specs from Python, YAML and the command line, and every refusal with its sentence."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import yaml
from trl import GRPOConfig, TrlParser

from tests.tiny import arguments, digits
from trl_grpo_ext import ConfigError, GRPOExtConfig, LengthPenalty, Rank, SpecError, ZScore, to_spec
from trl_grpo_ext.specs import SETTINGS, STRATEGY_FIELDS

NESTED = {"kind": "zscore", "ddof": 0, "eps": 1e-6}


def config(tmp_path, **fields):
    return arguments(GRPOExtConfig, tmp_path, **fields)


def test_its_own_fields_are_those_of_a_set_of_strategies():
    own = {
        f.name: f.default for f in dataclasses.fields(GRPOExtConfig) if f.name not in GRPOConfig.__dataclass_fields__
    }
    assert own == {name: SETTINGS.get(name, (None,))[0] for name in STRATEGY_FIELDS}


def test_without_strategies_it_has_trls_values(tmp_path):
    ours, theirs = config(tmp_path).to_dict(), arguments(GRPOConfig, tmp_path).to_dict()
    differing = {name for name, value in theirs.items() if ours[name] != value}
    assert differing <= {"use_bias_correction_kl", "logging_dir"}
    assert config(tmp_path).strategy_specs() == {}


def test_python_yaml_and_command_line_agree(tmp_path):
    """CASES 33."""
    python = config(tmp_path, advantage=NESTED, kl="k3", beta=0.1)

    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"output_dir": str(tmp_path), "advantage": NESTED, "kl": "k3", "beta": 0.1}))
    common = ["--use_cpu", "--bf16", "false", "--report_to", "none"]
    (from_yaml,) = TrlParser(GRPOExtConfig).parse_args_and_config(["--config", str(file), *common])
    (from_flags,) = TrlParser(GRPOExtConfig).parse_args_and_config(
        ["--output_dir", str(tmp_path), "--advantage", json.dumps(NESTED), "--kl", "k3", "--beta", "0.1", *common]
    )
    assert python.strategy_specs() == from_yaml.strategy_specs() == from_flags.strategy_specs()
    assert python.strategy_specs() == {"advantage": NESTED, "kl": "k3"}


def test_yaml_takes_1e_4_for_text_and_it_is_read_as_a_number(tmp_path):
    spec = yaml.safe_load("advantage: {kind: zscore, eps: 1e-4}")["advantage"]
    assert spec["eps"] == "1e-4"  # YAML 1.1 wants a dot
    from trl_grpo_ext.config import build_field

    assert build_field("advantage", config(tmp_path, advantage=spec).advantage) == ZScore(eps=1e-4)


def test_a_json_list_on_the_command_line(tmp_path):
    rewards = [{"kind": "length_penalty", "inner": "think_format_reward", "alpha": 0.1, "target": 5}]
    assert config(tmp_path, rewards=json.dumps(rewards)).rewards == rewards


def test_objects_become_specs_and_inputs_are_not_kept(tmp_path):
    given = dict(NESTED)
    made = config(tmp_path, advantage=given, rewards=[LengthPenalty(digits, alpha=0.1, target=3)])
    made.advantage["ddof"] = 1
    assert given == NESTED
    assert made.rewards[0]["inner"] == "tests.tiny:digits"
    assert config(tmp_path, advantage=Rank()).advantage == to_spec(Rank())


def test_what_a_mapping_holds_is_made_writable_but_its_text_is_not_read(tmp_path):
    """Objects and numpy scalars inside; a chat template starts like JSON and is none."""
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    args = arguments(
        GRPOExtConfig,
        tmp_path,
        advantage={"kind": "mix", "parts": [[np.float32(0.5), Rank()], [1, '{"kind": "zscore"}']]},
        rewards=[
            '{"kind": "reward_model", "model": "org/m"}',
            {"kind": "reward_model", "model": "x/y", "chat_template": template},
        ],
    )
    assert args.advantage["parts"][0] == [0.5, {"kind": "rank"}]
    assert type(args.advantage["parts"][0][0]) is float
    assert args.rewards == [
        {"kind": "reward_model", "model": "org/m"},
        {"kind": "reward_model", "model": "x/y", "chat_template": template},
    ]
    json.dumps(args.to_dict(), default=str)


def test_the_config_survives_a_round_trip_through_its_dict(tmp_path):
    made = config(tmp_path, advantage=NESTED, kl="k2", beta=0.1)
    fields = {name: made.to_dict()[name] for name in ("advantage", "kl", "beta", "use_bias_correction_kl")}
    again = config(tmp_path, **json.loads(json.dumps(fields)))
    assert again.strategy_specs() == made.strategy_specs()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"advantage": "rnak"}, r"`advantage`: unknown advantage kind 'rnak'; did you mean 'rank'\?"),
        ({"advantage": {"kind": "zscore", "epz": 1}}, r"has no field 'epz'; did you mean 'eps'\?"),
        ({"advantage": {"kind": "zscore", "eps": -1.0}}, r"`eps` must be >= 0, got -1.0"),
        ({"advantage": {"kind": "zscore", "ddof": 2}}, r"`ddof` must be one of 0, 1, got 2"),
        ({"advantage": {"eps": 1.0}}, r"needs a `kind`"),
        ({"advantage": 3}, r"must be a kind, a mapping"),
        ({"advantage": "{not json"}, r"`advantage`: not valid JSON"),
        ({"advantage": "os.path:join"}, r"must be a strategy class of family 'advantage'"),
        ({"advantage": "no_such_module_here:X"}, r"cannot import 'no_such_module_here:X'"),
        ({"kl": "k3"}, r"`kl=K3\(.*\)` has no effect with `beta=0`"),
        ({"reference": "adapter_off"}, r"`reference=AdapterOff\(.*\)` has no effect with `beta=0`"),
        ({"kl": "naive", "kl_weighting": "none", "beta": 0.1}, r"expected gradient is zero.*regularise nothing"),
        ({"kl": "k2", "use_bias_correction_kl": True, "beta": 0.1}, r"use_bias_correction_kl=True.*not that of the KL"),
        ({"kl": "k2", "kl_weighting": "ratio", "beta": 0.1}, r"not that of the KL"),
        ({"kl_weighting": "rato"}, r"`kl_weighting` must be one of .*did you mean 'ratio'"),
        ({"kl": "k3", "kl_weighting": "ratoi", "beta": 0.1}, r"`kl_weighting` must be one of"),
        (
            {"kl": "k3", "kl_weighting": "none", "use_bias_correction_kl": True, "beta": 0.1},
            r"`kl_weighting='none'` and `use_bias_correction_kl=True` .* contradict",
        ),
        ({"advantage": "rank", "scale_rewards": "batch"}, r"replaces TRL's `scale_rewards`, which is set to 'batch'"),
        (
            {"advantage": "rank", "multi_objective_aggregation": "normalize_then_sum"},
            r"replaces TRL's `multi_objective_aggregation`",
        ),
        ({"reference": "adapter_off", "sync_ref_model": True, "beta": 0.1}, r"replaces TRL's `sync_ref_model`"),
        ({"rewards": "acuracy_reward"}, r"unknown reward 'acuracy_reward'; did you mean 'accuracy_reward'"),
        ({"rewards": [{"kind": "length_penalty", "alpha": 1.0}]}, r"needs `inner`, `target`"),
    ],
)
def test_refusals_at_construction(tmp_path, fields, message):
    with pytest.raises(ConfigError, match=message) as caught:
        config(tmp_path, **fields)
    assert isinstance(caught.value, ValueError)


def test_a_misspelt_key_in_yaml_is_an_error_with_its_name(tmp_path):
    """CASES 32: TRL's parser rejects keys it does not know; ours are known to it."""
    file = tmp_path / "run.yaml"
    file.write_text("advantege: rank\n")
    with pytest.raises(ValueError, match="advantege"):
        TrlParser(GRPOExtConfig).parse_args_and_config(["--config", str(file), "--use_cpu", "--bf16", "false"])


def test_the_same_spec_error_is_a_value_error_with_a_root():
    from trl_grpo_ext import GRPOExtError

    assert issubclass(SpecError, ConfigError)
    assert issubclass(ConfigError, (GRPOExtError, ValueError))
