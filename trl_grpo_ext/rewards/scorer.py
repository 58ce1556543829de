"""What the reward models have in common: they load a classifier once, and score text with it."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from trl_grpo_ext._strategy import Strategy
from trl_grpo_ext._suggest import shortened
from trl_grpo_ext._validate import check_number
from trl_grpo_ext.errors import ConfigError
from trl_grpo_ext.rewards.packing import Ids, score_packed
from trl_grpo_ext.rewards.source import check_folder, check_weights, is_hub_id, load_errors
from trl_grpo_ext.rewards.text import Encoder, position_limit, position_table, read_template

logger = logging.getLogger(__name__)

_LOADING = threading.RLock()

_FORWARD_COST = {"cpu": 128}
"""How many tokens of padding cost about as much as one more forward pass, by device type."""
_ACCELERATOR_FORWARD_COST = 2048


class Loaded:
    """What a reward model holds once it is loaded. It does not travel: a copy or a pickle starts unloaded."""

    def __init__(self) -> None:
        self.module: Any = None
        self.encoder: Encoder | None = None
        self.pad: int = 0
        self.budget: int | None = None
        self.policy: Any = None
        self.policy_tokenizer: Any = None
        self.scoring = threading.Lock()
        """One batch at a time: a try that `RetryReward` has given up may still be at work, with this padding token."""

    def __reduce__(self) -> tuple[type[Loaded], tuple[()]]:
        return (Loaded, ())


class TextScorer(Strategy, ABC):
    """A reward function that reads prompt and completion with a sequence classifier; subclasses say how to load it.

    Subclasses are frozen dataclasses with the fields below and a `state` of type `Loaded`.
    """

    family: ClassVar[str] = "reward"
    wanted: ClassVar[str]
    """What `source` must be, for errors."""

    max_length: int | None
    token_budget: int
    tokenizer: str | None
    chat_template: str | None
    label: int
    add_special_tokens: bool
    state: Loaded

    def __post_init__(self) -> None:
        for part in dataclasses.fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, part.name)
            if isinstance(value, os.PathLike):
                object.__setattr__(self, part.name, os.fspath(value))
        super().__post_init__()

    def validate(self) -> None:
        check_number("max_length", self.max_length, at_least=1, integer=True, optional=True)
        check_number("token_budget", self.token_budget, at_least=1, integer=True)
        check_number("label", self.label, at_least=0, integer=True)
        check_text("tokenizer", self.tokenizer, "a Hub id, a folder or None", optional=True)
        check_text("chat_template", self.chat_template, "a template, the name of a .jinja file or None", optional=True)

    @property
    @abstractmethod
    def source(self) -> str:
        """Where the weights come from."""

    @property
    def tokenizer_source(self) -> str | None:
        """Where the tokenizer comes from; None if it is the policy's."""
        return self.tokenizer or self.source

    @property
    def tokenizer_options(self) -> dict[str, Any]:
        """How the tokenizer is loaded."""
        return {"trust_remote_code": False}  # unset, transformers would ask, and run the code on a yes

    @abstractmethod
    def load_config(self) -> Any:
        """Return the config of `source`; raise if there is none, or if it does not go with the fields."""

    @abstractmethod
    def load_parts(self) -> tuple[Any, Any]:
        """Return the classifier, frozen and on its device, and its tokenizer."""

    def load_tokenizer(self) -> Any:
        """Return the tokenizer; raise `ConfigError` if there is none."""
        from transformers import AutoTokenizer

        source = self.tokenizer_source
        if source is None:
            return self.state.policy_tokenizer
        with load_errors(self.__name__, f"its tokenizer from {source!r}", "give `tokenizer`, a Hub id or a folder"):
            check_folder(source)
            tokenizer = AutoTokenizer.from_pretrained(source, **self.tokenizer_options)
            if len(tokenizer) <= len(tokenizer.all_special_tokens):  # made up by transformers, where there is no file
                raise FileNotFoundError("there is no vocabulary in it")
        return tokenizer

    def check_source(self) -> None:
        """Raise `ConfigError` now, not on first use, if a folder that the model or its tokenizer is in can't be loaded.

        Cheap: reads configs, the tokenizer and the headers of the weights. What is on the Hub is not looked at, so
        nothing is downloaded.
        """
        self.check_installed()
        read_template(self.chat_template)
        with self._explained():
            if not is_hub_id(self.source):
                self.load_config()
                check_weights(self.source)
        if self.tokenizer_source is not None and not is_hub_id(self.tokenizer_source):
            self.load_tokenizer()

    def check_installed(self) -> None:
        """Raise `CompatibilityError` if a package that scoring needs is missing."""

    def _explained(self) -> AbstractContextManager[None]:
        """While active, an error becomes one that says which reward can't be loaded, why, and what to do."""
        return load_errors(self.__name__, repr(self.source), self.wanted)

    @property
    def __name__(self) -> str:
        return f"{vars(type(self))['kind']}({self.source.rstrip('/').split('/')[-1]})"

    @property
    def module(self) -> Any:
        """The loaded classifier; None before first use."""
        return self.state.module

    def load(self) -> TextScorer:
        """Load the weights now rather than on first use; return self."""
        with _LOADING:
            if self.state.module is None:
                with self._explained():
                    module, tokenizer = self.load_parts()
                self.state.encoder = Encoder(
                    tokenizer,
                    name=self.source,
                    chat_template=self.chat_template,
                    limit=self._limit(module, tokenizer),
                    special_tokens=self.add_special_tokens,
                )
                ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
                self.state.pad = next(number for number in ids if number is not None)
                self.state.module = module
        return self

    def _limit(self, module: Any, tokenizer: Any) -> int | None:
        """Return how many tokens of a row are read; raise `ConfigError` if that is more than the model can."""
        most = position_table(module)
        if self.max_length is not None and most is not None and self.max_length > most:
            raise ConfigError(
                f"`max_length` must be <= {most}, the most that {self.source!r} can read, got {self.max_length}; lower "
                "it, or leave it out for that many"
            )
        return position_limit(module, tokenizer) if self.max_length is None else self.max_length

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return one score per completion; None where the model gives no finite number, or has nothing to read."""
        self.load()
        with self.state.scoring:
            rows, cut = self.state.encoder(prompts, completions)  # type: ignore[misc]  # loaded
            device = next(self.module.parameters()).device
            found, self.state.budget = score_packed(
                [row for row in rows if len(row)],
                self._forward,
                budget=self.state.budget or self.token_budget,
                waste=_FORWARD_COST.get(device.type, _ACCELERATOR_FORWARD_COST),
            )
        if log_metric is not None and rows:
            log_metric(f"rewards/{self.__name__}/truncated_frac", cut / len(rows))
        scores = iter(found)
        result = [next(scores) if len(row) else math.nan for row in rows]
        broken = sum(not math.isfinite(score) for score in result)
        if broken:
            logger.warning("Reward %r gave no finite score to %d of %d rows.", self.__name__, broken, len(rows))
        return [score if math.isfinite(score) else None for score in result]

    def _forward(self, batch: list[Ids]) -> list[float]:
        """Score one batch, padded on the right."""
        module, device = self.module, next(self.module.parameters()).device
        pad = self._padding_for(batch)
        width = max(map(len, batch))
        ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in batch], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in batch], device=device)
        with torch.inference_mode(), torch.autocast(device.type, enabled=False):
            return module(input_ids=ids, attention_mask=mask).logits[:, self.label].float().tolist()

    def _padding_for(self, batch: list[Ids]) -> int:
        """Return the padding token, such that a decoder's head finds the last real token of every row.

        Decoder classifiers read the score at the last token that is not padding. Where padding and end of text are
        one token, a row that ends with it would be read one token early: for such a batch another token pads. (It is
        masked, so which one it is does not matter otherwise.)
        """
        pad = self.state.pad
        if hasattr(self.module, "score"):
            last = {row[-1] for row in batch}
            pad = next(number for number in (pad, *range(len(last) + 1)) if number not in last)
            self.module.config.get_text_config().pad_token_id = pad
        return pad


def check_text(name: str, value: Any, expected: str, *, optional: bool = False) -> None:
    """Raise `ConfigError` unless `value` is text that is not empty (or None, where `optional`)."""
    if not (isinstance(value, str) and value) and not (optional and value is None):
        raise ConfigError(f"`{name}` must be {expected}, got {shortened(value)}")
