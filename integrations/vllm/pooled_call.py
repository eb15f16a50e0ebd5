"""One POST on an instance's pool whose answer is received as it arrives, up to a size.

It is never repeated here. The pool sends it again only if the server had closed the idle connection
before the request arrived. vLLM aborts a request that loses its connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollout_sched.integrations.http.client import Pool
from rollout_sched.integrations.http.errors import ExchangeError
from rollout_sched.integrations.http.heads import Headers
from rollout_sched.integrations.vllm.control import ControlAnswer
from rollout_sched.integrations.vllm.proxy import as_instance_error
from rollout_sched.live.ports import InstanceError


async def post(
    pool: Pool,
    target: str,
    header_lines: bytes,
    body: bytes,
    *,
    largest: int,
    receive: Callable[[bytes], None] | None = None,
    limit_s: float | None = None,
) -> ControlAnswer:
    """The answer, of at most `largest` bytes, within `limit_s` seconds; else InstanceError.

    If `receive` is given, it gets the body of a 200 as it arrives, and its exceptions are raised
    here. Cancelling closes the connection.
    """
    answer = _Answer(target, largest, receive)
    exchange = pool.send("POST", target, header_lines, body, answer)
    try:
        async with asyncio.timeout(limit_s):
            return await answer.whole
    except TimeoutError as error:
        raise InstanceError(f"{target} did not answer within {limit_s:g} s") from error
    except ExchangeError as error:
        raise as_instance_error(error, f"{target} failed: ") from error
    finally:
        exchange.cancel()


class _Answer:
    """A receiver (`integrations.http.exchange.Receiver`) with a size limit."""

    def __init__(self, target: str, largest: int, receive: Callable[[bytes], None] | None) -> None:
        self.whole: asyncio.Future[ControlAnswer] = asyncio.get_running_loop().create_future()
        self._target = target
        self._left = largest
        self._receive = receive
        self._status = 0
        self._body = bytearray()

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status

    def on_data(self, data: bytes) -> None:
        if self.whole.done():
            return
        self._left -= len(data)
        try:
            if self._left < 0:
                raise InstanceError(f"{self._target} sent an answer that is too large")
            if self._receive is not None and self._status == 200:
                self._receive(data)
            else:
                self._body += data
        except Exception as error:  # raised where the answer is awaited
            self.whole.set_exception(error)

    def on_end(self) -> None:
        if not self.whole.done():
            self.whole.set_result(ControlAnswer(self._status, bytes(self._body)))

    def on_error(self, error: Exception) -> None:
        if not self.whole.done():
            self.whole.set_exception(error)
