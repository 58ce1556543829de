"""Retries and time limits: failing and hanging reward functions, sync and async."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
import time

import pytest
import torch

from tests.rewards.test_wrappers import call, half
from trl_grpo_ext.errors import ConfigError, RewardError
from trl_grpo_ext.rewards import LengthPenalty, RetryReward, RewardGuard, RewardWrapper, ScaleReward, limits, retry
from trl_grpo_ext.rewards.limits import call_within, interrupt_after, run_async


class Flaky:
    """Fails the first `failures` calls, by raising or (with `hang`) by taking too long."""

    def __init__(self, failures, hang=0.0, log=False):
        self.failures, self.hang, self.log, self.calls = failures, hang, log, 0

    def __call__(self, completions, log_metric=None, **kwargs):
        self.calls += 1
        if log_metric is not None and self.log:
            log_metric("calls", float(self.calls))
        if self.calls <= self.failures:
            if not self.hang:
                raise ConnectionError("busy")
            time.sleep(self.hang)
        return [1.0] * len(completions)


class AsyncFlaky(Flaky):
    async def __call__(self, completions, **kwargs):
        self.calls += 1
        if self.calls <= self.failures:
            if not self.hang:
                raise ConnectionError("busy")
            await asyncio.sleep(self.hang)
        return [1.0] * len(completions)


class Lazy(Flaky):
    """Returns a generator, so that it fails while its scores are read."""

    def __call__(self, completions, **kwargs):
        return (score for _ in [0] for score in super(Lazy, self).__call__(completions, **kwargs))


class AsyncLazy(Lazy):
    async def __call__(self, completions, **kwargs):
        return super().__call__(completions, **kwargs)


class Stubborn(Flaky):
    """An async function that refuses to be cancelled."""

    async def __call__(self, completions, **kwargs):
        try:
            await asyncio.sleep(self.hang)
        except asyncio.CancelledError:
            await asyncio.sleep(self.hang)
        return [1.0] * len(completions)


@pytest.mark.parametrize("inner", [Flaky, AsyncFlaky, Lazy, AsyncLazy])
def test_a_try_that_works_counts(inner, caplog):
    metrics = []
    reward = RetryReward(inner(failures=2), retries=2, timeout=30.0)
    scores = call(reward, log_metric=lambda name, value: metrics.append((name, value)))
    assert scores == [1.0] * 4
    assert reward.counts == {"failed_tries": 2}
    name = f"retry_reward({inner.__name__})"
    assert metrics == [(f"{name}/failed_tries", 2.0), (f"{name}/unscored_batches", 0.0)]
    error = f"ReadingError: reward function '{inner.__name__}' raised " if issubclass(inner, Lazy) else ""
    assert f"failed (try 2 of 3): {error}ConnectionError: busy" in caplog.text
    assert call(reward) == [1.0] * 4
    assert reward.inner.calls == 4


@pytest.mark.parametrize("inner", [Flaky, AsyncFlaky, Lazy, AsyncLazy])
def test_out_of_tries_leaves_the_batch_unscored(inner, caplog):
    metrics = {}
    reward = RetryReward(inner(failures=9), retries=1, timeout=30.0)
    assert call(reward, log_metric=metrics.__setitem__) == [None] * 4
    assert reward.inner.calls == 2
    assert reward.counts == {"failed_tries": 2, "unscored_batches": 1}
    assert list(metrics.values()) == [2.0, 1.0]
    assert "the 4 completions of this batch stay unscored" in caplog.text
    assert all(record.levelno == logging.WARNING for record in caplog.records)


@pytest.mark.parametrize("inner", [Flaky, AsyncFlaky, Stubborn])
def test_a_hang_ends_after_the_timeout(inner):
    start = time.monotonic()
    reward = RetryReward(inner(failures=9, hang=60.0), retries=1, timeout=0.1)
    if inner is Flaky:
        assert call(reward) == [None] * 4
    else:  # a loop of its own waits for stubborn tasks when it closes; the trainer's runs on

        async def run():
            scores = await reward(prompts=["p"], completions=["c"], completion_ids=[[1]])
            assert time.monotonic() - start < 30
            return scores

        assert asyncio.run(run()) == [None]
    assert inner is Stubborn or time.monotonic() - start < 30
    assert reward.counts["timeouts"] == 2


@pytest.mark.parametrize("inner", [Flaky, Lazy])
def test_a_hang_then_an_answer(inner):
    reward = RetryReward(inner(failures=1, hang=60.0), retries=1, timeout=1.0)
    assert call(reward) == [1.0] * 4
    assert reward.counts == {"failed_tries": 1, "timeouts": 1}


@pytest.mark.parametrize("inner", [Flaky, AsyncFlaky])
def test_a_timeout_that_means_no_limit(inner):
    reward = RetryReward(inner(failures=1), retries=1, timeout=1e10)
    assert call(reward) == [1.0] * 4
    assert reward.counts == {"failed_tries": 1}


@pytest.mark.parametrize(("inner", "wait"), [(Flaky, "call_within"), (AsyncFlaky, "await_within")])
def test_an_error_of_the_waiting_is_no_failure_of_the_function(inner, wait, monkeypatch):
    def broken(*args, **kwargs):
        raise OverflowError("timestamp out of range")

    monkeypatch.setattr(retry, wait, broken)
    with pytest.raises(OverflowError, match="timestamp"):
        call(RetryReward(inner(failures=0), retries=1, timeout=1.0))


def test_a_failure_deeper_down_is_retried_whoever_names_it():
    reward = RetryReward(ScaleReward(LengthPenalty(Lazy(failures=1), alpha=0.0, target=0)), retries=1, timeout=30.0)
    assert call(reward) == [1.0] * 4
    assert reward.counts == {"failed_tries": 1}


def test_log_entries_of_failed_tries_are_dropped():
    metrics = []
    reward = RetryReward(Flaky(failures=1, log=True), retries=1, timeout=30.0)
    call(reward, log_metric=lambda name, value: metrics.append((name, value)))
    assert [entry for entry in metrics if entry[0] == "calls"] == [("calls", 2.0)]


def test_bugs_are_not_retried():  # CASES 9
    def one_for_all(completions, **kwargs):
        return [1.0]

    for inner in (one_for_all, LengthPenalty(one_for_all, alpha=0.0, target=0)):
        with pytest.raises(RewardError, match="'one_for_all' returned 1 scores"):
            call(RetryReward(inner, retries=3, timeout=30.0))


def test_a_reward_on_the_policy_itself_is_refused():
    class Bound(RewardWrapper):
        kind = "bound"

        def reshape(self, raw, completion_ids, **columns):
            return raw

        def bind(self, model, tokenizer):
            pass

    with pytest.raises(ConfigError, match="policy's own weights"):
        RetryReward(LengthPenalty(Bound(Flaky(0)), alpha=0.0, target=0))


def test_counts_are_not_part_of_the_value():
    reward = RetryReward(half, retries=1, timeout=5.0)
    other = RetryReward(half, retries=1, timeout=5.0)
    other.counts["failed_tries"] += 1
    assert reward == other
    assert repr(reward) == repr(other)
    assert pickle.loads(pickle.dumps(other)).counts == {"failed_tries": 1}


# The trainer's own limit


def test_interrupt_after_ends_a_sleep():
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"within 0\.2 s"):
        interrupt_after(0.2, lambda: time.sleep(30))
    assert time.monotonic() - start < 25
    assert interrupt_after(5.0, lambda x: x + 1, x=1) == 2
    time.sleep(0.3)  # no interrupt comes late


def test_interrupt_after_lets_ctrl_c_through():
    def ctrl_c():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt_after(5.0, ctrl_c)


def test_interrupt_after_has_no_limit_in_other_threads():
    results = []
    thread = threading.Thread(target=lambda: results.append(interrupt_after(0.05, lambda: time.sleep(0.2) or "done")))
    thread.start()
    thread.join()
    assert results == ["done"]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_interrupt_after_waits_as_long_as_a_thread_can():
    assert interrupt_after(1e10, lambda: time.sleep(0.05) or "done") == "done"


def test_the_trainers_limit_holds_while_scores_are_read():
    guard = RewardGuard([Lazy(failures=1, hang=30.0)], ["lazy"], rank=0, seconds=0.2)
    start = time.monotonic()
    assert guard.functions[0](completions=["c"]) == [None]
    assert guard.failures == ["reward function 'lazy' failed on process 0: TimeoutError: no scores within 0.2 s"]
    assert time.monotonic() - start < 25


# Threads


def test_a_call_in_a_thread_has_the_gpu_of_its_process(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: chosen.append((gpu, threading.current_thread())))
    thread = call_within(5.0, threading.current_thread)
    assert chosen == [(3, thread)]
    assert thread is not threading.current_thread()


def test_run_async_works_where_a_loop_runs_and_keeps_its_own():
    async def loop_of(value):
        await asyncio.sleep(0)
        return value, asyncio.get_running_loop()

    async def notebook():
        return run_async(loop_of, "there")

    there, here = asyncio.run(notebook()), run_async(loop_of, value="here")
    assert (there[0], here[0]) == ("there", "here")
    assert here[1] is there[1]
    assert here[1].is_running()


def test_run_async_has_another_loop_after_a_fork(monkeypatch):
    async def loop():
        return asyncio.get_running_loop()

    before = run_async(loop)
    monkeypatch.setattr(limits.os, "getpid", lambda: -1)
    assert run_async(loop) is not before
