"""A reward model that owns its loading: in 4-bit, 8-bit or full precision, apart from everything of the policy's."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from trl_grpo_ext._validate import check_bool, check_choice
from trl_grpo_ext.errors import CompatibilityError, ConfigError
from trl_grpo_ext.rewards.packing import Ids
from trl_grpo_ext.rewards.quantized import shrink_embedding
from trl_grpo_ext.rewards.scorer import Loaded, TextScorer, check_text
from trl_grpo_ext.rewards.source import check_folder

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_FSDP_LOADS_ON_ONE = "FSDP_CPU_RAM_EFFICIENT_LOADING"
"""Set by accelerate: only the first process reads weights, and FSDP hands them to the others."""


@dataclass(frozen=True)
class RewardModel(TextScorer):
    """Scores prompt and completion with a sequence-classification model, loaded in `bits` 4, 8 or None (as saved).

    `model` is a Hub id or a folder. It is loaded on first use, or by `load()`, on this process's device, with these
    settings alone: nothing of the policy's `model_init_kwargs` applies to it. `bits` is of the linear layers; the
    token embedding then has 8, and the score head is never quantized. With `bits=None` the scores equal those of a
    model given to TRL directly.

    - `quant_type`, `double_quant`: of 4-bit; `dtype` is what the rest is in, and what quantized layers compute in.
    - `max_length`: longer rows lose their beginning (None: the longest the model can read); the metric
      ``rewards/<name>/truncated_frac`` tells how many.
    - `token_budget`: most padded tokens in one forward pass. Rows are sorted by length and packed under it, equal rows
      are scored once, and if memory runs out it is halved.
    - `tokenizer`: if not the model's own, a Hub id or a folder.
    - `chat_template`: for messages, if not the tokenizer's own; its text, or a .jinja file.
    - `label`: which output is the score. `add_special_tokens`: for models that expect [CLS]; TRL's path adds none.
    - `revision`, `trust_remote_code`: as in transformers, of this model only.

    Scoring needs little precision: 4-bit rarely changes which completion of a group is best, see docs/reward-models.md.
    Rows without a finite score become None. Needs bitsandbytes unless `bits=None`.

    >>> reward = RewardModel("Skywork/Skywork-Reward-V2-Qwen3-0.6B")
    >>> reward.__name__, reward.module  # nothing is loaded yet
    ('reward_model(Skywork-Reward-V2-Qwen3-0.6B)', None)

    Reference: QLoRA (4-bit NormalFloat), https://arxiv.org/abs/2305.14314
    """

    kind: ClassVar[str] = "reward_model"
    wanted: ClassVar[str] = "`model` must be a Hub id, or a folder with a whole sequence-classification model"

    model: str
    bits: int | None = 4
    quant_type: str = "nf4"
    double_quant: bool = True
    dtype: str = "auto"
    max_length: int | None = None
    token_budget: int = 16384
    tokenizer: str | None = None
    chat_template: str | None = None
    label: int = 0
    add_special_tokens: bool = False
    revision: str | None = None
    trust_remote_code: bool = False
    state: Loaded = field(init=False, repr=False, compare=False, default_factory=Loaded)

    def __post_init__(self) -> None:
        if isinstance(self.dtype, torch.dtype):
            object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        super().__post_init__()

    def validate(self) -> None:
        super().validate()
        check_text("model", self.model, "a Hub id or a folder")
        check_text("revision", self.revision, "a branch, tag or commit of the Hub, or None", optional=True)
        check_choice("bits", self.bits, (4, 8, None))
        check_choice("quant_type", self.quant_type, ("nf4", "fp4"))
        check_choice("dtype", self.dtype, _DTYPES)
        for name in ("double_quant", "add_special_tokens", "trust_remote_code"):
            check_bool(name, getattr(self, name))

    @property
    def source(self) -> str:
        return self.model

    def _forward(self, batch: list[Ids]) -> list[float]:
        with _without_cast_warnings():
            return super()._forward(batch)

    @property
    def tokenizer_options(self) -> dict[str, Any]:
        return {"trust_remote_code": self.trust_remote_code} if self.tokenizer else self._hub

    @property
    def _hub(self) -> dict[str, Any]:
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    def load_config(self) -> Any:
        from transformers import AutoConfig

        check_folder(self.model, "config.json")
        config = AutoConfig.from_pretrained(self.model, **self._hub)
        if self.label >= config.num_labels:
            raise ConfigError(f"`label` is {self.label}, but {self.model!r} has {config.num_labels} outputs")
        return config

    def load_parts(self) -> tuple[Any, Any]:
        from accelerate import PartialState
        from transformers import AutoModelForSequenceClassification

        device, config, tokenizer = PartialState().device, self.load_config(), self.load_tokenizer()
        options: dict[str, Any] = {"dtype": self.dtype, **self._hub}
        saved_quantized = getattr(config, "quantization_config", None) is not None
        if self.bits is not None or saved_quantized:  # not every such model can be moved afterwards
            options["device_map"] = {"": str(device)}
        if self.bits is not None and not saved_quantized:
            options["quantization_config"] = self._quantization(config)
        with _loading_whole():
            module, info = AutoModelForSequenceClassification.from_pretrained(
                self.model, output_loading_info=True, **options
            )
        heads = head_names(module)
        untrained = [name for name in info["missing_keys"] if name.split(".")[0] in heads]
        if untrained:
            raise ConfigError(
                f"{self.model!r} is no reward model: it has no trained score head (missing {', '.join(untrained)})"
            )
        if "quantization_config" in options:
            shrink_embedding(module)
        if "device_map" not in options:
            module.to(device)
        module.config.use_cache = False
        return module.eval().requires_grad_(False), tokenizer

    def check_installed(self) -> None:
        if self.bits is not None and importlib.util.find_spec("bitsandbytes") is None:
            raise CompatibilityError(
                f"{self.__name__} with bits={self.bits} needs bitsandbytes: run `pip install 'trl-grpo-ext[quant]'`, "
                "or set `bits=None` to load it unquantized"
            )

    def _quantization(self, config: Any) -> Any:
        from transformers import BitsAndBytesConfig

        self.check_installed()
        skip = self._head_modules(config)
        if self.bits == 8:
            return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skip)
        dtype = getattr(config, "dtype", None) if self.dtype == "auto" else getattr(torch, self.dtype)
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.quant_type,
            bnb_4bit_use_double_quant=self.double_quant,
            bnb_4bit_compute_dtype=dtype or torch.float32,
            llm_int8_skip_modules=skip,
        )

    def _head_modules(self, config: Any) -> list[str]:
        """Return what must not be quantized: the head, which transformers' own choice covers for some models only.

        It skips the last module unless given a list; that is the head of a decoder, but one layer of several (or a
        pooler, which is as much a part of the head) in encoders.
        """
        from transformers import AutoModelForSequenceClassification

        with torch.device("meta"):
            outline = AutoModelForSequenceClassification.from_config(config, trust_remote_code=self.trust_remote_code)
        poolers = [name for name, _ in outline.named_modules() if name.endswith(".pooler")]
        return [*head_names(outline), *poolers]


def head_names(module: Any) -> list[str]:
    """Return the names of a classifier's parts outside its backbone that have weights: its head."""
    return [
        name
        for name, part in module.named_children()
        if name != module.base_model_prefix and any(True for _ in part.parameters())
    ]


@contextmanager
def _loading_whole() -> Iterator[None]:
    """While active, transformers loads whole models, also in a run that shards its policy (DeepSpeed ZeRO-3, FSDP)."""
    from transformers.integrations import deepspeed

    config = getattr(deepspeed, "_hf_deepspeed_config_weak_ref", None)
    fsdp = os.environ.get(_FSDP_LOADS_ON_ONE)
    deepspeed.unset_hf_deepspeed_config()
    os.environ[_FSDP_LOADS_ON_ONE] = "false"
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = config
        os.environ.pop(_FSDP_LOADS_ON_ONE)
        if fsdp is not None:
            os.environ[_FSDP_LOADS_ON_ONE] = fsdp


@contextmanager
def _without_cast_warnings() -> Iterator[None]:
    """While active, bitsandbytes does not say, once per layer and call, that 8-bit layers compute in float16."""
    noisy = logging.getLogger("bitsandbytes.autograd._functions")
    noisy.addFilter(_no_casts)
    try:
        yield
    finally:
        noisy.removeFilter(_no_casts)


def _no_casts(record: logging.LogRecord) -> bool:
    return "inputs will be cast" not in str(record.msg)
