"""`RewardModel`: TRL's scores, every architecture in 4-bit, batching, and what it keeps apart from the policy."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import threading
import time
import warnings
from itertools import combinations
from pathlib import Path

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from tests.rewards.models import ARCHITECTURES, CHAT_TEMPLATE
from tests.tiny import ALPHABET, PROMPTS, arguments, prompts
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer
from trl_grpo_ext.errors import CompatibilityError, ConfigError
from trl_grpo_ext.rewards import LengthPenalty, RewardModel, quantized
from trl_grpo_ext.specs import from_spec, to_spec


def texts(n, longest=12, seed=0):
    """Return n prompts and completions of various lengths."""
    generator = random.Random(seed)
    completions = ["".join(generator.choices(ALPHABET, k=generator.randint(1, longest))) for _ in range(n)]
    return [PROMPTS[i % len(PROMPTS)] for i in range(n)], completions


def chat(plain_prompts, plain_completions):
    return (
        [[{"role": "user", "content": text}] for text in plain_prompts],
        [[{"role": "assistant", "content": text}] for text in plain_completions],
    )


def kendall(a, b):
    """Kendall's tau of two rankings without ties."""
    signs = [(a[i] - a[j]) * (b[i] - b[j]) > 0 for i, j in combinations(range(len(a)), 2)]
    return 2 * sum(signs) / len(signs) - 1


def stock_scores(reward_dir, folder, prompts_, completions, tokenizer=None):
    """Score as TRL does with a reward model given by its folder."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(reward_dir)  # any will do
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        args = arguments(GRPOConfig, folder)
        trainer = GRPOTrainer(policy, reward_dir, args, train_dataset=prompts(), reward_processing_classes=tokenizer)
    inputs = [{"prompt": prompt} for prompt in prompts_]
    return trainer._calculate_rewards(inputs, prompts_, completions, [[0]] * len(inputs))[:, 0].tolist()


# TRL's scores


def test_equals_trl_on_plain_prompts(reward_dir, tmp_path):
    batch = texts(24)
    ours = RewardModel(reward_dir, bits=None)(*batch)
    assert ours == pytest.approx(stock_scores(reward_dir, tmp_path, *batch), abs=1e-4)
    assert max(ours) - min(ours) > 1


def test_equals_trl_on_conversational_prompts(reward_dir, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(reward_dir)
    tokenizer.chat_template = CHAT_TEMPLATE
    batch = chat(*texts(12))
    stock = stock_scores(reward_dir, tmp_path, *batch, tokenizer=tokenizer)
    assert RewardModel(reward_dir, bits=None, chat_template=CHAT_TEMPLATE)(*batch) == pytest.approx(stock, abs=1e-4)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert RewardModel(reward_dir, bits=None, tokenizer=tmp_path / "tokenizer")(*batch) == pytest.approx(
        stock, abs=1e-4
    )
    (tmp_path / "chat.jinja").write_text(CHAT_TEMPLATE)
    for file in (tmp_path / "chat.jinja", str(tmp_path / "chat.jinja")):
        from_file = RewardModel(reward_dir, bits=None, chat_template=file)
        assert from_file(*batch) == pytest.approx(stock, abs=1e-4)


# Quantization


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("bits", [4, 8])
def test_the_head_is_a_plain_linear_and_the_ranking_agrees(classifier_dir, architecture, bits):  # CASES 28
    folder = classifier_dir(architecture)
    quantized = RewardModel(folder, bits=bits)
    batch = texts(32)
    scores = quantized(*batch)
    kinds = {name: type(part).__name__ for name, part in quantized.module.named_modules() if hasattr(part, "weight")}
    head = {name: kind for name, kind in kinds.items() if name.split(".")[0] in ("score", "classifier", "pooler")}
    assert head
    assert set(head.values()) == {"Linear"}
    assert kinds.get("bert.pooler.dense", "Linear") == "Linear"
    assert sum(kind == {4: "Linear4bit", 8: "Linear8bitLt"}[bits] for kind in kinds.values()) >= 12
    assert kendall(scores, RewardModel(folder, bits=None)(*batch)) > {4: 0.6, 8: 0.9}[bits]


def test_a_trained_reward_model_keeps_its_ranking_in_4_bit(reward_dir):
    batch = texts(48)
    full = RewardModel(reward_dir, bits=None)(*batch)
    for options in ({}, {"double_quant": False}, {"quant_type": "fp4"}, {"dtype": "bfloat16"}):
        quantized = RewardModel(reward_dir, bits=4, **options)
        assert kendall(quantized(*batch), full) > 0.85, options
        assert next(quantized.module.score.parameters()).dtype == getattr(torch, options.get("dtype", "float32"))


def test_without_bitsandbytes_the_error_says_what_to_install(reward_dir, monkeypatch):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else found(name))
    with pytest.raises(CompatibilityError, match=r"pip install 'trl-grpo-ext\[quant\]'"):
        RewardModel(reward_dir, bits=4)(*texts(2))
    assert RewardModel(reward_dir, bits=None)(*texts(2))


# Batching


@pytest.mark.parametrize("architecture", ["LlamaForSequenceClassification", "RobertaForSequenceClassification"])
def test_budget_sorting_and_deduplication_change_no_score(classifier_dir, architecture):  # CASES 31
    folder = classifier_dir(architecture)
    batch = texts(40, longest=60)
    batch = (batch[0] + batch[0][:9], batch[1] + batch[1][:9])
    reward = RewardModel(folder, bits=None)
    one_by_one = [reward([p], [c])[0] for p, c in zip(*batch, strict=True)]
    for budget in (1, 64, 300, 10**6):
        assert RewardModel(folder, bits=None, token_budget=budget)(*batch) == pytest.approx(one_by_one, abs=1e-5)


def test_equal_rows_are_computed_once(reward_dir):
    reward = RewardModel(reward_dir, bits=None).load()
    rows = []
    reward.module.register_forward_pre_hook(
        lambda m, a, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    scores = reward(["1+1="] * 8, ["2", "3"] * 4)
    assert sum(rows) == 2
    assert scores == scores[:2] * 4


def test_out_of_memory_is_survived(reward_dir, caplog):
    reward, batch = RewardModel(reward_dir, bits=None).load(), texts(32)
    expected = reward(*batch)

    def limited(module, args, kwargs):
        if kwargs["input_ids"].numel() > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")

    reward.module.register_forward_pre_hook(limited, with_kwargs=True)
    assert reward(*batch) == pytest.approx(expected, abs=1e-5)
    assert "the token budget is now" in caplog.text
    caplog.clear()
    assert reward(*batch) == pytest.approx(expected, abs=1e-5)
    assert caplog.text == ""  # the smaller budget is kept


# Reading the text


def test_over_long_rows_lose_their_beginning(reward_dir):
    metrics = {}
    reward = RewardModel(reward_dir, bits=None, max_length=6)
    scores = reward(["1+1=", "1+1="], ["abcdef", "9"], log_metric=metrics.__setitem__)
    assert scores == pytest.approx(RewardModel(reward_dir, bits=None)(["", "1+1="], ["abcdef", "9"]), abs=1e-6)
    assert metrics == {f"rewards/{reward.__name__}/truncated_frac": 0.5}


def test_the_models_own_limit_holds_without_max_length(classifier_dir):
    for architecture in ("BertForSequenceClassification", "RobertaForSequenceClassification"):
        reward = RewardModel(classifier_dir(architecture), bits=None)
        assert reward(["a"], ["b" * 500])[0] is not None
        limit = {"B": 128, "R": 127}[architecture[0]]  # RoBERTa's positions start behind the padding index
        assert reward(["a"], ["b" * limit]) == reward(["a"], ["b" * (limit + 9)])
        assert RewardModel(reward.model, bits=None, max_length=limit)(["a"], ["b" * 500])[0] is not None
        with pytest.raises(ConfigError, match=f"`max_length` must be <= {limit}, the most that .* got {limit + 1}"):
            RewardModel(reward.model, bits=None, max_length=limit + 1).load()
    rotary = classifier_dir("LlamaForSequenceClassification")  # computes positions, so it can go beyond what it says
    assert RewardModel(rotary, bits=None, max_length=10**5)(["a"], ["b"])[0] is not None


def test_pad_equal_to_eos_reads_the_last_real_token(reward_dir, tmp_path):  # CASES 30
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(reward_dir)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path)
    reward = RewardModel(reward_dir, bits=None, tokenizer=str(tmp_path))
    completions = ["22<eos>", "abcd<eos>", "3a", "<eos>", "2<eos><eos>"]
    scores = reward(["1+1="] * 5, completions)
    module = AutoModelForSequenceClassification.from_pretrained(reward_dir)
    for completion, score in zip(completions, scores, strict=True):
        ids = tokenizer("1+1=" + completion, return_tensors="pt", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            hidden = module.model(ids).last_hidden_state
            assert score == pytest.approx(module.score(hidden)[0, -1, 0].item(), abs=1e-5)


def test_messages_without_a_template_are_an_error(reward_dir):
    with pytest.raises(ConfigError, match="no chat template; give `chat_template`"):
        RewardModel(reward_dir, bits=None)(*chat(*texts(2)))


def test_a_template_that_refuses_is_an_error_that_names_the_model(reward_dir):
    reward = RewardModel(reward_dir, bits=None, chat_template="{{ raise_exception('system role not supported') }}")
    with pytest.raises(ConfigError, match="does not accept these messages: system role not supported"):
        reward(*chat(*texts(2)))
    with pytest.raises(ConfigError, match="`chat_template` can't be read"):
        RewardModel(reward_dir, bits=None, chat_template="nowhere.jinja").load()


def test_special_tokens_on_request(classifier_dir, tmp_path, monkeypatch):
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    folder = classifier_dir("BertForSequenceClassification")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A <unk>", special_tokens=[("<eos>", 1), ("<unk>", 2)]
    )
    tokenizer.save_pretrained(tmp_path)
    plain, special = (
        RewardModel(folder, bits=None, tokenizer=str(tmp_path), add_special_tokens=flag, max_length=8).load()
        for flag in (False, True)
    )
    batch = (["1", "1"], ["2", "abcdefgh"])
    (short, long), cut = plain.state.encoder(*batch)
    assert (len(short), len(long), cut) == (2, 8, 1)
    (with_special, long), cut = special.state.encoder(*batch)
    assert with_special == [1, *short, 2]
    assert (long[0], long[-1], len(long), cut) == (1, 2, 8, 1)
    monkeypatch.setattr("copy.deepcopy", None)  # the tokenizer that cuts was copied once
    assert special.state.encoder(*batch)[0] == [with_special, long]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_no_finite_score_is_none_with_a_warning(reward_dir, caplog, value):
    reward = RewardModel(reward_dir, bits=None).load()
    ((letter,),), _ = reward.state.encoder([""], ["a"])

    def spoil(module, args, kwargs, output):
        output.logits[(kwargs["input_ids"] == letter).any(dim=1)] = value

    reward.module.register_forward_hook(spoil, with_kwargs=True)
    scores = reward(["1+1="] * 3, ["2", "a", "3"])
    assert [score is None for score in scores] == [False, True, False]
    assert "gave no finite score to 1 of 3 rows" in caplog.text


def test_a_row_without_any_text_is_not_scored(reward_dir):
    scores = RewardModel(reward_dir, bits=None)(["", "1"], ["", "2"])
    assert [score is None for score in scores] == [True, False]
    assert RewardModel(reward_dir, bits=None)([], []) == []


def test_several_outputs(classifier_dir, tiny_model_dir, tmp_path):
    from tests.rewards.models import random_classifier

    folder = random_classifier(tmp_path, tiny_model_dir, "LlamaForSequenceClassification", num_labels=3)
    columns = [RewardModel(folder, bits=None, label=label)(["1"], ["2"])[0] for label in range(3)]
    assert len(set(columns)) == 3
    with pytest.raises(ConfigError, match=r"`label` is 3, but .* has 3 outputs"):
        RewardModel(folder, bits=None, label=3).load()


def test_one_batch_at_a_time(reward_dir):
    """A try that `RetryReward` has given up may still run when the next one comes."""
    reward, active, most = RewardModel(reward_dir, bits=None).load(), [], []

    def enter(*args):
        active.append(1)
        most.append(len(active))
        time.sleep(0.1)

    reward.module.register_forward_pre_hook(enter)
    reward.module.register_forward_hook(lambda *args: active.pop() and None)
    threads = [threading.Thread(target=reward, args=(["1"], ["2"])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1]


# Loading


def test_loads_on_first_use_pickles_before_and_after(reward_dir):
    reward = RewardModel(reward_dir, bits=None)
    assert reward.module is None
    before = pickle.dumps(reward)
    scores = reward(["1"], ["2"])
    assert reward.module is not None
    for data in (before, pickle.dumps(reward)):
        copy = pickle.loads(data)
        assert copy == reward
        assert copy.module is None
        assert copy(["1"], ["2"]) == scores
    assert len(pickle.dumps(reward)) < 2000
    assert not any(parameter.requires_grad for parameter in reward.module.parameters())
    assert not reward.module.training


def test_loading_draws_no_random_numbers(reward_dir):
    state = torch.get_rng_state()
    RewardModel(reward_dir, bits=None)(["1"], ["2"])
    RewardModel(reward_dir, bits=4)(["1"], ["2"])
    assert torch.equal(state, torch.get_rng_state())


def test_a_model_without_a_trained_head_is_refused(tiny_model_dir):
    with pytest.raises(ConfigError, match=r"is no reward model: it has no trained score head \(missing score.weight\)"):
        RewardModel(tiny_model_dir, bits=None).load()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_saved_quantized_is_loaded_where_it_stays(classifier_dir, tmp_path, monkeypatch, bits):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, BitsAndBytesConfig

    plain = classifier_dir("LlamaForSequenceClassification")
    config = BitsAndBytesConfig(**{f"load_in_{bits}bit": True}, llm_int8_skip_modules=["score"])
    AutoModelForSequenceClassification.from_pretrained(plain, quantization_config=config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(plain).save_pretrained(tmp_path)
    load, seen = AutoModelForSequenceClassification.from_pretrained, []
    monkeypatch.setattr(
        AutoModelForSequenceClassification, "from_pretrained", lambda *a, **k: seen.append(k) or load(*a, **k)
    )
    assert RewardModel(tmp_path, bits=None)(["1"], ["2"])[0] is not None
    assert seen[0]["device_map"] == {"": "cpu"}


def test_embeddings_are_quantized_some_rows_at_a_time(monkeypatch):
    weight = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    whole = quantized.Int8Embedding(weight)
    monkeypatch.setattr(quantized, "_ROWS", 3)
    parts = quantized.Int8Embedding(weight)
    assert torch.equal(parts.weight, whole.weight)
    assert torch.equal(parts.scale, whole.scale)


def test_loads_whole_in_a_run_that_shards_its_policy(reward_dir, monkeypatch):
    from transformers import AutoModelForSequenceClassification
    from transformers.integrations import deepspeed

    class Config:
        def is_zero3(self):
            return True

    seen = []
    load = AutoModelForSequenceClassification.from_pretrained

    def spy(*args, **kwargs):
        seen.append((deepspeed.is_deepspeed_zero3_enabled(), os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"]))
        return load(*args, **kwargs)

    config = Config()
    deepspeed.set_hf_deepspeed_config(config)
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", spy)
    try:
        RewardModel(reward_dir, bits=None).load()
        assert seen == [(False, "false")]
        assert deepspeed.is_deepspeed_zero3_enabled()
        assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"
    finally:
        deepspeed.unset_hf_deepspeed_config()


def test_policy_and_reward_model_settings_stay_apart(tiny_model_dir, reward_dir, tmp_path):  # CASES 29
    kwargs = {"dtype": "bfloat16", "revision": "main", "attn_implementation": "eager"}
    given = dict(kwargs)
    reward = RewardModel(reward_dir, bits=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        args = arguments(GRPOExtConfig, tmp_path, model_init_kwargs=kwargs, max_steps=1)
        trainer = GRPOExtTrainer(tiny_model_dir, LengthPenalty(reward, 0.01, 3), args, train_dataset=prompts())
    trainer.train()
    assert trainer.model.dtype == torch.bfloat16
    assert reward.module.dtype == torch.float32
    assert reward.module.is_loaded_in_4bit
    assert not getattr(trainer.model, "is_loaded_in_4bit", False)
    assert {key: args.model_init_kwargs[key] for key in given} == given
    name = f"length_penalty({reward.__name__})"
    log = trainer.state.log_history[0]
    assert log[f"rewards/{name}/std"] > 0
    assert log[f"rewards/{reward.__name__}/truncated_frac"] == 0


def test_specs(reward_dir):
    spec = {"kind": "length_penalty", "alpha": 0.1, "target": 9, "inner": {"kind": "reward_model", "model": reward_dir}}
    reward = from_spec(spec, family="reward")
    assert reward.inner == RewardModel(Path(reward_dir))
    written = json.loads(json.dumps(to_spec(reward)))
    assert written["inner"]["bits"] == 4
    assert "state" not in written["inner"]
    assert from_spec(written, family="reward") == reward
    assert repr(RewardModel("m", dtype=torch.bfloat16)).startswith("RewardModel(model='m', bits=4, quant_type='nf4'")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, "`bits` must be one of 4, 8, None, got 3"),
        ({"quant_type": "nf5"}, "`quant_type` must be one of"),
        ({"dtype": "float64"}, "`dtype` must be one of"),
        ({"max_length": 0}, "`max_length` must be"),
        ({"token_budget": 0}, "`token_budget` must be"),
        ({"label": -1}, "`label` must be"),
        ({"double_quant": "yes"}, "`double_quant` must be True or False"),
        ({"trust_remote_code": 1}, "`trust_remote_code` must be True or False"),
        ({"revision": 3}, "`revision` must be a branch, tag or commit of the Hub, or None, got 3"),
        ({"tokenizer": []}, r"`tokenizer` must be a Hub id, a folder or None, got \[\]"),
        ({"chat_template": 4}, "`chat_template` must be a template, the name of a .jinja file or None, got 4"),
        ({"chat_template": float("nan")}, "got nan"),
        ({"model": ""}, "`model` must be a Hub id or a folder, got ''"),
        ({"model": 3}, "`model` must be a Hub id or a folder, got 3"),
    ],
)
def test_bad_values_fail_at_construction(options, message):
    with pytest.raises(ConfigError, match=message):
        RewardModel(**{"model": "model", **options})
    with pytest.raises(ConfigError, match="`model` must be a Hub id or a folder, got Linear"):
        RewardModel(torch.nn.Linear(1, 1))


def test_bits_8_is_quiet(reward_dir, caplog):
    with caplog.at_level(logging.WARNING):
        RewardModel(reward_dir, bits=8)(["1"], ["2"])
    assert "will be cast" not in caplog.text
