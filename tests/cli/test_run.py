"""`run`: unmodified scripts with strategies put in, and without strategies stock TRL bit for bit."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import trl
import yaml
from safetensors.torch import load_file
from trl.scripts import grpo

import trl_grpo_ext
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer, SpecError, hub
from trl_grpo_ext.cli import main
from trl_grpo_ext.cli._patch import patched
from trl_grpo_ext.cli.run import read_strategies

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
STRATEGIES = {"advantage": {"kind": "zscore", "ddof": 0, "eps": 1e-6}, "kl": "k2", "beta": 0.1}


@pytest.fixture
def strategies(tmp_path):
    file = tmp_path / "strategies.yaml"
    file.write_text(yaml.safe_dump(STRATEGIES))
    return str(file)


def script_arguments(script, model, output):
    named = ["--model", model, "--output", output] if script == "from_import.py" else [model, output]
    return [str(SCRIPTS / script)], named


def weights(folder):
    return load_file(Path(folder) / "model.safetensors")


def equal(a, b):
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


def saved_specs(folder):
    content = json.loads((Path(folder) / hub.STRATEGIES_FILE).read_text())
    return {name: spec for name, spec in content.items() if name != "_meta"}


def as_plain_python(script, arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", [*script, *arguments])
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    runpy.run_path(script[0], run_name="__main__")


@pytest.mark.parametrize("script", ["from_import.py", "module_import.py", "subclass.py"])
def test_users_scripts(script, tmp_path, tiny_model_dir, strategies, monkeypatch, capsys):
    """Stock by themselves and under `run` without strategies, bit for bit; with strategies these are what trains."""
    stock = str(tmp_path / "stock")
    as_plain_python(*script_arguments(script, tiny_model_dir, stock), monkeypatch)

    path, arguments = script_arguments(script, tiny_model_dir, str(tmp_path / "without"))
    assert main(["run", *path, "--", *arguments]) == 0
    assert equal(weights(tmp_path / "without"), weights(stock))
    assert not (tmp_path / "without" / hub.STRATEGIES_FILE).exists()

    path, arguments = script_arguments(script, tiny_model_dir, str(tmp_path / "with"))
    capsys.readouterr()
    assert main(["run", *path, "--strategies", strategies, "--", *arguments]) == 0
    assert "trl-grpo-ext run: put in advantage, beta, kl" in capsys.readouterr().err
    assert saved_specs(tmp_path / "with")["kl"]["kind"] == "k2"
    assert saved_specs(tmp_path / "with")["advantage"]["ddof"] == 0
    assert not equal(weights(tmp_path / "with"), weights(stock))


def test_the_strategies_are_those_of_the_objects(tmp_path, tiny_model_dir, strategies):
    """Bit for bit."""
    from tests.tiny import arguments, digits, prompts

    args = arguments(GRPOExtConfig, tmp_path / "objects", max_steps=2, **STRATEGIES)
    trainer = GRPOExtTrainer(tiny_model_dir, digits, args, train_dataset=prompts())
    trainer.train()
    trainer.save_model()
    path, named = script_arguments("from_import.py", tiny_model_dir, str(tmp_path / "run"))
    assert main(["run", *path, "--strategies", strategies, "--", *named]) == 0
    assert equal(weights(tmp_path / "run"), weights(tmp_path / "objects"))


def test_what_the_script_sets_stays(tmp_path, tiny_model_dir, strategies, capsys):
    path, arguments = script_arguments("subclass.py", tiny_model_dir, str(tmp_path / "out"))
    assert main(["run", *path, "--strategies", strategies, "--", *arguments, "own"]) == 0
    assert "put in beta, kl; the script sets advantage itself" in capsys.readouterr().err
    assert saved_specs(tmp_path / "out")["advantage"] == {"kind": "mean_centered"}


def test_trls_own_script_unmodified(tmp_path, settings, strategies):
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({**settings, "reward_funcs": ["tests.tiny.digits"]}))

    def run(name, *flags):
        arguments = ["--config", str(config), "--output_dir", str(tmp_path / name)]
        return main(["run", grpo.__file__, *flags, "--", *arguments])

    parsed = grpo.make_parser().parse_args_and_config(["--config", str(config), "--output_dir", str(tmp_path / "trl")])
    grpo.main(*parsed)
    assert run("without") == 0
    assert equal(weights(tmp_path / "without"), weights(tmp_path / "trl"))
    assert run("with", "--strategies", strategies) == 0
    assert saved_specs(tmp_path / "with")["kl"]["kind"] == "k2"
    assert not equal(weights(tmp_path / "with"), weights(tmp_path / "trl"))


def test_trls_own_script_reads_our_fields_from_its_yaml(tmp_path, settings):
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({**settings, "rewards": ["tests.tiny:digits"], **STRATEGIES}))
    assert main(["run", grpo.__file__, "--", "--config", str(config)]) == 0
    assert saved_specs(settings["output_dir"])["rewards"] == ["tests.tiny:digits"]


def test_saved_strategies_can_be_run_with(tmp_path, tiny_model_dir):
    hub.write_strategies(tmp_path / "saved", {"advantage": "rank"})
    path, arguments = script_arguments("from_import.py", tiny_model_dir, str(tmp_path / "out"))
    assert main(["run", "--strategies", str(tmp_path / "saved"), *path, "--", *arguments]) == 0
    assert saved_specs(tmp_path / "out") == {"advantage": {"kind": "rank"}}


def test_what_a_run_saved_brings_its_beta_and_needs_not_its_rewards(tmp_path, capsys):
    saved = {"kl": "k2", "rewards": ["no_such_module:function"]}
    hub.write_strategies(tmp_path, saved, beta=0.2, reference="adapter_off")
    assert read_strategies(str(tmp_path)) == {"kl": "k2", "beta": 0.2}
    assert "left out, the script's own are used: " in capsys.readouterr().err

    hub.write_strategies(tmp_path, {"advantage": "rank"}, beta=0.2)  # without a KL of its own, beta is TRL's business
    assert read_strategies(str(tmp_path)) == {"advantage": "rank"}
    assert not capsys.readouterr().err

    hub.write_strategies(tmp_path, {"advantage": "rnak", **saved})  # what is used has to be right
    with pytest.raises(SpecError, match="did you mean 'rank'"):
        read_strategies(str(tmp_path))


def test_strategies_may_stand_next_to_the_script(tmp_path, monkeypatch, capsys):
    (tmp_path / "next_to_it.py").write_text("from trl_grpo_ext import Rank\n\n\nclass Own(Rank):\n    pass\n")
    (tmp_path / "script.py").write_text("print('started')")
    (tmp_path / "s.yaml").write_text("advantage: {kind: 'next_to_it:Own'}")
    monkeypatch.chdir("/")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["run", str(tmp_path / "script.py"), "--strategies", str(tmp_path / "s.yaml")]) == 2
    assert capsys.readouterr().out == "started\n"


def test_the_patch_covers_every_way_to_ask_and_goes_away():
    from trl.trainer import grpo_config, grpo_trainer

    stock = trl.GRPOTrainer, trl.GRPOConfig
    with patched():
        from trl import GRPOConfig, GRPOTrainer

        trainers = {trl.GRPOTrainer, trl.trainer.GRPOTrainer, grpo_trainer.GRPOTrainer, GRPOTrainer}
        assert len(trainers) == 1
        assert issubclass(GRPOTrainer, GRPOExtTrainer)
        configs = {trl.GRPOConfig, trl.trainer.GRPOConfig, grpo_config.GRPOConfig, GRPOConfig}
        assert configs == {GRPOExtConfig}
    assert (trl.GRPOTrainer, trl.GRPOConfig) == stock
    assert (grpo_trainer.GRPOTrainer, grpo_config.GRPOConfig) == stock


def test_strategies_as_json_text(tmp_path):
    from trl_grpo_ext.cli.run import read_strategies

    file = tmp_path / "s.yaml"
    file.write_text('advantage: \'{"kind": "rank"}\'\nbeta: 1e-2')
    with patched(read_strategies(str(file))) as use:
        assert use == {}
        args = trl.GRPOConfig(str(tmp_path), beta=0.01, advantage=read_strategies(str(file))["advantage"], use_cpu=True)
    assert args.advantage == {"kind": "rank"}


def test_a_script_that_uses_our_own_trainer(tmp_path, tiny_model_dir):
    from tests.tiny import arguments, digits, prompts

    stock = trl_grpo_ext.GRPOExtTrainer, trl_grpo_ext.trainer.GRPOExtTrainer
    for name in ("trl_grpo_ext", "trl_grpo_ext.trainer"):
        with patched({"advantage": "rank"}) as use:
            trainer_class = importlib.import_module(name).GRPOExtTrainer
            args = arguments(GRPOExtConfig, tmp_path, report_to="none")
            trainer = trainer_class(tiny_model_dir, digits, args, train_dataset=prompts())
            assert repr(trainer.advantage) == "Rank()"
        assert use == {"put in": {"advantage"}, "sets": set()}
    assert (trl_grpo_ext.GRPOExtTrainer, trl_grpo_ext.trainer.GRPOExtTrainer) == stock


def test_our_names_stay_lazy(monkeypatch):
    monkeypatch.delitem(vars(trl_grpo_ext), "GRPOExtTrainer")
    with patched():
        assert trl_grpo_ext.GRPOExtTrainer is trl.GRPOTrainer
    assert "GRPOExtTrainer" not in vars(trl_grpo_ext)
    assert trl_grpo_ext.GRPOExtTrainer is GRPOExtTrainer


def test_the_scripts_config_is_not_changed(tmp_path, tiny_model_dir):
    from tests.tiny import arguments, digits, prompts

    with patched({"advantage": "rank"}) as use:
        args = arguments(trl.GRPOConfig, tmp_path)
        trainer = trl.GRPOTrainer(tiny_model_dir, digits, args, train_dataset=prompts())
        assert (args.advantage, trainer.args.advantage) == (None, "rank")
    assert use == {"put in": {"advantage"}, "sets": set()}


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        ("advantege: rank\nkl: k9", ["unknown key 'advantege'; did you mean 'advantage'", "unknown kl kind 'k9'"]),
        ("learning_rate: 1", ["unknown key 'learning_rate'"]),
        ("advantage: {kind: zscore, eps: -1}", ["`eps` must be >= 0"]),
        ('advantage: \'{"kind": "rnak"}\'', ["unknown advantage kind 'rnak'"]),
        ("beta: abc", ["`beta` must be >= 0, got 'abc'"]),
        ("beta: [1]\nkl_weighting: 3", ["`beta` must be >= 0, got [1]", "`kl_weighting` must be one of"]),
        ("beta: true\nkl_placement: both", ["`beta` must be >= 0, got True", "`kl_placement` must be one of"]),
        ("beta: .nan", ["`beta` must be >= 0, got nan"]),
    ],
)
def test_wrong_strategies_stop_before_the_script_starts(tmp_path, capsys, content, messages):
    script, file = tmp_path / "script.py", tmp_path / "s.yaml"
    script.write_text("raise SystemExit('started')")
    file.write_text(content)
    assert main(["run", str(script), "--strategies", str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(messages)
    assert all(any(message in line for line in lines) for message in messages)


def test_other_mistakes_and_exits(tmp_path, capsys, strategies):
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:]); sys.exit(int(sys.argv[1]))")
    with pytest.raises(SystemExit) as stopped:
        main(["run", str(script), "--", "3", "--", "--strategies"])
    assert stopped.value.code == 3
    assert "['3', '--', '--strategies']" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["run", str(script), "--steps", "3"])
    assert stopped.value.code == 2
    assert "unknown argument '--steps'; the script's own arguments go after `--`" in capsys.readouterr().err
    assert main(["run", str(tmp_path / "none.py")]) == 2
    for flags in ([], ["--strategies", strategies]):
        assert main(["run", str(script), "--strategies_revision", "main", *flags]) == 2
        assert "needs `--strategies` to be a Hub repository" in capsys.readouterr().err
    script.write_text("pass")
    assert main(["run", str(script), "--strategies", strategies]) == 2
    assert "built no GRPOTrainer, so the strategies were not used" in capsys.readouterr().err


@pytest.mark.slow
def test_under_accelerate_launch(tmp_path, tiny_model_dir, strategies):
    env = {**os.environ, "MODEL": tiny_model_dir, "OUTPUT": str(tmp_path / "out"), "ACCELERATE_USE_CPU": "true"}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    run = ["-m", "trl_grpo_ext.cli", "run", str(SCRIPTS / "launched.py"), "--strategies", strategies]
    result = subprocess.run([*launch, *run], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "processes: 1" in result.stdout
    assert saved_specs(tmp_path / "out")["kl"]["kind"] == "k2"


@pytest.mark.slow
@pytest.mark.distributed
def test_on_two_processes(tmp_path, tiny_model_dir, strategies):
    env = {**os.environ, "MODEL": tiny_model_dir, "OUTPUT": str(tmp_path / "out"), "ACCELERATE_USE_CPU": "true"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    launch = [*launch, "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    run = ["-m", "trl_grpo_ext.cli", "run", str(SCRIPTS / "launched.py"), "--strategies", strategies]
    result = subprocess.run(
        [*launch, *run], cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=200
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "processes: 2" in result.stdout
    assert result.stderr.count("put in advantage, beta, kl") == 1
    assert saved_specs(tmp_path / "out")["kl"]["kind"] == "k2"
