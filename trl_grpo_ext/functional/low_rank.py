"""Sums of low-rank products, truncated back to a rank without ever forming the full matrix.

Shapes: O outputs, I inputs, r rank of a term, k rank of the result. A LoRA adapter changes a weight by
``scaling * B @ A`` with `B_Or` and `A_rI`, so a mixture of adapters is a sum of such products, whose rank is the sum of
theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trl_grpo_ext.errors import ShapeError


class LowRank(NamedTuple):
    """A product ``B @ A`` that stands for a sum of products, and what the truncation left out."""

    B: Tensor
    """`(O, k)`"""
    A: Tensor
    """`(k, I)`"""
    lost: Tensor
    """Frobenius norm of the part that was cut off, ``|| sum - B @ A ||``."""
    norm: Tensor
    """Frobenius norm of the sum."""


def truncated_sum(terms: Sequence[tuple[float, Tensor, Tensor]], rank: int) -> LowRank:
    """Return the best rank-`rank` approximation of ``sum(c * B @ A)`` over the terms ``(c, B_Or, A_rI)``.

    ``[c_1 B_1, ..., c_n B_n] = Q_B R_B`` and ``[A_1; ...; A_n]' = Q_A R_A`` reduce it to the small core
    ``R_B R_A'``, whose SVD is that of the sum. With ``U S V'`` the `rank` largest, the factors are
    ``B = Q_B U sqrt(S)`` and ``A = sqrt(S) V' Q_A'``, of equal size. By Eckart-Young no matrix of that rank is nearer.

    Time and memory grow with ``(O + I) * sum(r)``, never with ``O * I``. Computed in float64 (float32 on devices
    without it) and returned so. If the sum has a smaller rank than asked for, the rest of the factors is zero.

    Raises `ShapeError` if the factors of a term, or the terms, do not fit together.

    >>> import torch
    >>> one = (0.5, torch.tensor([[2.0], [0.0]]), torch.tensor([[1.0, 0.0]]))
    >>> two = (0.5, torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0, 1.0]]))
    >>> result = truncated_sum([one, two], rank=1)
    >>> (result.B @ result.A).abs()
    tensor([[1., 0.],
            [0., 0.]], dtype=torch.float64)
    >>> round(result.lost.item(), 6), round(result.norm.item(), 6)
    (0.5, 1.118034)

    Reference: Eckart and Young, "The approximation of one matrix by another of lower rank", 1936.
    """
    _check(terms)
    dtype = torch.float32 if terms[0][1].device.type == "mps" else torch.float64
    B_OR = torch.cat([coefficient * B.to(dtype) for coefficient, B, _ in terms], dim=1)
    A_RI = torch.cat([A.to(dtype) for _, _, A in terms], dim=0)
    Q_B, R_B = torch.linalg.qr(B_OR)
    Q_A, R_A = torch.linalg.qr(A_RI.T)
    U, S, Vh = torch.linalg.svd(R_B @ R_A.T, full_matrices=False)
    root = S[:rank].sqrt()
    B_Ok = torch.nn.functional.pad(Q_B @ (U[:, :rank] * root), (0, max(0, rank - len(S))))
    A_kI = torch.nn.functional.pad((root[:, None] * Vh[:rank]) @ Q_A.T, (0, 0, 0, max(0, rank - len(S))))
    return LowRank(B_Ok, A_kI, torch.linalg.vector_norm(S[rank:]), torch.linalg.vector_norm(S))


def _check(terms: Sequence[tuple[float, Tensor, Tensor]]) -> None:
    if not terms:
        raise ShapeError("`terms` must hold at least one product")
    shapes = [(tuple(B.shape), tuple(A.shape)) for _, B, A in terms]
    fits = all(B.ndim == 2 and A.ndim == 2 and B.size(1) == A.size(0) for _, B, A in terms)
    if not fits or len({(b[0], a[1]) for b, a in shapes}) > 1:
        raise ShapeError(
            f"`terms` must be products B (O, r) @ A (r, I) of one shape (O, I), got (B, A) shapes {shapes}"
        )
