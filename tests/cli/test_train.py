"""`train`: everything `trl grpo` takes and our fields, checked before a model is loaded, launched as TRL does it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from tests.tiny import digits
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer, ZScore, hub
from trl_grpo_ext.cli import main, train
from trl_grpo_ext.errors import ConfigError

SPEC = {"kind": "zscore", "ddof": 0, "eps": 1e-6}
STRATEGIES = {"advantage": SPEC, "kl": "k2", "beta": 0.1, "rewards": ["tests.tiny:digits"]}


@pytest.fixture
def launched(monkeypatch):
    """Instead of starting processes, keep what would be started."""
    calls = []
    monkeypatch.setattr(train, "launch", lambda launch, script: calls.append((launch, script)) or 0)
    return calls


@pytest.fixture
def write(tmp_path, settings):
    """Write a config of the given values on top of the settings; return its path."""

    def write(name="run.yaml", **values):
        path = tmp_path / name
        path.write_text(yaml.safe_dump({**settings, **values}))
        return str(path)

    return write


def worker(*argv):
    """Train in this process; return the folder's weights."""
    from trl_grpo_ext.cli._worker import train as run_worker

    run_worker(list(argv))


def weights(folder):
    return load_file(Path(folder) / "model.safetensors")


def equal(a, b):
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


def test_objects_yaml_flags_and_saved_strategies_train_the_same(tmp_path, settings, write):
    """Bit for bit."""
    from datasets import load_dataset

    own = {k: v for k, v in settings.items() if k not in ("model_name_or_path", "dataset_name", "output_dir")}
    trainer = GRPOExtTrainer(
        model=settings["model_name_or_path"],
        reward_funcs=digits,
        args=GRPOExtConfig(str(tmp_path / "objects"), beta=0.1, **own),
        train_dataset=load_dataset(settings["dataset_name"])["train"],
        advantage=ZScore(ddof=0, eps=1e-6),
        kl="k2",
    )
    trainer.train()
    trainer.save_model()

    out = {name: str(tmp_path / name) for name in ("yaml", "flags", "saved")}
    worker("--config", write(**STRATEGIES), "--output_dir", out["yaml"])
    flags = ["--advantage", json.dumps(SPEC), "--kl", "k2", "--beta", "0.1", "--reward_funcs", "tests.tiny.digits"]
    worker("--config", write(), "--output_dir", out["flags"], *flags)
    saved = json.loads((tmp_path / "yaml" / hub.STRATEGIES_FILE).read_text())
    assert {"advantage", "kl", "rewards"} <= set(saved)
    config = write(strategies_from=out["yaml"])  # beta too is that of the run
    worker("--config", config, "--output_dir", out["saved"])

    worker("--config", write(reward_funcs=["tests.tiny.digits"]), "--output_dir", str(tmp_path / "stock"))
    expected = weights(tmp_path / "objects")
    assert not equal(weights(tmp_path / "stock"), expected)
    for name, folder in out.items():
        assert equal(weights(folder), expected), name
    for name in ("flags", "saved"):
        again = hub.load_strategies(out[name])
        assert all(again[field] == saved[field] for field in ("advantage", "kl"))


def test_without_strategies_it_is_trls_own_script(tmp_path, settings, write):
    from trl.scripts import grpo

    config = write(reward_funcs=["tests.tiny.digits"])
    worker("--config", config, "--output_dir", str(tmp_path / "ours"))
    parsed = grpo.make_parser().parse_args_and_config(["--config", config, "--output_dir", str(tmp_path / "trl")])
    grpo.main(*parsed)
    assert equal(weights(tmp_path / "ours"), weights(tmp_path / "trl"))
    assert not (tmp_path / "ours" / hub.STRATEGIES_FILE).exists()


def test_launcher_flags_go_to_accelerate_and_the_rest_to_the_script(write, launched):
    config = write(num_processes=2, **STRATEGIES)
    flags = ["--num_generations", "2", "--num_machines", "1", f"--config={config}", "--main-process-port=1234"]
    assert main(["train", *flags, "--multi_gpu", "--beta", "0.2"]) == 0
    launch = ["--num_processes", "2", "--num_machines", "1", "--main_process_port", "1234", "--multi_gpu"]
    assert launched == [(launch, ["--num_generations", "2", "--beta", "0.2", "--config", config])]


def test_trls_accelerate_configs_are_known_by_name(write, launched):
    assert main(["train", "--config", write(**STRATEGIES), "--accelerate_config", "zero3", "--num_processes", "2"]) == 0
    ((launch, _),) = launched
    assert launch[0] == "--config_file"
    assert launch[1].endswith("zero3.yaml")
    assert launch[2:] == ["--num_processes", "2"]


def test_the_launch_command_starts_the_worker(monkeypatch):
    from accelerate.commands import launch as accelerate_launch

    seen = []
    monkeypatch.setattr(accelerate_launch, "launch_command", seen.append)
    assert train.launch(["--num_processes", "2"], ["--config", "x.yaml"]) == 0
    (args,) = seen
    assert (args.module, args.training_script, args.num_processes) == (True, train.WORKER, 2)
    assert args.training_script_args == ["--config", "x.yaml"]


class TestInterrupted:
    """Ctrl-C here, or in a process that was started: one line, the shell's status, and nobody left behind."""

    def run(self, monkeypatch, launch_command):
        from accelerate.commands import launch as accelerate_launch

        monkeypatch.setattr(accelerate_launch, "launch_command", launch_command)
        monkeypatch.setattr(train, "PATIENCE", 0.2)
        monkeypatch.setattr(train, "run", lambda args: train.launch(["--num_processes", "1"], []))
        return main(["train"])

    def test_here(self, monkeypatch, capsys):
        started = []

        def launch_command(args):
            started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
            raise KeyboardInterrupt

        assert self.run(monkeypatch, launch_command) == 130
        assert capsys.readouterr().err == "trl-grpo-ext train: interrupted\n"
        assert started[0].poll() is not None

    @pytest.mark.parametrize("status", [130, -2])
    def test_there(self, monkeypatch, capsys, status):
        def launch_command(args):
            raise subprocess.CalledProcessError(status, "worker")

        assert self.run(monkeypatch, launch_command) == 130
        assert capsys.readouterr().err == "trl-grpo-ext train: interrupted\n"

    def test_several_processes(self, monkeypatch, capsys):
        from torch.distributed.elastic.multiprocessing.api import SignalException

        def ended_by(received):
            def launch_command(args):
                raise SignalException("got a signal", received)

            return launch_command

        assert self.run(monkeypatch, ended_by(signal.SIGINT)) == 130
        assert self.run(monkeypatch, ended_by(signal.SIGTERM)) == 143

    def test_a_worker_leaves_the_line_to_its_parent(self, monkeypatch, capsys):
        from trl_grpo_ext.cli import _worker

        def interrupted(argv):
            raise KeyboardInterrupt

        monkeypatch.setattr(_worker, "train", interrupted)
        assert _worker.main() == 130
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("values", "flags", "messages"),
    [
        ({"advantege": "rank"}, [], ["unknown key 'advantege'; did you mean 'advantage'"]),
        ({}, ["--advantege", "rank"], ["unknown flag '--advantege'; did you mean 'advantage'"]),
        ({}, ["--num_proceses", "2"], ["unknown flag '--num_proceses'; did you mean 'num_processes'"]),
        ({}, ["--learning_rate", "fast"], ["argument --learning_rate", "fast"]),
        ({}, ["stray"], ["unexpected argument 'stray'"]),
        ({}, ["--num_processes"], ["expected a value after `--num_processes`"]),
        ({}, ["--num_processes", "two"], ["`num_processes` must be an integer >= 1, got 'two'"]),
        ({}, ["--num_processes", "0"], ["`num_processes` must be an integer >= 1, got 0"]),
        ({"num_processes": "two"}, [], ["`num_processes` must be an integer >= 1, got 'two'"]),
        ({"per_device_train_batch_size": 8.0}, [], ["must be an integer (at least 1), got 8.0; write 8"]),
        ({}, ["--num_generations", "0"], ["`num_generations` must be an integer or empty (at least 1), got 0"]),
        ({"output_dir": "/proc/nope"}, [], ["`output_dir`: cannot write to '/proc/nope': No such file"]),
        ({}, ["--output_dir", __file__], ["`output_dir`: cannot write to", "File exists"]),
        ({"strategies_revision": "main"}, [], ["`strategies_revision` has no effect without `strategies_from`"]),
        ({}, ["--accelerate_config", "zero33"], ["did you mean 'zero3'"]),
        ({"advantage": "rnak", "kl": "k9"}, [], ["did you mean 'rank'", "unknown kl kind 'k9'"]),
        ({}, ["--advantage", '{"kind": "zscore", "epz": 1}'], ["has no field 'epz'; did you mean 'eps'"]),
        ({"rewards": None}, [], ["no reward function is set (`rewards` or `reward_funcs`)"]),
        ({"model_name_or_path": None, "dataset_name": None}, [], ["`model_name_or_path` is not", "neither `dataset_n"]),
        ({"strategies_from": "no/such-repository"}, [], ["'no/such-repository' is no local path"]),
    ],
)
def test_errors_come_before_anything_is_loaded(write, launched, capsys, values, flags, messages):
    assert main(["train", "--config", write(**{**STRATEGIES, **values}), *flags]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("trl-grpo-ext train: ") for line in lines)
    for message in messages:
        assert any(message in line for line in lines), (message, lines)
    assert len(lines) == len(messages) or "fast" in messages or "File exists" in messages
    assert launched == []


def test_saved_strategies_from_elsewhere_are_not_executed(write, launched, capsys, tmp_path, monkeypatch):
    file = tmp_path / hub.STRATEGIES_FILE
    file.write_text(json.dumps({"advantage": "tests.cli.trap:Strategy"}))
    monkeypatch.setattr(hub, "_downloaded", lambda *args: file)
    assert main(["train", "--config", write(rewards=["tests.tiny:digits"]), "--strategies_from", "someone/set"]) == 2
    assert "pass `trust_remote_code=True` to allow it" in capsys.readouterr().err
    trusted = ["--strategies_from", "someone/set", "--trust_remote_code"]
    assert main(["train", "--config", write(rewards=["tests.tiny:digits"]), *trusted]) == 2
    assert "cannot import 'tests.cli.trap:Strategy'" in capsys.readouterr().err
    assert launched == []


def test_a_flag_goes_before_the_file_and_the_file_before_saved_strategies(write, launched, tmp_path):
    from trl_grpo_ext.cli._arguments import read_arguments
    from trl_grpo_ext.cli._saved import with_saved_strategies

    hub.write_strategies(tmp_path / "run", {"advantage": "rank", "kl": "k1", "rewards": "accuracy_reward"})
    config = write(strategies_from=str(tmp_path / "run"), kl="k2", beta=0.1, reward_funcs=["tests.tiny.digits"])
    values = with_saved_strategies(read_arguments(["--config", config, "--beta", "0.3"]).values)
    assert (values["advantage"], values["kl"], values["beta"]) == ("rank", "k2", 0.3)
    assert "rewards" not in values


def test_a_mistake_that_only_the_parser_sees_is_a_config_error(write):
    with pytest.raises(ConfigError, match="divisible"):
        worker("--config", write(**STRATEGIES), "--num_generations", "3")


@pytest.mark.slow
def test_through_the_real_launcher(tmp_path, write, capfd):
    assert main(["train", "--config", write(**STRATEGIES), "--num_processes", "1", "--cpu"]) == 0
    assert (tmp_path / "out" / hub.STRATEGIES_FILE).exists()
    assert main(["train", "--config", write(**STRATEGIES), "--num_generations", "3"]) == 2
    assert "trl-grpo-ext train: " in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.distributed
def test_on_two_processes_with_a_reward_function_from_the_working_folder(tmp_path, write):
    (tmp_path / "my_rewards.py").write_text(
        "import os, pathlib\n\n\n"
        "def length(completions, **columns):\n"
        "    pathlib.Path('rank-' + os.environ['RANK']).write_text(str(len(completions)))\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    config = write(**{**STRATEGIES, "rewards": "my_rewards:length"}, per_device_train_batch_size=4)
    flags = ["--num_processes", "2", "--cpu", "--main_process_port", "0"]
    command = [sys.executable, "-m", "trl_grpo_ext.cli", "train", "--config", config, *flags]
    env = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=200)
    assert result.returncode == 0, result.stderr[-3000:]
    assert {path.name: path.read_text() for path in tmp_path.glob("rank-*")} == {"rank-0": "4", "rank-1": "4"}
    assert json.loads((tmp_path / "out" / hub.STRATEGIES_FILE).read_text())["rewards"] == "my_rewards:length"
