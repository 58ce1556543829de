"""From prompts and completions to token ids, as TRL's own reward-model path does it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_grpo_ext.errors import ConfigError


class Encoder:
    """Joins each prompt with its completion and tokenizes the whole, cut from the left to `limit` tokens.

    Plain text is joined as it is; messages go through the chat template, of the tokenizer or the one given (its text,
    or a file). `name` is the reward model's, for errors.
    """

    def __init__(
        self, tokenizer: Any, *, name: str, chat_template: str | None, limit: int | None, special_tokens: bool
    ) -> None:
        self.tokenizer, self.name, self.limit, self.special_tokens = tokenizer, name, limit, special_tokens
        self.chat_template = read_template(chat_template)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> tuple[list[list[int]], int]:
        """Return the token ids of each row, and how many rows were cut."""
        texts = [self.text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        if not texts:
            return [], 0
        ids = self._tokenize(texts)
        if self.limit is None:
            return ids, 0
        over = [row for row, found in enumerate(ids) if len(found) > self.limit]
        cut = self._tokenize_cut([texts[row] for row in over]) if over and self.special_tokens else None
        for number, row in enumerate(over):
            ids[row] = cut[number] if cut else ids[row][-self.limit :]
        return ids, len(over)

    def text(self, prompt: Any, completion: Any) -> str:
        """Return the text that the model reads."""
        if isinstance(prompt, str):
            return prompt + completion
        if self.chat_template is None and getattr(self.tokenizer, "chat_template", None) is None:
            raise ConfigError(
                f"the prompts are messages, but the tokenizer of reward model {self.name!r} has no chat template; "
                "give `chat_template` (its text, or a .jinja file), in the form the model was trained with"
            )
        given = {} if self.chat_template is None else {"chat_template": self.chat_template}
        try:
            return self.tokenizer.apply_chat_template(prompt + completion, tokenize=False, **given)
        except Exception as error:
            raise ConfigError(
                f"the chat template of reward model {self.name!r} does not accept these messages: {error}"
            ) from error

    def _tokenize(self, texts: list[str], **options: Any) -> list[list[int]]:
        return self.tokenizer(text=texts, add_special_tokens=self.special_tokens, verbose=False, **options)["input_ids"]

    def _tokenize_cut(self, texts: list[str]) -> list[list[int]]:
        """As `_tokenize`, cut so that special tokens at the start stay."""
        options = {"add_special_tokens": True, "truncation": True, "max_length": self.limit}
        return self._cutting_tokenizer(text=texts, **options)["input_ids"]

    @functools.cached_property
    def _cutting_tokenizer(self) -> Any:
        """A copy, since the side that is cut is a setting."""
        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.truncation_side = "left"
        return tokenizer


def read_template(chat_template: str | None) -> str | None:
    """Return the template's text, from the file if it is the name of one."""
    if chat_template is not None and chat_template.endswith((".jinja", ".j2")):
        try:
            return Path(chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"`chat_template` can't be read: {error}") from error
    return chat_template


def position_limit(module: Any, tokenizer: Any) -> int | None:
    """Return how many tokens the model is meant to read, None if it does not say."""
    return _least(_stated_positions(module), position_table(module), getattr(tokenizer, "model_max_length", None))


def position_table(module: Any) -> int | None:
    """Return how many positions the model has learnt, the most that it can read; None if it computes them."""
    tables = [
        # RoBERTa counts positions from behind the padding index
        part.num_embeddings - (0 if part.padding_idx is None else part.padding_idx + 1)
        for name, part in module.named_modules()
        if name.endswith(("position_embeddings", "embed_positions", "wpe")) and hasattr(part, "num_embeddings")
    ]
    return _least(*tables, _stated_positions(module)) if tables else None


def _stated_positions(module: Any) -> Any:
    return getattr(module.config.get_text_config(), "max_position_embeddings", None)


def _least(*limits: Any) -> int | None:
    return min((limit for limit in limits if isinstance(limit, int) and 0 < limit < 10**9), default=None)
