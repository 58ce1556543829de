"""Strategies on the Hub: push and load through the real client, against a server on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.hub.loopback import hub_server
from trl_grpo_ext import ConfigError, Rank, SpecError, ZScore, from_spec, hub
from trl_grpo_ext.cli import main

ROOT = Path(__file__).parents[2]
DEEP = '{"kind": "chain", "strategy": ' * 300 + '"rank"' + "}" * 300
TRUSTING = '{"kind": "reward_model", "model": "a/b", "trust_remote_code": true}'
SPECS = {"advantage": {"kind": "zscore", "ddof": 0, "eps": 1e-6}, "kl": "k2", "kl_weighting": "detached"}


def within_text(times):
    """Specs that nest 40 deep, as text within specs that nest 40 deep, and so on."""
    spec = "rank"
    for _ in range(times):
        for _ in range(40):
            spec = {"kind": "chain", "strategy": spec}
        spec = json.dumps(spec)
    return spec


@pytest.fixture
def server(monkeypatch, tmp_path):
    """The loopback Hub, with this process's client pointed at it."""
    from huggingface_hub import constants, file_download, hf_api

    with hub_server() as (address, held):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        for module in (file_download, hf_api):
            if hasattr(module, "ENDPOINT"):
                monkeypatch.setattr(module, "ENDPOINT", address)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        held.address = address
        yield held


def api(held):
    from huggingface_hub import HfApi

    return HfApi(endpoint=held.address, token="hf_test")


def test_a_strategy_set_is_published_with_a_card_and_loads_again(server):
    address = hub.push_strategies(
        {"advantage": ZScore(ddof=0), "kl": "k2"}, "someone/set", api=api(server), token="hf_test"
    )
    assert address.startswith(f"{server.address}/someone/set/commit/")
    files = server.commits["someone/set"][-1]
    assert set(files) == {"grpo_strategies.json", "README.md"}
    loaded = hub.load_strategies("someone/set")
    assert loaded == {"advantage": {"kind": "zscore", "eps": 1e-4, "ddof": 0, "scale": "group"}, "kl": {"kind": "k2"}}
    front, card = files["README.md"].decode().split("---\n")[1:3]
    assert yaml.safe_load(front) == {"library_name": "trl", "tags": ["grpo", "trl-grpo-ext", "grpo-strategies"]}
    assert "--strategies_from someone/set" in card
    shown = card[card.index("```yaml\n") :].removeprefix("```yaml\n").split("```")[0]
    assert yaml.safe_load(shown) == loaded


def test_an_earlier_commit_is_loaded_by_its_revision(server):
    server.put("someone/set", {hub.STRATEGIES_FILE: {"advantage": "rank"}})
    first = server.sha("someone/set", 1)
    server.put("someone/set", {hub.STRATEGIES_FILE: {"advantage": "zscore"}})
    assert hub.load_strategies("someone/set") == {"advantage": "zscore"}
    assert hub.load_strategies("someone/set", revision=first) == {"advantage": "rank"}
    with pytest.raises(ConfigError, match="at revision 'nope' can't be fetched"):
        hub.load_strategies("someone/set", revision="nope")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"advantage": "rnak"}, r"'someone/set': `advantage`: unknown advantage kind 'rnak'; did you mean 'rank'\?"),
        ({"advantege": "rank"}, r"unknown field 'advantege'; did you mean 'advantage'\?"),
        ({"advantage": {"kind": "zscore", "eps": -1.0}}, "`eps` must be >= 0"),
        ({"advantage": "tests.hub.trap:Strategy"}, "trust_remote_code=True"),
        ({"advantage": {"kind": "per_reward", "inner": "tests.hub.trap:Strategy"}}, "trust_remote_code=True"),
        ({"rewards": ["tests.hub.trap:reward"]}, "trust_remote_code=True"),
        ({"rewards": [{"kind": "clip_reward", "low": 0, "high": 1, "inner": "tests.hub.trap:f"}]}, "trust_remote_code"),
        ({"shaping": {"kind": "pairwise_win_rate", "judge": "tests.hub.trap:judge"}}, "trust_remote_code=True"),
        ({"rewards": {"kind": "reward_model", "model": "a/b", "trust_remote_code": True}}, "sets `trust_remote_code`"),
        ({"kl_weighting": "ratoi"}, "`kl_weighting` must be one of"),
        ({"advantage": {"kind": "zscore", "eps": 10**400}}, "`eps` must be >= 0, got 1000"),
        (
            {"advantage": {"kind": "zscore", "ddof": "1"}},
            "'someone/set': `advantage`: .*`ddof` must be one of",
        ),
        ({"rewards": {"kind": "reward_model", "model": "m", "bits": "none"}}, "`bits` must be one of 4, 8, None, got"),
        (f'{{"advantage": {DEEP}}}', "'someone/set': lists and mappings must nest at most 50 deep"),
        ({"advantage": within_text(7)}, "'someone/set': the specs nest too deep"),
        ({"rewards": TRUSTING}, "sets `trust_remote_code`"),
        ({"rewards": [{"kind": "clip_reward", "low": 0, "high": 1, "inner": TRUSTING}]}, "sets `trust_remote_code`"),
        ([1], "must hold an object"),
        ("{oops", "not valid JSON"),
    ],
)
def test_what_comes_from_the_hub_is_checked_and_never_executed(server, content, message):
    server.put("someone/set", {hub.STRATEGIES_FILE: content})
    out_of_range = "one of" in message or ">=" in message
    with pytest.raises(ConfigError if out_of_range else SpecError, match=message):
        hub.load_strategies("someone/set")
    assert "tests.hub.trap" not in sys.modules


def test_import_paths_load_when_they_are_trusted_or_local(server, tmp_path):
    rewards = {"rewards": ["tests.tiny:digits"], "_meta": {"versions": {}}}
    server.put("someone/set", {hub.STRATEGIES_FILE: rewards})
    assert hub.load_strategies("someone/set", trust_remote_code=True) == {"rewards": ["tests.tiny:digits"]}
    hub.write_strategies(tmp_path, {"rewards": ["tests.tiny:digits"]})
    assert hub.load_strategies(tmp_path) == {"rewards": ["tests.tiny:digits"]}


def test_a_missing_repository_and_a_folder_without_strategies_are_one_line(server, tmp_path):
    for source, message in [("someone/nothing", "can't be fetched"), (tmp_path, "holds no grpo_strategies.json")]:
        with pytest.raises(ConfigError, match=message) as caught:
            hub.load_strategies(source)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="has no `revision`"):
        hub.load_strategies(tmp_path, revision="main")


@pytest.mark.parametrize("source", [None, "", 3, "x" * 5000, "a\0b"], ids=lambda x: str(x)[:5])
def test_what_names_no_place_is_one_line(source):
    with pytest.raises(ConfigError, match=r"expected a folder|is no local path") as caught:
        hub.load_strategies(source)
    assert len(str(caught.value)) < 1000


def test_a_folder_in_the_place_of_the_file(tmp_path):
    (tmp_path / hub.STRATEGIES_FILE).mkdir()
    with pytest.raises(ConfigError, match=r"holds no grpo_strategies\.json"):
        hub.load_strategies(tmp_path)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"advantage": "rnak"}, "did you mean 'rank'"),
        ({}, "no strategies to publish"),
        ("rank", "must be given as a mapping of field to spec, .* got 'rank'"),
        ({"advantage": ["rank", "zscore"]}, r"`advantage`: .* got \['rank', 'zscore'\] of type list"),
        ({"rewards": []}, "`rewards` is an empty list"),
        ({"kl": "k1", "kl_weighting": "none"}, "it would regularise nothing"),
        ({"kl_weighting": "ratio"}, "`kl_weighting='ratio'` has no effect without `kl`"),
    ],
)
def test_wrong_specs_are_not_published(server, specs, message):
    with pytest.raises(ConfigError, match=message):
        hub.push_strategies(specs, "someone/set", api=api(server))
    assert server.requests == []


def test_what_only_the_running_script_can_import_is_not_published(server, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "own_reward", lambda completions: [], raising=False)
    with pytest.raises(ConfigError, match="`rewards` names something of the script that runs"):
        hub.push_strategies({"advantage": "rank", "rewards": ["__main__:own_reward"]}, "someone/set", api=api(server))
    assert server.requests == []


@pytest.mark.parametrize("repo_id", [None, "", "a b", "a/b/c", 3])
def test_a_wrong_name_is_refused_before_anything_is_sent(server, repo_id):
    with pytest.raises(ConfigError, match="`repo_id` must name a Hub repository, as 'user/name', got"):
        hub.push_strategies({"advantage": "rank"}, repo_id, api=api(server))
    assert server.requests == []


@pytest.fixture
def client(server, monkeypatch):
    """The command's client, with the loopback Hub as its endpoint."""
    import huggingface_hub

    import trl_grpo_ext.cli._problems  # noqa: F401  # transformers reads HfApi when it is loaded

    client = api(server)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **kwargs: client)


def test_the_push_command_publishes_the_strategies_of_a_config(client, tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text("model_name_or_path: x\nbeta: 0.1\nadvantage: rank\nkl: k3\n")
    assert main(["push", str(config), "someone/from-yaml"]) == 0
    assert "/someone/from-yaml/commit/" in capsys.readouterr().out
    assert set(hub.load_strategies("someone/from-yaml")) == {"advantage", "kl"}
    assert main(["push", "someone/from-yaml", "someone/copy"]) == 0
    assert hub.load_strategies("someone/copy") == hub.load_strategies("someone/from-yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rewrds: x\nadvantage: rank", "unknown key 'rewrds'; did you mean 'rewards'"),
        ('kl: \'{"kind": "k9"}\'', "`kl`: unknown kl kind 'k9'"),
        ("rewards: ['no_such:f', 'nor_this:f']", "`rewards[1]`: cannot import 'nor_this:f'"),
    ],
)
def test_a_config_with_mistakes_is_not_published(tmp_path, capsys, text, message):
    (tmp_path / "run.yaml").write_text(text)
    assert main(["push", str(tmp_path / "run.yaml"), "someone/set"]) == 2
    assert message in capsys.readouterr().err


def test_the_push_command_finds_modules_of_the_working_folder(client, server, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_to_push.py").write_text("def score(completions, **columns): ...")
    (tmp_path / "run.yaml").write_text('rewards: [\'{"kind": "mine_to_push:score"}\']\nnum_processes: 2')
    assert main(["push", "run.yaml", "someone/set"]) == 0
    assert json.loads(server.commits["someone/set"][-1][hub.STRATEGIES_FILE])["rewards"] == ["mine_to_push:score"]


def test_nothing_that_a_spec_holds_stops_the_card_or_the_file(tmp_path):
    specs = {"advantage": {"kind": "zscore", "eps": np.float64(0.5), 3: {1, 2}}, "beta": np.float32(0.5), "x": object}
    hub.write_strategies(tmp_path, specs)
    written = json.loads((tmp_path / hub.STRATEGIES_FILE).read_text())
    shown = yaml.safe_load(hub.card_section(specs).split("```yaml\n")[1].split("```")[0])
    assert {**shown, "_meta": written["_meta"]} == written
    assert shown == {"advantage": {"kind": "zscore", "eps": 0.5, "3": "{1, 2}"}, "beta": 0.5, "x": "<class 'object'>"}


def test_the_card_shows_headline_curves():
    history = [
        {"step": 1, "reward": 0.25, "kl": 0.0, "completions/mean_length": 12.0},
        {"step": 2, "eval_reward": 9.0},
        {"step": 30, "reward": 0.75, "kl": 0.01234567, "completions/mean_length": 24.0},
    ]
    section = hub.card_section({"advantage": "rank"}, history)
    table = [line for line in section.splitlines() if line.startswith("|")]
    assert table == [
        "| | step 1 | step 30 |",
        "|---|---:|---:|",
        "| reward | 0.25 | 0.75 |",
        "| KL to the reference | 0 | 0.01235 |",
        "| completion length (tokens) | 12 | 24 |",
    ]
    assert "|" not in hub.card_section({"advantage": "rank"}, history[:1])


def test_a_spec_from_the_hub_equals_the_object(server):
    hub.push_strategies({"advantage": Rank()}, "someone/set", api=api(server))
    assert from_spec(hub.load_strategies("someone/set")["advantage"], family="advantage") == Rank()


@pytest.mark.slow
def test_round_trip_train_push_load_in_a_fresh_process_and_go_on(tmp_path, tiny_model_dir):
    with hub_server() as (address, held):
        env = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_test"}
        env |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

        def step(name, folder):
            result = subprocess.run(
                [sys.executable, "-m", "tests.hub.steps", name, tiny_model_dir, str(tmp_path / folder), "someone/run"],
                cwd=ROOT, env=env, capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert result.returncode == 0, result.stderr[-3000:]
            return json.loads(result.stdout.strip().splitlines()[-1])

        pushed, trained = step("push", "first")
        files = held.commits["someone/run"][-1]
        assert {"grpo_strategies.json", "README.md", "adapter_config.json"} <= set(files)
        card = files["README.md"].decode()
        assert hub.CARD_HEADING in card
        assert yaml.safe_load(card.split("```yaml\n")[1].split("```")[0]) == {**pushed, "beta": 0.1}
        assert yaml.safe_load(card.split("---\n")[1])["library_name"]  # the front matter is still whole
        loaded, again = step("load", "second")
        assert loaded == pushed
        assert again == trained  # same strategies, same seed: bit-equal
