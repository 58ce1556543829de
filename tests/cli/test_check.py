"""`check`: every problem of a config at once, with the nearest names, and the strategies as resolved."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from trl_grpo_ext.cli import main

LAUGHS = "a0: &a0 [x, x]\n" + "\n".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]" for i in range(9))
EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "configs").glob("*.yaml"))


def check(tmp_path, capsys, text, *flags):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    status = main(["check", str(file), *flags])
    captured = capsys.readouterr()
    return status, captured.out, captured.err.splitlines()


def test_five_planted_errors_are_found_in_one_go(tmp_path, capsys):
    text = """
    advantege: rank
    advantage: {kind: zscore, epz: 1, eps: -1.0}
    kl: k9
    beta: 0.1
    num_generations: three
    rewards: [accuracy_reward]
    reward_funcs: [think_format_reward]
    """
    status, out, problems = check(tmp_path, capsys, text)
    assert status == 2
    assert out == ""
    expected = [
        "unknown key 'advantege'; did you mean 'advantage'",
        "has no field 'epz'; did you mean 'eps'?",
        "`eps` must be >= 0, got -1.0",
        "unknown kl kind 'k9'; did you mean 'k3'",
        "`num_generations` must be an integer or empty (at least 1), got 'three'",
        "set both as `reward_funcs` and as `rewards`",
    ]
    for message in expected:
        assert sum(message in problem for problem in problems) == 1, (message, problems)
    assert len(problems) == len(expected)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("advantage: {kind: zscore, eps: -1, ddof: 3}", ["`eps` must be >= 0", "`ddof` must be one of 0, 1"]),
        (
            "advantage: {kind: per_reward, eps: -1, inner: {kind: zscore, dof: 1}, strategies: {a: rnak}}",
            [
                "`advantage.inner`: advantage kind 'zscore' has no field 'dof'",
                "`advantage.strategies.a`: ",
                "`eps` must",
            ],
        ),
        (
            "advantage: {kind: mix, parts: [[1.0, rank], [1.0, rnak]]}",
            ["`advantage.parts[1][1]`: unknown advantage kind 'rnak'; did you mean 'rank'?"],
        ),
        (
            "rewards: [{kind: length_penalty, alpha: -1, inner: acuracy_reward}, nope]",
            [
                "needs `target`",
                "`rewards[0].inner`: unknown reward 'acuracy_reward'",
                "`alpha` must be",
                "`rewards[1]`",
            ],
        ),
        ("advantage: {kind: length_bucketed, buckets: 2, edges: [1, 2]}", ["`edges`"]),
        ("advantage: '{\"kind\": '", ["`advantage`: not valid JSON"]),
        ("kl: k3\nreference: adapter_off", ["`kl=K3(", "`reference=AdapterOff()` has no effect with `beta=0`"]),
        ("kl: k9\nadvantage: rnak\nscale_rewards: batch", ["'k9'", "'rnak'", "`kl` has no effect", "`scale_rewards`"]),
        ("advantage: rank\nscale_rewards: batch", ["replaces TRL's `scale_rewards`, which is set to 'batch'"]),
        ("kl: k2\nbeta: 0.1\nkl_weighting: ratio", ["its expected gradient is not that of the KL"]),
        ("kl_weighting: ratoi", ["`kl_weighting` must be one of its choices, got 'ratoi'; did you mean 'ratio'"]),
        ("reference: adapter_off\nbeta: 0.1", ["needs an adapter on the policy; set `use_peft: true`"]),
        ("reference: full_copy\nbeta: 0.1\nuse_peft: true", ["is for full fine-tuning"]),
        ("rewards: {kind: adapter_reward_model, adapter: x}", ["needs a LoRA policy; set `use_peft: true`"]),
        (
            "reward_funcs: [acuracy_reward]",
            ["unknown reward function 'acuracy_reward'; did you mean 'accuracy_reward'"],
        ),
        ("reward_funcs: [no_such_module.f]", ["cannot import 'no_such_module.f'"]),
        ("reward_funcs: accuracy_reward", ["write [accuracy_reward] for a list of one"]),
        ("num_generations: 5", ["must be divisible by num_generations (5)", "say `num_processes`"]),
        ("load_in_4bit: true\nload_in_8bit: true", ["8 bit and 4 bit"]),
        ("num_proceses: 2", ["unknown key 'num_proceses'; did you mean 'num_processes'"]),
        ("strategies_from: 3", ["`strategies_from` must be text"]),
        ("strategies_from: ''", ["expected a folder, a file or a Hub repository, got ''"]),
        ("strategies_revision: main", ["`strategies_revision` has no effect without `strategies_from`"]),
        ("per_device_train_batch_size: 4.0", ["must be an integer (at least 1), got 4.0; write 4"]),
        ("seed: 5.0", ["`seed` must be an integer, got 5.0; write 5"]),
        ("num_generations: 0", ["`num_generations` must be an integer or empty (at least 1), got 0"]),
        ("gradient_accumulation_steps: -1", ["`gradient_accumulation_steps` must be an integer (at least 1), got -1"]),
        ("learning_rate: .nan", ["`learning_rate` must be a finite number, got nan"]),
        ("max_grad_norm: .inf", ["`max_grad_norm` must be a finite number, got inf"]),
        ("beta: .nan\nkl: k3", ["`beta` must be a finite number (at least 0), got nan"]),
        ("beta: -0.1\nkl: k3", ["`beta` must be a finite number (at least 0), got -0.1"]),
        (
            "rewards: [think_format_reward, accuracy_reward]\nreward_weights: [1, .inf]",
            ["`reward_weights` must be a list (each a finite number) or empty"],
        ),
        ("rewards: think_format_reward\nreward_weights: [1e-1]", ["a list (each a finite number) or empty, got ['1e"]),
        (
            "reward_funcs: [think_format_reward]\nreward_weights: [1, 2]",
            ["`reward_weights` must hold one number per reward function (1), got 2"],
        ),
        ("num_processes: two", ["`num_processes` must be an integer >= 1, got 'two'"]),
        ("num_processes: 0", ["`num_processes` must be an integer >= 1, got 0"]),
        (
            "rewards: {kind: reward_model, model: m, bits: none}",
            ["must be one of 4, 8, None, got 'none'; None is written null in YAML"],
        ),
        (f"advantage: {{kind: zscore, eps: {10**400}}}", ["`eps` must be >= 0, got 1000"]),
        ("advantage: &a {kind: chain, strategy: *a}", ["must nest at most 50 deep"]),
        ("rewards: ['{\"kind\": ']", ["`rewards[0]`: not valid JSON"]),
        ("advantage: [rank, zscore]", ["`advantage`: a spec of family 'advantage' must be a kind"]),
        ("rewards: ['.x:X']", ["cannot import '.x:X': TypeError"]),
    ],
)
def test_each_wrong_value_or_combination_is_named(tmp_path, capsys, text, messages):
    status, _, problems = check(tmp_path, capsys, text)
    assert status == 2
    for message in messages:
        assert any(message in problem for problem in problems), (message, problems)
    assert len(problems) <= len(messages), problems


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("advantage: rank\nadvantage: zscore", "line 2 is not valid YAML: key 'advantage' stands twice"),
        ("advantage: {kind: [", "is not valid YAML"),
        ("- rank", "must hold a YAML mapping, got list"),
        ("# nothing but this", "is empty"),
        ("kl: k3\nx: 2020-13-45", "line 2 is not valid YAML: '2020-13-45' can't be read as timestamp"),
        ("seed: 0x_", "'0x_' can't be read as int"),
        (f"seed: {'9' * 5000}", "can't be read as int"),
        ("x: !!int abc", "'abc' can't be read as int"),
        ("x: !!bool maybe", "'maybe' can't be read as bool"),
        ("x: !!timestamp foo", "'foo' can't be read as timestamp"),
        (f"x: {'[' * 3000}", "it nests too deep"),
        (LAUGHS, "hold at most 10000 values"),
        ("1: a\ntrue: b", "line 2 is not valid YAML: keys 1 and True clash"),
        ("? {a: 1}\n: b", "is not a word"),
    ],
)
def test_a_file_that_is_no_config_is_one_line(tmp_path, capsys, text, message):
    status, _, problems = check(tmp_path, capsys, text)
    assert (status, len(problems)) == (2, 1)
    assert message in problems[0]
    assert main(["check", str(tmp_path / "none.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["lora_target_modules: all-linear", "resume_from_checkpoint: true"])
def test_what_trl_takes_beyond_its_types(tmp_path, line):
    (tmp_path / "run.yaml").write_text(f"{line}\nrewards: accuracy_reward\n")
    assert main(["check", str(tmp_path / "run.yaml")]) == 0


def test_what_follows_from_leaving_out_a_field_is_not_reported(tmp_path, capsys):
    """TRL's default of 8 generations takes the place of 4, which nobody asked for; so does no KL that of k1."""
    file = tmp_path / "run.yaml"
    file.write_text("num_generations: 4\nper_device_train_batch_size: 6\nkl: k1\nkl_weighting: none\n")
    assert main(["check", str(file)]) == 2
    found = capsys.readouterr().err.splitlines()
    assert len(found) == 2
    assert "must be divisible by num_generations (4)" in found[0]
    assert "has no effect with `beta=0`" in found[1]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("{kind: reward_model, model: ./nope}", "there is no such folder"),
        (
            "{kind: length_penalty, alpha: 1, target: 2, inner: {kind: reward_model, model: ./lora}}",
            "`AdapterRewardModel`",
        ),
        ("{kind: adapter_reward_model, adapter: ./nope}", "there is no such folder"),
    ],
)
def test_reward_models_in_folders_are_looked_at(tmp_path, monkeypatch, capsys, reward, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    (tmp_path / "run.yaml").write_text(f"rewards: {reward}\nuse_peft: true\n")
    assert main(["check", "run.yaml"]) == 2
    (problem,) = capsys.readouterr().err.splitlines()
    assert "`rewards`: " in problem
    assert message in problem


def test_the_strategies_are_printed_as_resolved(tmp_path, capsys):
    text = "advantage: {kind: length_bucketed, inner: rank}\nkl: low_var_kl\nbeta: 1e-2\nlearning_rate: 1e-5"
    status, out, problems = check(tmp_path, capsys, text)
    assert (status, problems) == (0, [])
    resolved = yaml.safe_load(out)
    assert resolved["advantage"]["inner"] == {"kind": "rank"}
    assert resolved["advantage"]["small"] == "merge"
    assert resolved["kl"] == {"kind": "k3", "max_log_ratio": 20.0}
    assert (resolved["kl_weighting"], resolved["beta"]) == ("ratio", 0.01)
    assert "`model_name_or_path` is not set" in out


def test_batch_sizes_are_checked_for_the_processes_that_will_train(tmp_path, capsys):
    text = "num_generations: 16"
    assert check(tmp_path, capsys, text)[0] == 2
    assert check(tmp_path, capsys, text, "--num_processes", "2")[0] == 0
    assert check(tmp_path, capsys, f"{text}\nnum_processes: 2")[0] == 0


@pytest.mark.parametrize("count", ["0", "-3"])
def test_a_number_of_processes_that_is_none(tmp_path, capsys, count):
    status, _, problems = check(tmp_path, capsys, "num_generations: 16", "--num_processes", count)
    assert (status, len(problems)) == (2, 1)
    assert "`num_processes` must be an integer >= 1, got " in problems[0]


def test_rewards_are_printed_as_written(tmp_path, capsys):
    rewards = ["tests.test_specs:an_object", '{"kind": "tests.test_specs:a_lambda"}']
    status, out, problems = check(tmp_path, capsys, yaml.safe_dump({"rewards": rewards, "reward_weights": [1.0, 0.5]}))
    assert (status, problems) == (0, [])
    assert yaml.safe_load(out)["rewards"] == ["tests.test_specs:an_object", "tests.test_specs:a_lambda"]


def test_numbers_that_yaml_takes_for_text(tmp_path, capsys):
    text = "advantage: {kind: mix, parts: [[1e-1, rank], [1, {kind: length_bucketed, edges: [1e1, 20]}]]}"
    status, out, problems = check(tmp_path, capsys, text)
    assert (status, problems) == (0, [])
    ((weight, _), (_, bucketed)) = yaml.safe_load(out)["advantage"]["parts"]
    assert (weight, bucketed["edges"]) == (0.1, [10.0, 20])


def test_settings_of_the_machine_are_left_to_it(tmp_path, capsys):
    assert check(tmp_path, capsys, "bf16: true\nreport_to: wandb\ndeepspeed: ds.json\nnum_processes: 8")[0] == 0


def test_saved_strategies_are_part_of_what_is_checked(tmp_path, capsys):
    from trl_grpo_ext import hub

    hub.write_strategies(tmp_path / "run", {"advantage": "rank", "kl": "k2"})
    status, out, _ = check(tmp_path, capsys, f"strategies_from: {tmp_path / 'run'}\nbeta: 0.1\nadvantage: zscore")
    assert status == 0
    resolved = yaml.safe_load(out)
    assert (resolved["advantage"]["kind"], resolved["kl"]) == ("zscore", {"kind": "k2"})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_config_passes(path, capsys):
    assert main(["check", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert yaml.safe_load(captured.out)["kl"]["kind"] == "k3"
    assert "#" not in captured.out
