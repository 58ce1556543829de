"""`trl-grpo-ext report`: pages from what runs leave in their folders."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from trl_grpo_ext import ConfigError
from trl_grpo_ext.cli import main
from trl_grpo_ext.report import names_of, read_run, write_comparison


def left_behind(folder, step=10, strategies=None, **changes):
    """Write what a run leaves: a checkpoint with its log and strategies."""
    log = [{"step": s, "reward": s / 10, "kl": 0.0, "completions/mean_length": 20.0 - s} for s in range(1, step + 1)]
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    content = {"global_step": step, "log_history": log, **changes}
    (checkpoint / "trainer_state.json").write_text(json.dumps(content))
    if strategies is not None:
        saved = {**strategies, "_meta": {"versions": {"trl": "1.16.0"}}}
        (checkpoint / "grpo_strategies.json").write_text(json.dumps(saved))
    return folder


def cells(page):
    rows = re.findall(r"<tr.*?>(.*?)</tr>", page.read_text(encoding="utf-8"))
    return [re.findall(r"<t[dh]>(.*?)</t[dh]>", row) for row in rows]


def test_a_run_that_was_trained(tmp_path, settings, capsys):
    """One that the `train` command made, with its real log."""
    from trl_grpo_ext.cli._worker import train

    config = tmp_path / "run.yaml"
    keys = {**settings, "save_strategy": "steps", "rewards": "tests.tiny:digits", "advantage": "rank"}
    config.write_text(yaml.safe_dump(keys))
    train(["--config", str(config)])
    state = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    rewards = [entry["reward"] for entry in state["log_history"] if "reward" in entry]
    assert len(rewards) == 2
    capsys.readouterr()

    assert main(["report", str(tmp_path / "out")]) == 0
    page = tmp_path / "out" / "report.html"
    assert capsys.readouterr().out.strip() == str(page)
    first, last = rewards
    assert ["reward", f"{first:.4g}", f"{last:.4g}", f"{last - first:+.4g}"] in cells(page)
    text = page.read_text(encoding="utf-8")
    assert "kind: rank" in text
    assert "trl 1." in text
    assert {path.name for path in (tmp_path / "out" / "plots").iterdir()} >= {"reward.png", "length.png"}


def test_the_newest_checkpoint_by_number_is_read(tmp_path):
    for step in (9, 100, 20):
        left_behind(tmp_path / "run", step, {"advantage": {"kind": "rank"}})
    record = read_run(tmp_path / "run")
    assert len(record.log_history) == 100
    assert record.strategies == {"advantage": {"kind": "rank"}}
    assert record.versions == {"trl": "1.16.0"}
    assert len(read_run(tmp_path / "run" / "checkpoint-9").log_history) == 9


def test_two_runs_are_compared(tmp_path, capsys):
    a = left_behind(tmp_path / "a", 12, {"advantage": {"kind": "rank"}})
    b = left_behind(tmp_path / "b", 24)
    assert main(["report", str(a), str(b), "--output", str(tmp_path / "both")]) == 0
    page = tmp_path / "both" / "report.html"
    head, first, second = cells(page)[:3]
    arrow = "\N{RIGHTWARDS ARROW}"
    assert head[1:] == ["reward", "KL per token", "completion length, tokens"]
    # means of the first and of the last six of 12, and ten of 24: rewards 0.1 .. 1.2 and 0.1 .. 2.4
    assert first[:2] == ["a", f"0.35 {arrow} 0.95"]
    assert second[:2] == ["b", f"0.55 {arrow} 1.95"]
    text = page.read_text(encoding="utf-8")
    assert "Strategies of a" in text
    assert "kind: rank" in text
    assert "Strategies of b" not in text  # it had none
    assert text.count("data:image/png;base64,") == 3
    assert not (a / "report.html").exists()


def test_names_tell_runs_apart(tmp_path):
    assert names_of([tmp_path / "a" / "out", tmp_path / "b" / "out"]) == ["a/out", "b/out"]
    with pytest.raises(ConfigError, match="named twice"):
        names_of([tmp_path / "a", tmp_path / "x" / ".." / "a"])


def test_too_many_runs_to_tell_apart(tmp_path):
    record = read_run(left_behind(tmp_path / "a"))
    with pytest.raises(ConfigError, match="takes 2 to 8 runs, got 9"):
        write_comparison({str(i): record for i in range(9)}, tmp_path / "both")


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, "is no folder"),
        (lambda folder: folder.mkdir(), "neither run.json nor a checkpoint"),
        (lambda folder: left_behind(folder, log_history=[]), "holds no log"),
        (lambda folder: left_behind(folder, log_history="?"), "holds no log"),
        (lambda folder: (left_behind(folder) / "checkpoint-10/trainer_state.json").write_text("{"), "can't be read"),
        (lambda folder: (left_behind(folder) / "checkpoint-10/trainer_state.json").write_text("[]"), "hold an object"),
        (lambda folder: (left_behind(folder) / "run.json").write_text("{}"), "not the record of a run"),
    ],
)
def test_what_holds_no_run_is_an_error(tmp_path, capsys, prepare, message):
    prepare(tmp_path / "run")
    assert main(["report", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "run" in error
    assert not list(Path(tmp_path).glob("run/report.html"))


def test_an_output_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["report", str(left_behind(tmp_path / "run")), "--output", str(tmp_path / "file")]) == 2
    assert "cannot write the report" in capsys.readouterr().err
