"""The command: help, unknown commands, and the advantages table."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from trl_grpo_ext.cli import COMMANDS, main


def test_help_lists_every_command(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    assert f"trl-grpo-ext {name}" in capsys.readouterr().out


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom trl_grpo_ext.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'trl', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip().endswith("[]")


def test_an_unknown_command_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["advantage"])
    assert stopped.value.code == 2
    assert "unknown command 'advantage'; did you mean 'advantages'?" in capsys.readouterr().err


def test_advantages_prints_the_worked_example(capsys):
    assert main(["advantages"]) == 0
    rows = {line.rsplit("  ", 4)[0].strip(): line.split() for line in capsys.readouterr().out.splitlines()}
    # mean 2.25, population std sqrt((1.25^2 + 0.25^2 + 1.75^2 + 0.25^2) / 4) = 1.0897
    assert next(v for k, v in rows.items() if "ddof=0" in k)[-4:] == ["-1.1471", "-0.2294", "1.6059", "-0.2294"]
    assert next(v for k, v in rows.items() if k.startswith("rank"))[-4:] == ["-0.5000", "0.0000", "0.5000", "0.0000"]


def test_advantages_of_given_rewards_and_strategy(capsys):
    spec = '{"kind": "zscore", "ddof": 0, "eps": 0}'
    assert main(["advantages", "1", "2", "none", "--strategy", spec, "--strategy", "rank", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["rewards"] == [1.0, 2.0, None]
    assert printed["advantages"] == {spec: [-1.0, 1.0, 0.0], "rank": [-0.5, 0.5, 0.0]}


def test_negative_numbers_in_any_form_are_no_flags(capsys):
    assert main(["advantages", "-1.5", "-2e3", "-inf", "--strategy", "rank", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"rewards": [-1.5, -2000.0, None], "advantages": {"rank": [0.5, -0.5, 0.0]}}
    with pytest.raises(SystemExit):
        main(["advantages", "1", "-x"])


def test_ctrl_c_is_one_line_and_the_status_of_shells(monkeypatch, capsys):
    from trl_grpo_ext.cli import strategies

    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(strategies, "run", interrupted)
    assert main(["strategies"]) == 130
    assert capsys.readouterr().err == "trl-grpo-ext strategies: interrupted\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["1", "x"], "a reward must be a number"),
        (["1", "2", "--strategy", "rnak"], "did you mean 'rank'"),
        (["1", "2", "--strategy", "{oops"], "not valid JSON"),
        (["1", "2", "--lengths", "3"], "must give 2 lengths"),
        (
            ["1", "2", "--lengths", "99999999999999999999", "5"],
            "`lengths[0]` must be an integer >= 0 and <= 9",
        ),
        (["1", "2", "--lengths", "5", "-3"], "`lengths[1]` must be an integer >= 0"),
    ],
)
def test_user_errors_end_in_one_line_and_status_2(arguments, message, capsys):
    assert main(["advantages", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_reader_that_has_had_enough_is_no_error():
    command = [sys.executable, "-m", "trl_grpo_ext.cli", "strategies", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert not process.stderr.read()
        assert process.wait(timeout=60) == 141


def test_a_strategy_from_the_working_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_advantages.py").write_text("from trl_grpo_ext import Rank\n\n\nclass Own(Rank):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["advantages", "1", "2", "--strategy", "my_advantages:Own"]) == 0
    assert "-0.5000    0.5000" in capsys.readouterr().out
