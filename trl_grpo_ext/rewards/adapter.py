"""A reward model that is an adapter: one backbone serves policy, reference and reward."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from trl_grpo_ext._validate import check_bool
from trl_grpo_ext.errors import ConfigError, StateError
from trl_grpo_ext.rewards.backbone import check_whole, classifier_on, frozen_view
from trl_grpo_ext.rewards.scorer import Loaded, TextScorer, check_text
from trl_grpo_ext.rewards.source import check_folder


@dataclass(frozen=True)
class AdapterRewardModel(TextScorer):
    """Scores with a LoRA sequence-classification adapter on the *policy's own* frozen backbone.

    `adapter` is a folder or Hub id of an adapter with its score head, as TRL's `RewardTrainer` with a `peft_config` of
    ``task_type="SEQ_CLS", modules_to_save=["score"]`` saves it, trained on the same base model as the policy. The extra
    weights are the adapter's; the scores are those of the reward model it was taken from.

    The policy must be a PEFT model, so that its backbone is frozen. `GRPOExtTrainer` hands it over; elsewhere call
    ``bind(model, tokenizer)``. The adapter is loaded on first use, over a second view of the same weight tensors, so
    the policy's own module tree, adapters, gradients, mode and checkpoints are not touched. Sharded policies (FSDP,
    ZeRO-3) are refused.

    - `tokenizer`: by default the one saved with the adapter, else the policy's.
    - `any_base`: skip the check that the adapter names the policy's base model; for one model under two names.
    - `max_length`, `token_budget`, `chat_template`, `label`, `add_special_tokens`: as in `RewardModel`.

    Use it to save the reward model's memory. A quantized policy's backbone then scores quantized; and an adapter
    trained on it in full precision is read slightly off.

    >>> AdapterRewardModel("runs/reward-adapter").__name__
    'adapter_reward_model(reward-adapter)'

    Reference: LoRA, https://arxiv.org/abs/2106.09685
    """

    kind: ClassVar[str] = "adapter_reward_model"
    wanted: ClassVar[str] = (
        "`adapter` must be a Hub id or a folder of a LoRA adapter, as TRL's `RewardTrainer` saves it"
    )

    adapter: str
    max_length: int | None = None
    token_budget: int = 16384
    tokenizer: str | None = None
    chat_template: str | None = None
    label: int = 0
    add_special_tokens: bool = False
    any_base: bool = False
    state: Loaded = field(init=False, repr=False, compare=False, default_factory=Loaded)

    def validate(self) -> None:
        super().validate()
        check_text("adapter", self.adapter, "a folder or a Hub id")
        check_bool("add_special_tokens", self.add_special_tokens)
        check_bool("any_base", self.any_base)

    @property
    def source(self) -> str:
        return self.adapter

    def check_adapter(self, present: bool, got: str = "a policy without an adapter") -> None:
        """Raise `ConfigError` unless the policy has an adapter (`present`)."""
        if not present:
            raise ConfigError(
                f"{self.__name__} needs a PEFT policy, whose backbone is frozen; got {got}. Pass a `peft_config`, or "
                "use a `RewardModel` of its own"
            )

    def bind(self, model: Any, tokenizer: Any) -> None:
        """Take the policy whose backbone scores, and its tokenizer. Forgets what was loaded for another policy.

        Raises `ConfigError` if it is not a PEFT model on the base model that the adapter was trained on.
        """
        present = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
        self.check_adapter(present, got=type(model).__name__)
        with self._explained():
            trained_on = self.load_config().base_model_name_or_path
            self._labels()
        here = model.get_base_model().config._name_or_path
        if not self.any_base and not _same_model(trained_on, here):
            raise ConfigError(
                f"{self.__name__} was trained on {trained_on!r}, but the policy's base model is {here!r}; scores would "
                "mean nothing. If these are the same weights, say so with `any_base=True`"
            )
        self.state.module = None
        self.state.policy, self.state.policy_tokenizer = model, tokenizer

    def load_parts(self) -> tuple[Any, Any]:
        from peft import PeftModel

        policy = self.state.policy
        if policy is None:
            raise StateError(
                f"{self.__name__} scores with the policy's backbone, but has none: pass it to `GRPOExtTrainer` as a "
                "reward function, or call `bind(model, tokenizer)`"
            )
        labels = self._labels()
        causal = policy.get_base_model()
        backbone = frozen_view(getattr(causal, causal.base_model_prefix))
        check_whole(backbone)
        cuda = [causal.device] if causal.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):  # PEFT draws random numbers for what it then overwrites
            module = PeftModel.from_pretrained(
                classifier_on(backbone, causal.config, labels), self.adapter, torch_device=str(causal.device)
            )
        module.config.use_cache = False
        return module.eval(), self.load_tokenizer()

    @property
    def tokenizer_source(self) -> str | None:
        folder = Path(self.adapter)
        if self.tokenizer is None and folder.is_dir() and not (folder / "tokenizer_config.json").exists():
            return None
        return self.tokenizer or self.adapter

    def load_config(self) -> Any:
        from peft import PeftConfig

        check_folder(self.adapter, "adapter_config.json")
        return PeftConfig.from_pretrained(self.adapter)

    def _labels(self) -> int:
        """Return the number of outputs of the adapter's score head; raise `ConfigError` if there is none."""
        from peft.utils.save_and_load import load_peft_weights

        weights = load_peft_weights(self.adapter, device="cpu")
        heads = [value for name, value in weights.items() if name.endswith(("score.weight", "classifier.weight"))]
        if not heads:
            raise ConfigError(
                f"{self.adapter!r} holds no score head; train it with `task_type='SEQ_CLS', modules_to_save=['score']`"
            )
        if self.label >= len(heads[0]):
            raise ConfigError(f"`label` is {self.label}, but {self.adapter!r} has {len(heads[0])} outputs")
        return len(heads[0])


def _same_model(a: str | None, b: str | None) -> bool:
    """Whether two names are one model: equal, or the same folder."""
    return a == b or bool(a and b and Path(a).exists() and Path(b).exists() and Path(a).samefile(b))
