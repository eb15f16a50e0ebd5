"""Passes a call that concerns only the instance on unchanged, and its answer back."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from aiohttp import web

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.control_plane.codec import body_of
from rollout_sched.integrations.gateway.data_plane.client_request import NOT_FORWARDED
from rollout_sched.integrations.gateway.data_plane.upstream import Upstream
from rollout_sched.integrations.http.exchange import Exchange
from rollout_sched.live.ports import InstanceError

#: Bytes read from the instance but not yet by the client, beyond which reading pauses.
AHEAD = 2**20

#: Seconds within which a client must read one part of an answer.
CLIENT_STALL_S = 60.0

_DROPPED = (NOT_FORWARDED | {b"proxy-connection"}) - {b"x-request-id"}

#: Other paths could mean one thing here and another to the instance.
_PLAIN = re.compile(r"/[\w/.~-]*")


class InstanceSilent(InstanceError):
    """An instance accepted a call and does not answer."""


def is_plain(path: str) -> bool:
    """Whether every server reads a raw path the same way."""
    return (
        _PLAIN.fullmatch(path) is not None
        and "//" not in path
        and not any(part in (".", "..") for part in path.split("/"))
    )


def forwardable(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers without hop-by-hop headers, including those that Connection names."""
    lowered = [(name.lower(), value) for name, value in headers]
    between = {
        name.strip()
        for field, value in lowered
        if field == b"connection"
        for name in value.lower().split(b",")
    }
    return [field for field in lowered if field[0] not in _DROPPED and field[0] not in between]


async def relay(request: web.Request, client: Upstream, *, silence_s: float) -> web.StreamResponse:
    """`silence_s`: the longest time without data from the instance, before or within its answer.

    Raises InstanceError if the instance does not begin to answer.
    """
    body = await body_of(request)
    headers = [*forwardable(request.raw_headers), *client.request_headers]
    answer = _Answer()
    try:
        answer.exchange = client.pool.send(request.method, request.raw_path, headers, body, answer)
    except ValueError as error:
        raise CallerError(f"the call cannot be passed on: {error}") from error
    except RuntimeError as error:  # it is being removed
        raise InstanceError(str(error)) from error
    try:
        response = await _begun(client, answer, silence_s)
        try:
            await response.prepare(request)
            while data := await answer.data(silence_s):
                async with asyncio.timeout(CLIENT_STALL_S):
                    await response.write(data)
            async with asyncio.timeout(CLIENT_STALL_S):
                await response.write_eof()
        except BaseException as error:  # an incomplete answer must not look complete
            if request.transport is not None:
                request.transport.abort()
            if not isinstance(error, OSError):  # a side has disconnected or is too slow
                raise
        return response
    finally:
        answer.exchange.cancel()


async def _begun(client: Upstream, answer: _Answer, silence_s: float) -> web.StreamResponse:
    try:
        async with asyncio.timeout(silence_s):
            status, fields = await answer.head
    except TimeoutError as error:
        raise InstanceSilent(f"{client.name} did not answer within {silence_s:g} s") from error
    except OSError as error:  # raised by the pool
        raise InstanceError(f"{client.name}: {error}") from error
    response = web.StreamResponse(status=status)
    for name, value in forwardable(fields):
        response.headers.add(name.decode("latin-1"), value.decode("latin-1"))
    response.headers["X-Rollout-Sched-Instance"] = client.name
    return response


class _Answer:
    """An answer as it arrives (integrations.http.exchange.Receiver), read part by part."""

    exchange: Exchange

    def __init__(self) -> None:
        self.head: asyncio.Future[tuple[int, list[tuple[bytes, bytes]]]]
        self.head = asyncio.get_running_loop().create_future()
        self._ahead = 0
        self._parts: asyncio.Queue[bytes | Exception] = asyncio.Queue()

    async def data(self, silence_s: float) -> bytes:
        """The next part; b"" at the end. Raises the error that ended it early, or TimeoutError."""
        async with asyncio.timeout(silence_s):
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
