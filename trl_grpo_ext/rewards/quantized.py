"""What bitsandbytes leaves at full size: the token embedding, a quarter of a small model with a large vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_ROWS = 8192
"""How many rows of an embedding are quantized at a time."""


class Int8Embedding(nn.Module):
    """A frozen embedding in 8 bits: each row is integers in [-127, 127] times the row's scale.

    `weight` is `(V, D)`; the result has its dtype. The error of a value is at most 1/254 of the largest in its row, far
    below that of 4-bit layers.

    >>> embedding = Int8Embedding(torch.tensor([[1.0, -0.5], [0.0, 0.0]]))
    >>> embedding(torch.tensor([0, 1]))
    tensor([[ 1.0000, -0.5039],
            [ 0.0000,  0.0000]])
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        # Row by row it is the same, and some at a time keep the float32 copies small: this happens on the device
        parts = [_quantized(rows) for rows in weight.detach().split(_ROWS)]
        for name, part in zip(("weight", "scale"), zip(*parts, strict=True), strict=True):
            self.register_buffer(name, torch.cat(part))
        self.dtype = weight.dtype

    def forward(self, ids: Tensor) -> Tensor:
        return (self.weight[ids].float() * self.scale[ids]).to(self.dtype)


def _quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    rows = rows.float()
    scale = rows.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (rows / scale).round().to(torch.int8), scale


def shrink_embedding(module: Any) -> None:
    """Put the token embedding of a transformers model into 8 bits, unless it is one of a special kind."""
    embedding = module.get_input_embeddings()
    if type(embedding) is nn.Embedding and embedding.weight.is_floating_point():
        module.set_input_embeddings(Int8Embedding(embedding.weight))
