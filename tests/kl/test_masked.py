"""Reductions over masked tokens: what stands outside the mask is never looked at."""

from __future__ import annotations

import pytest
import torch

from trl_grpo_ext.functional.masked import masked_mean, masked_sum


@pytest.mark.parametrize("poison", [torch.inf, -torch.inf, torch.nan], ids=str)
def test_masked_out_entries_do_not_leak(poison):
    values = torch.tensor([[1.0, poison], [3.0, 5.0]], requires_grad=True)
    mask = torch.tensor([[1, 0], [1, 1]])
    assert masked_sum(values, mask) == 9
    assert masked_mean(values, mask.bool()) == 3
    masked_mean(values, mask).backward()
    torch.testing.assert_close(values.grad, torch.tensor([[1.0, 0.0], [1.0, 1.0]]) / 3)


def test_nothing_counted_is_zero():
    assert masked_mean(torch.full((2, 3), torch.nan), torch.zeros(2, 3)) == 0
