"""Reports: what is read from a log, the distributions, and a page that needs nothing but itself."""

from __future__ import annotations

import builtins
import copy
import dataclasses
import math
import pickle
import re

import pytest
import torch

from trl_grpo_ext.advantages import Rank, ZScore
from trl_grpo_ext.batch import RewardBatch
from trl_grpo_ext.errors import ConfigError, GRPOExtError
from trl_grpo_ext.report import (
    BatchTap,
    Row,
    RunRecord,
    before_and_after,
    default_strategies,
    ends,
    require_matplotlib,
    series,
    write_plots,
    write_report,
)
from trl_grpo_ext.report.plots import moving_average
from trl_grpo_ext.specs import kinds

LOG = [
    {"step": step, "reward": step / 10, "kl": 0.1 * step, "completions/mean_length": 5 - step / 10, "loss": 0.0}
    for step in range(1, 13)
] + [{"step": 12, "train_runtime": 3.0}]


def batch(rewards=(1.0, 2.0, 4.0, 2.0), **changes) -> RewardBatch:
    n = len(rewards)
    content = {
        "rewards": torch.tensor(rewards).unsqueeze(1),
        "weights": torch.ones(1),
        "lengths": torch.arange(1, n + 1),
        "truncated": torch.zeros(n, dtype=torch.bool),
        "num_generations": 4,
        "names": ("quality",),
    }
    return RewardBatch(**{**content, **changes})


def record(**changes) -> RunRecord:
    content = {
        "title": "A <run> & its report",
        "log_history": LOG,
        "summary": [Row(label="accuracy", before="10 %", after="60 %", change="+50 points")],
        "strategies": {"advantage": {"kind": "rank"}, "kl": {"kind": "k3"}},
        "batch": batch(),
        "guides": {"completions/mean_length": (3.0, "target")},
        "usage": "load('<here>')",
    }
    return RunRecord(**{**content, **changes})


class TestLog:
    def test_series_skips_entries_without_the_value(self):
        assert series([*LOG[:2], {"step": 3, "reward": None}, {"reward": 1.0}], "reward") == ([1, 2], [0.1, 0.2])
        assert series(LOG, "nothing") == ([], [])

    def test_ends_are_means_of_the_first_and_last_values(self):
        # rewards 0.1 .. 1.2: (0.1 + 0.2) / 2 and (1.1 + 1.2) / 2
        assert ends(LOG, "reward", window=2) == pytest.approx((0.15, 1.15))
        assert ends(LOG, "nothing") is None

    def test_the_ends_of_a_short_log_do_not_overlap(self):
        assert ends(LOG[:3], "reward") == pytest.approx((0.1, 0.3))
        assert ends(LOG[:12], "reward") == pytest.approx((0.35, 0.95))  # six values each
        assert ends(LOG[:1], "reward") == (0.1, 0.1)

    def test_moving_average_grows_into_its_window(self):
        assert moving_average([1.0, 3.0, 5.0, 7.0], window=3) == [1.0, 2.0, 3.0, 5.0]


class TestDistributions:
    def test_every_kind_with_defaults_is_there(self):
        expected = {
            cls.kind
            for cls in kinds("advantage").values()
            if all(
                not f.init or f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
                for f in dataclasses.fields(cls)
            )
        }
        assert set(default_strategies()) == expected >= {"rank", "zscore", "mean_centered", "leave_one_out"}

    def test_before_and_after(self):
        before, after = before_and_after(batch(), {"kind": "rank"})
        assert before.values == [1.0, 2.0, 4.0, 2.0]
        assert [after[0].name, after[0].trained] == ["rank", True]
        # ranks 1, 2.5, 4, 2.5 of 4: (k - 1)/3 - 1/2
        assert after[0].values == pytest.approx([-0.5, 0.0, 0.5, 0.0])
        assert after[0].statistics() == pytest.approx(
            {"mean": 0.0, "std": math.sqrt(0.125), "min": -0.5, "max": 0.5, "zero": 0.5}
        )
        assert not any(d.trained for d in after[1:])

    def test_a_trained_strategy_with_other_fields_stands_beside_its_defaults(self):
        _, after = before_and_after(batch(), {"kind": "zscore", "ddof": 0})
        assert after[0].trained
        assert {"zscore", "zscore (defaults)"} <= {d.name for d in after}

    def test_rows_without_a_score_are_left_out(self):
        before, after = before_and_after(batch((1.0, float("nan"), 4.0, 2.0)))
        assert {len(d.values) for d in [before, *after]} == {3}
        with pytest.raises(ValueError, match="no scored completion"):
            before_and_after(batch((float("nan"),) * 4))


class TestTap:
    def test_it_passes_on_and_keeps_the_last_training_batch(self):
        class Trainer:
            advantage = ZScore()

        trainer = Trainer()
        tap = BatchTap.attach(trainer)
        training, evaluation = batch(), batch(training=False)
        output = trainer.advantage(training)
        trainer.advantage(evaluation)
        assert tap.batch is training
        assert torch.equal(output.advantages, ZScore()(training).advantages)
        assert (repr(tap), tap.kind, tap.has_state) == (repr(ZScore()), "zscore", False)

    def test_there_is_nothing_to_tap_in_a_stock_trainer(self):
        assert BatchTap.attach(object()) is None

    def test_it_can_be_copied(self):
        assert copy.deepcopy(BatchTap(Rank())).strategy == Rank()
        assert pickle.loads(pickle.dumps(BatchTap(Rank()))).strategy == Rank()


class TestRecord:
    def test_round_trip(self, tmp_path):
        scores = (1.0, float("nan"), 4.0, float("inf"))
        record(batch=batch(scores)).save(tmp_path / "run.json")
        loaded = RunRecord.load(tmp_path / "run.json")
        assert loaded.log_history == LOG
        assert loaded.summary == record().summary
        assert loaded.guides == record().guides
        assert torch.equal(loaded.batch.scores.isnan(), torch.tensor([False, True, False, True]))
        assert loaded.batch.names == ("quality",)

    @pytest.mark.parametrize("text", ["[]", "{", '{"summary": [], "batch": null, "guides": {}, "colour": 1}'])
    def test_other_files_are_refused(self, tmp_path, text):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(ConfigError, match="not the record of a run"):
            RunRecord.load(tmp_path / "run.json")


class TestPage:
    def test_the_page_needs_nothing_but_itself(self, tmp_path):
        path = write_report(record(), tmp_path)
        page = path.read_text(encoding="utf-8")
        sources = re.findall(r'(?:src|href)="([^"]*)"', page)
        assert len(sources) == 4
        assert all(source.startswith("data:image/png;base64,iVBOR") for source in sources)
        assert not re.search(r"https?://|<script|<link|@import|url\(", page)
        assert "A &lt;run&gt; &amp; its report" in page
        assert "load(&#x27;&lt;here&gt;&#x27;)" in page
        assert "kind: rank" in page
        assert all(f"<td>{kind}</td>" in page for kind in default_strategies())
        names = {"reward.png", "kl.png", "length.png", "advantages.png"}
        assert {file.name for file in (tmp_path / "plots").iterdir()} == names
        assert all(file.read_bytes()[:4] == b"\x89PNG" for file in (tmp_path / "plots").iterdir())

    def test_a_log_is_enough(self, tmp_path):
        page = write_report(RunRecord(log_history=LOG), tmp_path).read_text(encoding="utf-8")
        assert page.count("<img") == 3
        assert "normalisation" not in page

    def test_a_batch_without_scores_draws_nothing(self, tmp_path):
        assert write_plots(record(log_history=[], batch=batch((float("nan"),) * 4)), tmp_path) == {}

    def test_equal_rewards_and_outliers_can_be_drawn(self, tmp_path):
        for name, rewards in {"equal": (0.0,) * 4, "outlier": (0.0, 0.0, 0.0, 1e6)}.items():
            assert list(write_plots(record(log_history=[], batch=batch(rewards)), tmp_path / name)) != []

    def test_other_files_are_left_alone(self, tmp_path):
        (tmp_path / "plots").mkdir()
        (tmp_path / "plots" / "mine.txt").write_text("kept")
        write_report(RunRecord(log_history=LOG), tmp_path)
        assert (tmp_path / "plots" / "mine.txt").read_text() == "kept"


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=re.escape("pip install 'trl-grpo-ext[demo]'")) as error:
        require_matplotlib()
    assert isinstance(error.value, GRPOExtError)
