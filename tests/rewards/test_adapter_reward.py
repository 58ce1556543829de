"""`AdapterRewardModel`: the stand-alone model's scores from the policy's backbone, which is left as it was."""

from __future__ import annotations

import pickle
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from tests.rewards.models import reward_lora, train_reward
from tests.rewards.test_reward_model import texts
from tests.tiny import arguments, lora, prompts, save_tiny_model
from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer
from trl_grpo_ext.errors import ConfigError, StateError
from trl_grpo_ext.rewards import AdapterRewardModel, ClipReward, LengthPenalty
from trl_grpo_ext.specs import from_spec, to_spec


def tokenizer_of(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def policy_on(base, **options):
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(base, **options), lora())
    with torch.no_grad():  # not the identity, as if it had trained
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return policy.train()


def stand_alone(base, adapter, prompts_, completions, **options):
    """Score with the adapter on a sequence classifier of its own, as PEFT loads it."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    with torch.random.fork_rng():
        model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, **options)
        model = PeftModel.from_pretrained(model, adapter).eval()
    tokenizer = tokenizer_of(base)
    scores = []
    for prompt, completion in zip(prompts_, completions, strict=True):
        ids = tokenizer(prompt + completion, return_tensors="pt", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            scores.append(model(input_ids=ids).logits[0, 0].item())
    return scores


def state_of(model):
    """Everything a reward pass must leave alone."""
    return {
        "names": [(name, type(module)) for name, module in model.named_modules()],
        "modes": [module.training for module in model.modules()],
        "flags": [(name, parameter.requires_grad) for name, parameter in model.named_parameters()],
        "values": torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()]),
        "adapters": (list(model.peft_config), model.active_adapters),
        "grad": [parameter.grad is None for parameter in model.parameters()],
    }


def assert_same_state(before, after):
    assert torch.equal(before.pop("values"), after.pop("values"))
    assert before == after


def test_scores_equal_the_stand_alone_model_and_the_policy_is_untouched(tiny_model_dir, adapter_dir):
    policy, batch = policy_on(tiny_model_dir), texts(24)
    ids = policy.get_input_embeddings().weight.new_ones(1, 5, dtype=torch.int64)
    logits, before, random_state = policy(ids).logits, state_of(policy), torch.get_rng_state()
    reward = AdapterRewardModel(adapter_dir)
    reward.bind(policy, tokenizer_of(tiny_model_dir))
    scores = reward(*batch)
    assert scores == pytest.approx(stand_alone(tiny_model_dir, adapter_dir, *batch), abs=1e-5)
    assert max(scores) - min(scores) > 1
    assert_same_state(before, state_of(policy))
    assert torch.equal(policy(ids).logits, logits)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_one_backbone_in_memory(tiny_model_dir, adapter_dir):
    policy = policy_on(tiny_model_dir)
    reward = AdapterRewardModel(adapter_dir)
    reward.bind(policy, None)
    reward.load()
    shared = {parameter.data_ptr() for parameter in policy.parameters()}
    own = {name: p.numel() for name, p in reward.module.named_parameters() if p.data_ptr() not in shared}
    assert own
    assert all("lora_" in name or "score" in name for name in own)
    # A change of the backbone is seen at once: it is the same tensor.
    before = reward(["1+1="], ["2"])
    with torch.no_grad():
        policy.get_input_embeddings().weight.mul_(2)
    assert reward(["1+1="], ["2"]) != before


def test_a_quantized_policy_scores_quantized(tiny_model_dir, adapter_dir):
    from transformers import BitsAndBytesConfig

    options = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True), "device_map": {"": "cpu"}}
    batch = texts(8)
    reward = AdapterRewardModel(adapter_dir)
    reward.bind(policy_on(tiny_model_dir, **options), tokenizer_of(tiny_model_dir))
    skip = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["score"])}
    expected = stand_alone(tiny_model_dir, adapter_dir, *batch, **{**options, **skip})
    assert reward(*batch) == pytest.approx(expected, abs=1e-5)


def test_a_policy_placed_by_a_device_map(tiny_model_dir, adapter_dir):
    from accelerate import dispatch_model

    policy, batch = policy_on(tiny_model_dir), texts(8)
    dispatch_model(policy.get_base_model(), {"": "cpu"}, force_hooks=True)  # as over several devices
    reward = AdapterRewardModel(adapter_dir)
    reward.bind(policy, tokenizer_of(tiny_model_dir))
    assert reward(*batch) == pytest.approx(stand_alone(tiny_model_dir, adapter_dir, *batch), abs=1e-5)


@pytest.mark.parametrize("changes", [{"use_dora": True}, {"use_rslora": True, "rank_pattern": {"q_proj": 2}}], ids=str)
def test_other_kinds_of_lora(tiny_model_dir, tmp_path, changes):
    adapter = train_reward(tiny_model_dir, tmp_path, peft_config=reward_lora(**changes), steps=5)
    batch = texts(8)
    reward = AdapterRewardModel(adapter)
    reward.bind(policy_on(tiny_model_dir), tokenizer_of(tiny_model_dir))
    assert reward(*batch) == pytest.approx(stand_alone(tiny_model_dir, adapter, *batch), abs=1e-5)


# In a run


def run(model, folder, reward, *, resume=None, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        args = arguments(GRPOExtConfig, folder, beta=0.1, **settings)
        trainer = GRPOExtTrainer(model, reward, args, train_dataset=prompts(), peft_config=lora(), kl="k3")
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def adapter_weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad])


def test_a_run_on_one_backbone(tiny_model_dir, adapter_dir, tmp_path):
    def precomputed(prompts, completions, **kwargs):
        return stand_alone(tiny_model_dir, adapter_dir, prompts, completions)

    wrapped = LengthPenalty(ClipReward(AdapterRewardModel(adapter_dir), low=-5, high=5), alpha=0.01, target=3)
    plain = LengthPenalty(ClipReward(precomputed, low=-5, high=5), alpha=0.01, target=3)
    settings = {"max_steps": 2, "gradient_checkpointing": True}
    ours = run(tiny_model_dir, tmp_path / "ours", wrapped, **settings)
    apart = run(tiny_model_dir, tmp_path / "apart", plain, **settings)
    torch.testing.assert_close(adapter_weights(ours), adapter_weights(apart), rtol=1e-4, atol=1e-5)
    assert list(ours.model.peft_config) == ["default"]
    assert all("lora_" in name for name, p in ours.model.named_parameters() if p.requires_grad)
    names = {id(p): name for name, p in ours.model.named_parameters()}
    trained = [names[id(p)] for group in ours.optimizer.param_groups for p in group["params"]]
    assert trained == [name for name, p in ours.model.named_parameters() if p.requires_grad]


def test_checkpoints_hold_the_policy_alone_and_resume(tiny_model_dir, adapter_dir, tmp_path):
    reward = AdapterRewardModel(adapter_dir)
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "num_generations": 4}
    whole = run(tiny_model_dir, tmp_path / "run", reward, **saving)
    checkpoint = tmp_path / "run" / "checkpoint-1"
    assert not [path for path in checkpoint.iterdir() if path.is_dir()]  # PEFT would save another adapter in a folder
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)["param_groups"][0]["params"]
    assert len(saved) == sum(p.requires_grad for p in whole.model.parameters())
    from safetensors.torch import load_file

    assert all(".lora_" in name for name in load_file(checkpoint / "adapter_model.safetensors"))
    copied = tmp_path / "again"
    shutil.copytree(checkpoint, copied / "checkpoint-1")
    again = run(tiny_model_dir, copied, AdapterRewardModel(adapter_dir), resume=str(copied / "checkpoint-1"), **saving)
    torch.testing.assert_close(adapter_weights(again), adapter_weights(whole), rtol=1e-5, atol=1e-6)


# Errors


def test_it_needs_a_peft_policy_on_the_same_base(tiny_model_dir, adapter_dir, tmp_path):
    from transformers import AutoModelForCausalLM

    reward = AdapterRewardModel(adapter_dir)
    with pytest.raises(StateError, match="pass it to `GRPOExtTrainer`"):
        reward(["1"], ["2"])
    with pytest.raises(ConfigError, match="needs a PEFT policy, whose backbone is frozen; got LlamaForCausalLM"):
        reward.bind(AutoModelForCausalLM.from_pretrained(tiny_model_dir), None)
    args = arguments(GRPOExtConfig, tmp_path)
    with pytest.raises(ConfigError, match="needs a PEFT policy"):
        GRPOExtTrainer(tiny_model_dir, ClipReward(reward, 0, 1), args, train_dataset=prompts())
    other = str(save_tiny_model(tmp_path / "other"))
    with pytest.raises(ConfigError, match=r"but the policy's base model is .*other"):
        reward.bind(policy_on(other), None)
    vouched = AdapterRewardModel(adapter_dir, any_base=True)  # the same weights, saved twice
    vouched.bind(policy_on(other), tokenizer_of(other))
    assert vouched(["1"], ["2"]) == pytest.approx(stand_alone(other, adapter_dir, ["1"], ["2"]), abs=1e-5)


def test_it_needs_a_score_head(tiny_model_dir, tmp_path):
    policy = policy_on(tiny_model_dir)
    policy.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="holds no score head; train it with"):
        AdapterRewardModel(str(tmp_path)).bind(policy, None)


def test_a_backbone_that_trains_is_refused(tiny_model_dir, adapter_dir):
    policy = policy_on(tiny_model_dir)
    policy.get_base_model().model.norm.weight.requires_grad_(True)
    reward = AdapterRewardModel(adapter_dir)
    reward.bind(policy, None)
    with pytest.raises(ConfigError, match=r"'norm.weight' is being trained"):
        reward.load()


def test_a_sharded_backbone_is_refused(tiny_model_dir, adapter_dir):
    policy = policy_on(tiny_model_dir)
    policy.get_base_model().model.norm.weight.ds_id = 7  # as DeepSpeed ZeRO-3 marks its shards
    reward = AdapterRewardModel(adapter_dir)
    reward.bind(policy, None)
    with pytest.raises(ConfigError, match="sharded"):
        reward.load()


def test_pickle_spec_and_bad_values(adapter_dir, tiny_model_dir):
    reward = AdapterRewardModel(Path(adapter_dir), max_length=9)
    reward.bind(policy_on(tiny_model_dir), None)
    copy = pickle.loads(pickle.dumps(reward))
    assert copy == reward
    assert copy.state.policy is None
    assert from_spec(to_spec(reward), family="reward") == reward
    for options in ({"any_base": 1}, {"token_budget": 0}, {"label": 1.5}, {"tokenizer": 3}, {"adapter": []}):
        with pytest.raises(ConfigError, match=f"`{next(iter(options))}` must be"):
            AdapterRewardModel(**{"adapter": "adapter", **options})
    wide = AdapterRewardModel(adapter_dir, label=1)
    with pytest.raises(ConfigError, match="has 1 outputs"):
        wide.bind(policy_on(tiny_model_dir), None)
