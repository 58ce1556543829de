"""A tiny causal language model over characters, built here: nothing is downloaded."""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trl_grpo_ext.demo.task import MARK

ALPHABET = "0123456789+=" + MARK


def build_tokenizer() -> Any:
    """Return a tokenizer with one token for each character of the alphabet, padding on the left."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *ALPHABET])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=32,
    )


def build_model(tokenizer: Any, *, hidden: int = 128, layers: int = 4) -> Any:
    """Return a Llama with random weights for the tokenizer's vocabulary.

    Input and output embeddings are tied: with so few tokens, that is what makes sums carry over to unseen ones.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=32,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)
