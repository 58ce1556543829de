"""What the reward models have in common: they load a classifier once, and score text with it."""

from __future__ import annotations

import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from trl_grpo_ext._strategy import Strategy
from trl_grpo_ext._validate import check_number
from trl_grpo_ext.rewards.packing import Ids, score_packed
from trl_grpo_ext.rewards.text import Encoder, position_limit

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

    def __reduce__(self) -> tuple[type[Loaded], tuple[()]]:
        return (Loaded, ())


class TextScorer(Strategy, ABC):
    """A reward function that reads prompt and completion with a sequence classifier; subclasses say how to load it.

    Subclasses are frozen dataclasses with the fields below and a `state` of type `Loaded`.
    """

    family: ClassVar[str] = "reward"

    max_length: int | None
    token_budget: int
    chat_template: str | None
    label: int
    add_special_tokens: bool
    state: Loaded

    def validate(self) -> None:
        check_number("max_length", self.max_length, at_least=1, integer=True, optional=True)
        check_number("token_budget", self.token_budget, at_least=1, integer=True)
        check_number("label", self.label, at_least=0, integer=True)

    @property
    @abstractmethod
    def source(self) -> str:
        """Where the weights come from."""

    @abstractmethod
    def load_parts(self) -> tuple[Any, Any]:
        """Return the classifier, frozen and on its device, and its tokenizer."""

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
                module, tokenizer = self.load_parts()
                limit = position_limit(module, tokenizer) if self.max_length is None else self.max_length
                self.state.encoder = Encoder(
                    tokenizer,
                    name=self.source,
                    chat_template=self.chat_template,
                    limit=limit,
                    special_tokens=self.add_special_tokens,
                )
                ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
                self.state.pad = next(number for number in ids if number is not None)
                self.state.module = module
        return self

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return one score per completion; None where the model gives no finite number, or has nothing to read."""
        self.load()
        rows, cut = self.state.encoder(prompts, completions)  # type: ignore[misc]  # loaded
        if log_metric is not None and rows:
            log_metric(f"rewards/{self.__name__}/truncated_frac", cut / len(rows))
        readable = [row for row in rows if len(row)]
        device = next(self.module.parameters()).device
        found, self.state.budget = score_packed(
            readable,
            self._forward,
            budget=self.state.budget or self.token_budget,
            waste=_FORWARD_COST.get(device.type, _ACCELERATOR_FORWARD_COST),
        )
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
