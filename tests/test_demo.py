"""The demo: its task, its model and tokenizer, and a few steps of the whole from start to end."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from trl_grpo_ext.cli import main
from trl_grpo_ext.demo import DemoSettings
from trl_grpo_ext.demo.model import build_model, build_tokenizer
from trl_grpo_ext.demo.task import LIMIT, Problem, correct, measure, sloppy_line, split_problems
from trl_grpo_ext.demo.warmstart import IGNORED, encode_lines, warm_start


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """The output folder of a short run of the command on a tiny model, with what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "mine.txt").write_text("kept")
    with pytest.MonkeyPatch.context() as patch:
        from trl_grpo_ext import demo

        real = demo.DemoSettings
        small = {"hidden": 32, "layers": 2, "samples": 2}
        patch.setattr(demo, "DemoSettings", lambda **given: real(**given, **small))
        patch.setattr(sys, "stdout", printed := io.StringIO())
        status = main(["demo", "--output", str(folder), "--steps", "3", "--warm-steps", "80", "--seed", "1"])
    assert status == 0
    return folder, printed.getvalue()


class TestTask:
    def test_held_out_sums_are_seen_in_neither_order(self):
        split = split_problems(random.Random(0))
        assert len(split.train) + len(split.held_out) == LIMIT**2
        seen = {frozenset(problem) for problem in split.train}
        assert not any(frozenset(problem) in seen for problem in split.held_out)
        assert 60 <= len(split.held_out) <= 90
        assert split == split_problems(random.Random(0)) != split_problems(random.Random(1))

    def test_marks_do_not_make_an_answer_wrong(self):
        assert correct(["19", "19!!!!", "9", "190", "", "1!9"], ["19"] * 6) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]

    def test_sloppy_lines_are_wrong_as_often_as_asked(self):
        rng = random.Random(0)
        problem = Problem(7, 12)
        lines = [sloppy_line(problem, rng, wrong=0.4, marks=4) for _ in range(2000)]
        assert all(line.startswith("07+12=") and line.count("!") <= 4 for line in lines)
        wrong = [line for line in lines if not line.removeprefix("07+12=").startswith("19")]
        assert len(wrong) / len(lines) == pytest.approx(0.4, abs=0.05)
        assert sloppy_line(problem, rng, wrong=0.0, marks=0) == "07+12=19"

    def test_wrong_sums_stay_in_range(self):
        rng = random.Random(0)
        for problem in (Problem(0, 0), Problem(19, 19)):
            lines = {sloppy_line(problem, rng, wrong=1.0, marks=0) for _ in range(200)}
            assert all(len(line) == 8 and 0 <= int(line[6:]) <= 38 for line in lines)
            assert f"{problem.prompt}{problem.answer}" not in lines


class TestModel:
    def test_the_tokenizer_round_trips_through_disk(self, tokenizer, tmp_path):
        from transformers import AutoTokenizer

        tokenizer.save_pretrained(tmp_path)
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        for one in (tokenizer, loaded):
            ids = one(["7+1=8!", "07+12="], padding=True)["input_ids"]
            assert [len(row) for row in ids] == [6, 6]
            assert one.batch_decode(ids, skip_special_tokens=True) == ["7+1=8!", "07+12="]
            assert one(["1", "11"], padding=True)["attention_mask"] == [[0, 1], [1, 1]]

    def test_only_answers_are_learnt(self, tokenizer):
        batch = encode_lines(tokenizer, ["07+12=19", "07+12=19!!"])
        answers = [[label for label in row if label != IGNORED] for row in batch["labels"].tolist()]
        assert [tokenizer.decode(row) for row in answers] == ["19<eos>", "19!!<eos>"]

    def test_measuring_leaves_the_random_state_and_the_mode(self, tokenizer):
        torch.manual_seed(3)
        model = build_model(tokenizer, hidden=32, layers=1).train()
        state = torch.random.get_rng_state()
        first = measure(model, tokenizer, [Problem(1, 2), Problem(3, 4)], samples=4, seed=0)
        assert torch.equal(torch.random.get_rng_state(), state)
        assert model.training
        assert first == measure(model, tokenizer, [Problem(1, 2), Problem(3, 4)], samples=4, seed=0)
        assert (first.samples, first.problems) == (8, 2)

    def test_the_warm_start_learns(self, tokenizer):
        torch.manual_seed(0)
        model = build_model(tokenizer, hidden=32, layers=1)
        losses: list[float] = []
        warm_start(
            model, tokenizer, [Problem(1, 2), Problem(3, 4)], steps=40, wrong=0.0, marks=0, rng=random.Random(0),
            on_step=lambda step, loss: losses.append(loss),
        )  # fmt: skip
        assert len(losses) == 40
        assert losses[-1] < 0.5 * losses[0]


class TestCommand:
    def test_it_writes_its_files_and_leaves_others(self, output):
        folder, _ = output
        assert (folder / "mine.txt").read_text() == "kept"
        strategies = json.loads((folder / "adapter" / "grpo_strategies.json").read_text())
        assert strategies["advantage"]["kind"] == "rank"
        assert strategies["kl"]["kind"] == "k3"
        assert "length_penalty" in json.dumps(strategies["rewards"])
        assert "## Training strategies" in (folder / "adapter" / "README.md").read_text()
        plots = {path.stem for path in (folder / "plots").glob("*.png")}
        assert {"reward", "kl", "length", "advantages"} <= plots
        assert (folder / "report.html").read_text().count("data:image/png;base64,") == len(plots)

    def test_what_the_report_needs_is_saved(self, output):
        from trl_grpo_ext.report import RunRecord
        from trl_grpo_ext.report.page import render

        folder, _ = output
        record = RunRecord.load(folder / "run.json")
        assert [entry["step"] for entry in record.log_history if "reward" in entry] == [1, 2, 3]
        assert len(record.batch.scores) == 64
        assert all(row.label in render(record, {}) for row in record.summary)

    def test_it_prints_a_table_and_plain_progress(self, output):
        _, text = output
        assert "\r" not in text
        assert "GRPO 3/3" in text
        for label in ("held-out accuracy", "completion length", "training reward", "KL", "seconds"):
            assert label in text

    def test_the_printed_code_loads_the_trained_model(self, output):
        folder, text = output
        code = text[text.index("from peft") :]
        scope: dict = {}
        exec(compile(code, "printed", "exec"), scope)
        model = scope["model"]
        saved = load_file(folder / "adapter" / "adapter_model.safetensors")
        loaded = {name.replace(".default", ""): weight for name, weight in model.named_parameters() if "lora_" in name}
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
        assert scope["tokenizer"].decode(scope["inputs"]["input_ids"][0]) == "07+12="

    def test_help_imports_nothing_heavy(self):
        code = (
            "import sys\nfrom trl_grpo_ext.cli import main\n"
            "try: main(['demo', '--help'])\nexcept SystemExit: pass\n"
            "print(sorted({'torch', 'trl', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules)))"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert result.stdout.strip().endswith("[]")


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--steps", "0"], "`steps` must be"),
            (["--warm-steps", "0"], "`warm_steps` must be"),
            (["--seed", "-1"], "`seed` must be"),
        ],
    )
    def test_values_out_of_range(self, arguments, message, capsys):
        assert main(["demo", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1

    def test_an_output_that_is_a_file(self, tmp_path, capsys):
        (tmp_path / "file").write_text("kept")
        assert main(["demo", "--output", str(tmp_path / "file")]) == 2
        error = capsys.readouterr().err
        assert "--output" in error
        assert error.count("\n") == 1
        assert (tmp_path / "file").read_text() == "kept"

    def test_settings_are_checked_at_construction(self):
        with pytest.raises(ValueError, match="samples"):
            DemoSettings(samples=0)


class TestBar:
    def test_on_a_terminal_it_redraws_one_line(self):
        from trl_grpo_ext.cli.demo import Bar

        class Terminal(io.StringIO):
            def isatty(self):
                return True

        stream = Terminal()
        bar = Bar(stream)
        for step in range(1, 11):
            bar("grpo", step, 10, {"reward": 0.5, "kl": 0.1})
        bar("unheard of", 1, 1, {})
        lines = stream.getvalue().split("\r")
        assert len(lines) == 11
        assert max(map(len, lines)) <= 80
        assert stream.getvalue().endswith("\n")
        assert stream.getvalue().count("\n") == 1
        assert "GRPO 10/10  reward 0.500  kl 0.100" in lines[-1]
