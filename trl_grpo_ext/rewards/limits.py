"""Time limits on calls of other people's functions."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
from collections.abc import Callable
from typing import Any


def call_within(seconds: float, function: Callable[..., Any], /, **kwargs: Any) -> Any:
    """Return ``function(**kwargs)``, or raise `TimeoutError` after `seconds` and leave it behind in its own thread."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = function(**kwargs)
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no scores within {seconds:g} s")
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


async def await_within(seconds: float, function: Callable[..., Any], /, **kwargs: Any) -> Any:
    """As `call_within`, for a coroutine function: it is cancelled, and not waited for if it refuses."""
    task = asyncio.ensure_future(function(**kwargs))
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # a late error is nobody's
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        late = not task.done()
        if late:
            task.cancel()
    if late:
        raise TimeoutError(f"no scores within {seconds:g} s")
    return task.result()


def interrupt_after(seconds: float, function: Callable[..., Any], /, **kwargs: Any) -> Any:
    """Return ``function(**kwargs)``, run in this thread; after `seconds` interrupt it and raise `TimeoutError`.

    Interrupts as Ctrl-C does, so it ends sleeps and waits for a network, but not a call that is stuck in compiled code.
    Outside the main thread, or where Ctrl-C means something else than usual, there is no limit.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or not usual or not hasattr(signal, "pthread_kill"):
        return function(**kwargs)
    lock, state = threading.Lock(), {"done": False, "expired": False}

    def interrupt() -> None:
        with lock:
            if not state["done"]:
                state["expired"] = True
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]  # it runs

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        try:
            return function(**kwargs)
        finally:
            with lock:
                state["done"] = True
            timer.cancel()
    except KeyboardInterrupt:
        if state["expired"]:
            raise TimeoutError(f"no scores within {seconds:g} s") from None
        raise
