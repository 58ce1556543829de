"""Calls of other people's functions: within a time limit, or out of reach of an event loop that runs already."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch


def call_within(seconds: float, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return what the call returns, or raise `TimeoutError` after `seconds` and leave it behind in its own thread."""
    outcome: dict[str, Any] = {}
    # Each thread has a current GPU of its own, at first the first: "cuda" must mean this process's there too
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            outcome["value"] = function(*args, **kwargs)
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
    thread.start()
    thread.join(_waitable(seconds))
    if not outcome:
        raise TimeoutError(f"no scores within {seconds:g} s")
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


async def await_within(seconds: float, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """As `call_within`, for a coroutine function: it is cancelled, and not waited for if it refuses."""
    task = asyncio.ensure_future(function(*args, **kwargs))
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # a late error is nobody's
    try:
        await asyncio.wait({task}, timeout=_waitable(seconds))
    finally:
        late = not task.done()
        if late:
            task.cancel()
    if late:
        raise TimeoutError(f"no scores within {seconds:g} s")
    return task.result()


def interrupt_after(seconds: float, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return what the call returns, in this thread; after `seconds` interrupt it and raise `TimeoutError`.

    Interrupts as Ctrl-C does, so it ends sleeps and waits for a network, but not a call that is stuck in compiled code.
    Outside the main thread, or where Ctrl-C means something else than usual, there is no limit.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or not usual or not hasattr(signal, "pthread_kill"):
        return function(*args, **kwargs)
    lock, state = threading.Lock(), {"done": False, "expired": False}

    def interrupt() -> None:
        with lock:
            if not state["done"]:
                state["expired"] = True
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]  # it runs

    timer = threading.Timer(_waitable(seconds), interrupt)
    timer.daemon = True
    timer.start()
    try:
        try:
            return function(*args, **kwargs)
        finally:
            with lock:
                state["done"] = True
            timer.cancel()
    except KeyboardInterrupt:
        if state["expired"]:
            raise TimeoutError(f"no scores within {seconds:g} s") from None
        raise


def _waitable(seconds: float) -> float:
    """Return the time, or the longest that a thread can wait (292 years; 49 days on Windows): beyond is an error."""
    return min(seconds, threading.TIMEOUT_MAX)


def run_async(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return what a coroutine function returns, also where an event loop runs already, as in a notebook.

    All calls share the loop of one thread: the connections of a client that a function keeps belong to the loop they
    were opened in.
    """
    call = asyncio.run_coroutine_threadsafe(function(*args, **kwargs), _loop(os.getpid()))
    try:
        return call.result()
    finally:
        call.cancel()  # does something only if Ctrl-C ended the wait


@functools.cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """Return an event loop that runs in a thread; one for each `process`, since a fork has none of its parent's."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="trl-grpo-ext judges", daemon=True).start()
    return loop
