"""A call that is nobody's business but the instance's: passed on untouched, answer and all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiohttp import web

from rollout_sched.integrations.gateway.front import NOT_FORWARDED
from rollout_sched.integrations.gateway.wire import Forwarding
from rollout_sched.integrations.http.exchange import Exchange
from rollout_sched.live.ports import InstanceError

#: Bytes taken from the instance that the client has not taken, until the instance has to wait.
AHEAD = 2**20

_DROPPED = NOT_FORWARDED - {b"x-request-id"}


def forwardable(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers less those between two neighbours."""
    lowered = ((name.lower(), value) for name, value in headers)
    return [field for field in lowered if field[0] not in _DROPPED]


async def relay(request: web.Request, client: Forwarding) -> web.StreamResponse:
    """Raises InstanceError if the instance does not begin to answer."""
    body = await request.read()
    headers = [*forwardable(request.raw_headers), *client.request_headers]
    answer = _Answer()
    answer.exchange = client.pool.send(request.method, request.raw_path, headers, body, answer)
    try:
        response = await _begun(request, client, answer)
        try:
            while data := await answer.data():
                await response.write(data)
            await response.write_eof()
        except OSError:  # either side went away: what is not complete must not look so
            if request.transport is not None:
                request.transport.abort()
        return response
    finally:
        answer.exchange.cancel()


async def _begun(request: web.Request, client: Forwarding, answer: _Answer) -> web.StreamResponse:
    try:
        status, fields = await answer.head
    except OSError as error:  # what the pool raises
        raise InstanceError(f"{client.name}: {error}") from error
    response = web.StreamResponse(status=status)
    for name, value in forwardable(fields):
        response.headers.add(name.decode("latin-1"), value.decode("latin-1"))
    response.headers["X-Rollout-Sched-Instance"] = client.name
    await response.prepare(request)
    return response


class _Answer:
    """An answer as it comes (integrations.http.exchange.Receiver), to be read in turn."""

    exchange: Exchange

    def __init__(self) -> None:
        self.head: asyncio.Future[tuple[int, list[tuple[bytes, bytes]]]]
        self.head = asyncio.get_running_loop().create_future()
        self._ahead = 0
        self._parts: asyncio.Queue[bytes | Exception] = asyncio.Queue()

    async def data(self) -> bytes:
        """The next part; b"" at the end. Raises what broke it off."""
        part = await self._parts.get()
        if isinstance(part, Exception):
            raise part
        was, self._ahead = self._ahead, self._ahead - len(part)
        if was > AHEAD >= self._ahead:
            self.exchange.resume()
        return part

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if not self.head.done():
            self.head.set_result((status, headers))

    def on_data(self, data: bytes) -> None:
        was, self._ahead = self._ahead, self._ahead + len(data)
        self._parts.put_nowait(data)
        if was <= AHEAD < self._ahead:
            self.exchange.pause()

    def on_end(self) -> None:
        self._parts.put_nowait(b"")

    def on_error(self, error: Exception) -> None:
        if not self.head.done():
            self.head.set_exception(error)
        else:
            self._parts.put_nowait(error)
