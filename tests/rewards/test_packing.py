"""Packing under a token budget: which batches, and that they change no score."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_ext.rewards import packing
from trl_grpo_ext.rewards.packing import is_out_of_memory, plan, score_packed


@pytest.fixture(autouse=True, scope="module")
def _no_garbage_collection():
    """It takes a second in a process as large as a test run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing.gc, "collect", lambda: 0)
        yield


@given(lengths=st.lists(st.integers(1, 50), max_size=40), budget=st.integers(1, 300), waste=st.integers(0, 100))
def test_plan_covers_every_row_within_budget_and_waste(lengths, budget, waste):
    batches = plan(lengths, budget, waste)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        found = [lengths[row] for row in batch]
        assert found[0] == max(found)
        assert len(batch) == 1 or found[0] * len(batch) <= budget
        assert found[0] * len(batch) - sum(found) <= waste


def test_plan_does_not_split_without_reason():
    assert plan([5, 5, 5, 5], budget=20, waste=0) == [[0, 1, 2, 3]]
    assert plan([5, 5, 5, 5], budget=19, waste=0) == [[0, 1, 2], [3]]
    assert plan([10, 6, 6], budget=100, waste=8) == [[0, 1, 2]]
    assert plan([10, 6, 6], budget=100, waste=7) == [[0, 1], [2]]


class Machine:
    """Scores a row by its sum; holds at most `memory` padded tokens."""

    def __init__(self, memory=10**9):
        self.memory, self.batches = memory, []

    def __call__(self, batch):
        self.batches.append(batch)
        if len(batch) * max(map(len, batch)) > self.memory:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return [float(sum(row)) for row in batch]


rows_of_ids = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=20), max_size=30)


@given(rows=rows_of_ids, budget=st.integers(1, 200), memory=st.integers(20, 100))
@settings(max_examples=20, deadline=None)
def test_scores_are_those_of_each_row_whatever_the_budget(rows, budget, memory):  # CASES 31
    machine = Machine(memory)
    scores, left = score_packed(rows, machine, budget=budget, waste=30)
    assert scores == [float(sum(row)) for row in rows]
    assert left <= budget
    assert left == budget or left <= budget // 2


def test_equal_rows_are_scored_once():
    machine = Machine()
    scores, _ = score_packed([[1, 2], [3], [1, 2], [1, 2]], machine, budget=100, waste=100)
    assert scores == [3.0, 3.0, 3.0, 3.0]
    assert machine.batches == [[(1, 2), (3,)]]


def test_out_of_memory_halves_what_was_tried_and_keeps_what_was_scored():
    machine = Machine(memory=10)
    scores, budget = score_packed([[i] * 4 for i in range(8)], machine, budget=1000, waste=0)
    assert [len(batch) for batch in machine.batches] == [8, 4, 2, 2, 2, 2]
    assert budget == 8
    assert scores == [4.0 * i for i in range(8)]


def test_a_row_that_does_not_fit_alone_is_an_error():
    with pytest.raises(torch.OutOfMemoryError):
        score_packed([[1] * 4], Machine(memory=3), budget=1000, waste=0)


def test_other_errors_pass():
    def broken(batch):
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        score_packed([[1], [2]], broken, budget=10, waste=0)


def test_what_counts_as_out_of_memory():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("index out of range"))
