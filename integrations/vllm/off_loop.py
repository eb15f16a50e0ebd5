"""Work that may block, such as looking at files, done where it holds up nobody."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def off_loop(work: Callable[[], T], limit_s: float) -> T:
    """What `work()` returns or raises; TimeoutError if it takes longer than `limit_s` seconds.

    The thread is its own, and a daemon: on a mount that does not answer it hangs for ever, and then
    neither the event loop nor the end of the program waits for it.
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
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(lambda: None if done.done() else settle(what))

    threading.Thread(target=run, name="off-loop", daemon=True).start()
    async with asyncio.timeout(limit_s):
        return await done
