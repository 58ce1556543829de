"""The truncated sum of low-rank products, against a full SVD of the dense matrix."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trl_grpo_ext.errors import ShapeError
from trl_grpo_ext.functional.low_rank import truncated_sum


def terms_of(seed: int, shapes: list[tuple[float, int]], outputs: int, inputs: int):
    generator = torch.Generator().manual_seed(seed)
    return [
        (c, torch.randn(outputs, r, generator=generator), torch.randn(r, inputs, generator=generator))
        for c, r in shapes
    ]


def dense(terms) -> torch.Tensor:
    return sum(c * B.double() @ A.double() for c, B, A in terms)


def projected(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    U, S, Vh = torch.linalg.svd(matrix, full_matrices=False)
    return U[:, :rank] * S[:rank] @ Vh[:rank]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    outputs=st.integers(1, 12),
    inputs=st.integers(1, 12),
    ranks=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    rank=st.integers(1, 9),
)
def test_it_is_the_projection_of_the_dense_sum(seed, outputs, inputs, ranks, rank):
    terms = terms_of(seed, [(0.7 - i, r) for i, r in enumerate(ranks)], outputs, inputs)
    matrix = dense(terms)
    B, A, lost, norm = truncated_sum(terms, rank)
    assert B.shape == (outputs, rank)
    assert A.shape == (rank, inputs)
    best = projected(matrix, rank)
    torch.testing.assert_close(B @ A, best, rtol=0, atol=1e-9)
    assert lost.item() == pytest.approx(torch.linalg.norm(matrix - best).item(), abs=1e-9)
    assert norm.item() == pytest.approx(torch.linalg.norm(matrix).item(), abs=1e-9)


def test_two_orthogonal_products_by_hand():
    # 0.8 * e1 e1' * 5 + 0.2 * e2 e2' * 10 = diag(4, 2): rank 1 keeps 4, loses 2, of norm sqrt(20).
    one = (0.8, torch.tensor([[5.0], [0.0]]), torch.tensor([[1.0, 0.0]]))
    two = (0.2, torch.tensor([[0.0], [10.0]]), torch.tensor([[0.0, 1.0]]))
    B, A, lost, norm = truncated_sum([one, two], rank=1)
    torch.testing.assert_close(B @ A, torch.tensor([[4.0, 0.0], [0.0, 0.0]], dtype=torch.float64))
    assert lost.item() == pytest.approx(2.0)
    assert norm.item() == pytest.approx(math.sqrt(20))


def test_the_factors_have_equal_size():
    B, A, *_ = truncated_sum(terms_of(0, [(1.0, 4)], 30, 5), rank=3)
    torch.testing.assert_close(B.T @ B, A @ A.T)


def test_a_zero_sum_gives_zero_factors():
    B, A, lost, norm = truncated_sum([(1.0, torch.zeros(5, 2), torch.randn(2, 3))], rank=2)
    assert not (B @ A).any()
    assert (lost.item(), norm.item()) == (0.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_factors_lose_nothing(dtype):
    terms = [(c, B.to(dtype), A.to(dtype)) for c, B, A in terms_of(1, [(0.5, 2)], 6, 7)]
    B, A, lost, _ = truncated_sum(terms, rank=2)
    torch.testing.assert_close(B @ A, dense(terms))
    assert lost.item() == 0.0


class LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.largest = max(self.largest, leaf.numel())
        return result


def test_the_full_matrix_is_never_formed():
    outputs, inputs, rank = 400, 500, 4
    with LargestTensor() as seen:
        truncated_sum(terms_of(2, [(0.6, rank), (0.4, rank)], outputs, inputs), rank)
    assert 0 < seen.largest <= 2 * rank * max(outputs, inputs)


@pytest.mark.parametrize(
    "terms",
    [
        [],
        [(1.0, torch.zeros(3, 2), torch.zeros(3, 4))],
        [(1.0, torch.zeros(3, 2), torch.zeros(2, 4)), (1.0, torch.zeros(3, 2), torch.zeros(2, 5))],
        [(1.0, torch.zeros(3, 2, 1), torch.zeros(2, 4))],
    ],
)
def test_factors_that_do_not_fit_are_refused(terms):
    with pytest.raises(ShapeError, match="terms"):
        truncated_sum(terms, rank=1)
