"""``KL(policy || reference)`` over the whole vocabulary, from log-probs or, in tiles, from hidden states.

The chunked form never holds a `(T, V)` tensor: it projects both models' hidden states through their heads one
`(token_chunk, vocab_chunk)` tile at a time, folds the tiles into running statistics per token (an online logsumexp),
and recomputes them in the backward pass. With ``z`` the policy's and ``y`` the reference's logits and ``p`` the
policy's probabilities,

    KL = sum p (z - y) - log Z + log Y        dKL/dz = p * ((z - y) - sum p (z - y))

so the gradient needs neither normaliser of the reference nor a difference of two large logarithms.

Suffixes: B rows, T tokens, N counted tokens, V vocabulary, H hidden size (the reference's may differ). TRL's own
``ChunkedDivergenceFunction`` (trl.kernels, for distillation) does the same with tiles of 4096 x 32768, which is 1 GiB.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trl_grpo_ext._validate import check_number
from trl_grpo_ext.errors import ShapeError

TOKEN_CHUNK, VOCAB_CHUNK = 1024, 4096
"""A tile of float32 logits takes 16 MiB; at most five of them live at once."""

_MM_OUT_DTYPE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)
"""Whether a CUDA product of half-precision matrices can be written in float32."""


def vocabulary_kl(logps: Tensor, ref_logps: Tensor, mask: Tensor | None = None) -> Tensor:
    """``sum_v pi (log pi - log ref)`` of `(B, T, V)` log-probs, `(B, T)` in float32 at least.

    Differentiable by the policy's log-probs. Where `mask` `(B, T)` is 0 value and gradient are 0. A vocabulary entry
    that the policy gives probability 0 (log-prob -inf) adds nothing, to the value and to the gradient.
    """
    dtype = torch.promote_types(logps.dtype, torch.float32)
    counted_BTV = logps.detach() != -torch.inf
    if mask is not None:
        counted_BTV = counted_BTV & mask.bool().unsqueeze(-1)
    # Replaced before and after: a 0 that comes from inf - inf has gradient NaN.
    logps_BTV = torch.where(counted_BTV, logps.to(dtype), 0.0)
    ref_BTV = torch.where(counted_BTV, ref_logps.detach().to(dtype), 0.0)
    return torch.where(counted_BTV, logps_BTV.exp() * (logps_BTV - ref_BTV), 0.0).sum(-1)


def exact_kl(
    hidden: Tensor,
    ref_hidden: Tensor,
    lm_head_weight: Tensor,
    ref_lm_head_weight: Tensor,
    *,
    bias: Tensor | None = None,
    ref_bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    mask: Tensor | None = None,
    token_chunk: int = TOKEN_CHUNK,
    vocab_chunk: int = VOCAB_CHUNK,
) -> Tensor:
    """``KL(policy || reference)`` at every token from the last hidden states, `(B, T)` in float32 at least.

    `hidden` is `(B, T, H)` and `lm_head_weight` `(V, H)`, the reference's likewise with an H of its own.
    ``logits = softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap) / temperature``, for both models: the
    order in which TRL's fused head applies them. Biases are `(V,)`. Where `mask` `(B, T)` is 0 the value and its
    gradient are 0, whatever the hidden states hold, and nothing is computed.

    Differentiable by the policy's hidden states, weight and bias, each where it requires a gradient; the reference is
    held fixed. Hidden states may be float32, bfloat16 or float16 (under autocast they and the weights are rounded to
    its dtype, as the policy's own head does); products and sums are float32.

    Raises `ShapeError` for shapes that do not fit, `ConfigError` for a setting out of range.

    >>> hidden, reference = torch.zeros(1, 2, 3), torch.ones(1, 2, 3)
    >>> exact_kl(hidden, reference, torch.eye(4, 3), torch.eye(4, 3), mask=torch.tensor([[1, 0]]))
    tensor([[0.0780, 0.0000]])
    """
    check_number("temperature", temperature, above=0)
    check_number("logit_scale", logit_scale)
    check_number("softcap", softcap, above=0, optional=True)
    check_number("token_chunk", token_chunk, at_least=1, integer=True)
    check_number("vocab_chunk", vocab_chunk, at_least=1, integer=True)
    _check_shapes(hidden, ref_hidden, lm_head_weight, ref_lm_head_weight, bias, ref_bias, mask)
    mask_BT = hidden.new_ones(hidden.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
    settings = _Settings(
        scale=float(logit_scale),
        softcap=softcap,
        temperature=float(temperature),
        token_chunk=token_chunk,
        vocab_chunk=vocab_chunk,
        dtype=_compute_dtype(hidden),
    )
    kl_N: Tensor = _ChunkedKL.apply(
        hidden.flatten(0, 1) if mask is None else hidden[mask_BT],
        lm_head_weight,
        bias,
        (ref_hidden.flatten(0, 1) if mask is None else ref_hidden[mask_BT]).detach(),
        ref_lm_head_weight.detach(),
        None if ref_bias is None else ref_bias.detach(),
        settings,
    )
    # Stays connected to the policy when the mask is empty, so that such a batch can be backpropagated.
    return kl_N.new_zeros(mask_BT.shape).masked_scatter(mask_BT, kl_N)


class _Settings(NamedTuple):
    scale: float
    softcap: float | None
    temperature: float
    token_chunk: int
    vocab_chunk: int
    dtype: torch.dtype
    """What the factors of a product are rounded to; logits and sums are `wide`."""

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


class _Head(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    def logits(self, rows: slice, columns: slice, tile: Tensor, settings: _Settings) -> Tensor:
        """Write the scaled, capped, tempered logits into `tile` and return it."""
        hidden, weight = self.hidden[rows].to(settings.dtype), self.weight[columns].to(settings.dtype)
        _matmul(hidden, weight.t(), tile)
        if self.bias is not None:
            tile.add_(self.bias[columns].to(tile.dtype))
        if settings.scale != 1.0:
            tile.mul_(settings.scale)
        if settings.softcap is not None:
            tile.div_(settings.softcap).tanh_().mul_(settings.softcap)
        return tile if settings.temperature == 1.0 else tile.div_(settings.temperature)


class _ChunkedKL(torch.autograd.Function):
    """`(N,)` KL between the policy's ``(hidden, weight, bias)`` and the reference's."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, *reference: Any) -> Tensor:
        ref_hidden, ref_weight, ref_bias, settings = reference
        heads = _Head(hidden, weight, bias), _Head(ref_hidden, ref_weight, ref_bias)
        # A sum over the vocabulary is kept in float64 where the device has it.
        exact = settings.wide if hidden.device.type == "mps" else torch.float64
        kl, top, total, mean_gap = (hidden.new_empty(len(hidden), dtype=exact) for _ in range(4))
        with torch.autocast(hidden.device.type, enabled=False):
            tiles = _tiles(heads, settings)
            for rows in _chunks(len(hidden), settings.token_chunk):
                kl[rows], top[rows], total[rows], mean_gap[rows] = _statistics(heads, rows, tiles, settings, exact)
        saved = (x.to(settings.wide) for x in (top, total, mean_gap))
        ctx.save_for_backward(hidden, weight, bias, ref_hidden, ref_weight, ref_bias, *saved)
        ctx.settings = settings
        return kl.to(settings.wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ref_hidden, ref_weight, ref_bias, top, total, mean_gap = ctx.saved_tensors
        settings: _Settings = ctx.settings
        heads = _Head(hidden, weight, bias), _Head(ref_hidden, ref_weight, ref_bias)
        grads = [
            torch.zeros_like(x, dtype=settings.wide) if x is not None and needed else None
            for x, needed in zip(heads[0], ctx.needs_input_grad[:3], strict=True)
        ]
        factor = grad_kl.to(settings.wide) * (settings.scale / settings.temperature) / total
        with torch.autocast(hidden.device.type, enabled=False):
            tiles = _tiles(heads, settings)
            for rows in _chunks(len(hidden), settings.token_chunk):
                for columns in _chunks(len(weight), settings.vocab_chunk):
                    tile = _gradient_tile(heads, rows, columns, tiles, settings, top[rows], mean_gap[rows])
                    _accumulate(grads, tile, factor[rows], heads[0], rows, columns, settings)
        if grads[0] is not None:
            grads[0].mul_(factor.unsqueeze(-1))
        cast = (None if g is None or x is None else g.to(x.dtype) for g, x in zip(grads, heads[0], strict=True))
        return *cast, None, None, None, None


def _statistics(
    heads: tuple[_Head, _Head], rows: slice, tiles: tuple[Tensor, Tensor], settings: _Settings, exact: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return for some tokens the KL, the largest logit ``m``, ``sum exp(z - m)`` and ``sum p (z - y)``, all `(n,)`."""
    size = len(heads[0].hidden[rows])
    top, ref_top = (tiles[0].new_full((size,), -torch.inf, dtype=exact) for _ in range(2))
    total, ref_total, gaps = (torch.zeros_like(top) for _ in range(3))
    for columns in _chunks(len(heads[0].weight), settings.vocab_chunk):
        z, y = _logits(heads, rows, columns, tiles, settings)
        gap = z - y
        top, rescale = _rise(top, z)
        e = z.sub_(_shift(top).to(z.dtype).unsqueeze(-1)).exp_()
        total = total * rescale + e.sum(-1, dtype=exact)
        # Where the policy's probability is 0 the gap may be anything: -inf - -inf too.
        gap.masked_fill_(e == 0, 0.0)
        gaps = gaps * rescale + gap.mul_(e).sum(-1, dtype=exact)
        ref_top, rescale = _rise(ref_top, y)
        ref_total = ref_total * rescale + y.sub_(_shift(ref_top).to(y.dtype).unsqueeze(-1)).exp_().sum(-1, dtype=exact)
    mean_gap = gaps / total
    kl = mean_gap - (top + total.log()) + (ref_top + ref_total.log())
    return kl.clamp(min=0), top, total, mean_gap


def _gradient_tile(
    heads: tuple[_Head, _Head],
    rows: slice,
    columns: slice,
    tiles: tuple[Tensor, Tensor],
    settings: _Settings,
    top: Tensor,
    mean_gap: Tensor,
) -> Tensor:
    """Return ``exp(z - m) * ((z - y) - mean gap)``, times the slope of the cap: dKL/dz up to a factor per token."""
    z, y = _logits(heads, rows, columns, tiles, settings)
    centred = torch.sub(z, y, out=y).sub_(mean_gap.unsqueeze(-1))
    if settings.softcap is not None:
        tanh = z * (settings.temperature / settings.softcap)
        centred.mul_(tanh.square_().neg_().add_(1))
    e = z.sub_(top.unsqueeze(-1)).exp_()
    centred.masked_fill_(e == 0, 0.0)
    return e.mul_(centred)


def _accumulate(
    grads: list[Tensor | None],
    tile: Tensor,
    factor: Tensor,
    policy: _Head,
    rows: slice,
    columns: slice,
    settings: _Settings,
) -> None:
    """Add a tile's part to the gradients of hidden states (without `factor`), weight and bias, where they are wanted.

    The factor, which holds the loss scale, is kept out of the tile: in half precision small entries would vanish.
    """
    grad_hidden, grad_weight, grad_bias = grads
    if grad_bias is not None:
        grad_bias[columns] += factor @ tile
    tile = tile.to(settings.dtype)
    if grad_hidden is not None:
        _matmul(tile, policy.weight[columns].to(settings.dtype), grad_hidden[rows], accumulate=True)
    if grad_weight is not None:
        scaled = policy.hidden[rows] * factor.unsqueeze(-1)
        _matmul(tile.t(), scaled.to(settings.dtype), grad_weight[columns], accumulate=True)


def _matmul(a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
    """``out = a @ b`` or ``out += a @ b``, without rounding the product to the factors' dtype."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=float(accumulate), out=out)
    elif _MM_OUT_DTYPE and out.device.type == "cuda":
        if accumulate:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=float(accumulate), out=out)


def _tiles(heads: tuple[_Head, _Head], settings: _Settings) -> tuple[Tensor, Tensor]:
    """Buffers for one tile of each model's logits."""
    hidden, weight, _ = heads[0]
    shape = min(len(hidden), settings.token_chunk), min(len(weight), settings.vocab_chunk)
    return hidden.new_empty(shape, dtype=settings.wide), hidden.new_empty(shape, dtype=settings.wide)


def _logits(
    heads: tuple[_Head, _Head], rows: slice, columns: slice, tiles: tuple[Tensor, Tensor], settings: _Settings
) -> tuple[Tensor, Tensor]:
    """Both models' logits of one tile, in the buffers."""
    used = slice(0, rows.stop - rows.start), slice(0, columns.stop - columns.start)
    z, y = (head.logits(rows, columns, tile[used], settings) for head, tile in zip(heads, tiles, strict=True))
    return z, y


def _rise(top: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit so far, and what sums relative to the former one are to be multiplied by."""
    new = torch.maximum(top, logits.amax(-1).to(top.dtype))
    return new, torch.exp(top - _shift(new))


def _shift(top: Tensor) -> Tensor:
    """`top`, or 0 where all logits so far are -inf."""
    return torch.where(top == -torch.inf, 0.0, top)


def _chunks(size: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, size)) for start in range(0, size, chunk)]


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """Autocast's dtype where it is on, as for any other linear layer."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _check_shapes(
    hidden: Tensor,
    ref_hidden: Tensor,
    weight: Tensor,
    ref_weight: Tensor,
    bias: Tensor | None,
    ref_bias: Tensor | None,
    mask: Tensor | None,
) -> None:
    for label, states, head in (("", hidden, weight), ("ref_", ref_hidden, ref_weight)):
        if states.dim() != 3 or head.dim() != 2 or states.shape[-1] != head.shape[-1]:
            raise ShapeError(
                f"`{label}hidden` must be (B, T, H) and `{label}lm_head_weight` (V, H), "
                f"got {tuple(states.shape)} and {tuple(head.shape)}"
            )
    if hidden.shape[:2] != ref_hidden.shape[:2]:
        raise ShapeError(f"hidden states must agree in B and T, got {tuple(hidden.shape)}, {tuple(ref_hidden.shape)}")
    if len(weight) != len(ref_weight):
        raise ShapeError(f"both heads must have the same vocabulary, got {len(weight)} and {len(ref_weight)}")
    for label, vector in (("bias", bias), ("ref_bias", ref_bias)):
        if vector is not None and vector.shape != weight.shape[:1]:
            raise ShapeError(f"`{label}` must be {tuple(weight.shape[:1])}, got {tuple(vector.shape)}")
    if mask is not None and mask.shape != hidden.shape[:2]:
        raise ShapeError(f"`mask` must be {tuple(hidden.shape[:2])}, got {tuple(mask.shape)}")
