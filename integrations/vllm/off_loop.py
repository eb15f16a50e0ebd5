"""Runs work that may block, such as reading files, in a thread so that the event loop continues."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def off_loop(work: Callable[[], T], limit_s: float) -> T:
    """The result or exception of `work()`; TimeoutError if it takes longer than `limit_s` seconds.

    It has its own daemon thread. On a mount that does not answer the thread hangs forever; neither
    the event loop nor the exit of the program waits for it.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except Exception as error:
            tell(done.set_exception, error)
        else:
            tell(done.set_result, result)

    def tell(settle: Callable[..., None], what: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits any more
            loop.call_soon_threadsafe(lambda: None if done.done() else settle(what))

    threading.Thread(target=run, name="off-loop", daemon=True).start()
    async with asyncio.timeout(limit_s):
        return await done
