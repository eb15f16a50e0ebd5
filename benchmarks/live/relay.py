"""A bare pipe before some instances: `python relay.py PORT INSTANCE_PORT...`.

It finds where messages end and passes their bytes on, round robin, without reading them. Its cost
is the minimum for a proxy on asyncio's protocols and uvloop.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterator
from typing import cast

import uvloop

LOOPBACK = "127.0.0.1"
CHUNKED = -1
BAD_GATEWAY = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"


def body_length(head: bytes) -> int:
    """Bytes of the body according to a message's head; CHUNKED if only its end shows."""
    lower = head.lower()
    at = lower.find(b"\r\ncontent-length:")
    if at >= 0:
        return int(lower[at + 17 : lower.find(b"\r\n", at + 2)])
    return CHUNKED if b"\r\ntransfer-encoding: chunked" in lower else 0


class Upstream(asyncio.Protocol):
    """A connection to an instance; it serves one client at a time and then goes back to `idle`."""

    def __init__(self, idle: list[Upstream]) -> None:
        self._idle = idle
        self._client: Client | None = None
        self._head = b""
        self._end = b""
        self._left: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def ask(self, client: Client, message: bytes) -> None:
        self._client, self._left, self._head = client, None, b""
        self.transport.write(message)

    def data_received(self, data: bytes) -> None:
        if self._client is None:
            return
        if self._left is None:
            self._head += data
            at = self._head.find(b"\r\n\r\n")
            if at < 0:
                return
            data, length = self._head, body_length(self._head[: at + 2])
            self._left = length if length == CHUNKED else length - (len(data) - at - 4)
            self._end = b""
        elif self._left != CHUNKED:
            self._left -= len(data)
        self._client.transport.write(data)
        if self._left == CHUNKED:
            self._end = (self._end + data)[-7:]
        if self._left == 0 or self._end == b"\r\n0\r\n\r\n":
            client, self._client, self._end = self._client, None, b""
            self._idle.append(self)
            client.answered()

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._idle:
            self._idle.remove(self)
        if self._client is not None:
            self._client.transport.close()

    def forsake(self) -> None:
        """The client is gone: close the connection, so that the instance notices."""
        self._client = None
        self.transport.abort()


class Client(asyncio.Protocol):
    """A connection from a client; its requests are passed on one after the other."""

    def __init__(self, idle: dict[int, list[Upstream]], turn: Iterator[int]) -> None:
        self._idle, self._turn = idle, turn
        self._input = b""
        self._busy = False
        self._upstream: Upstream | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._input += data
        self._next()

    def answered(self) -> None:
        self._busy, self._upstream = False, None
        self._next()

    def connection_lost(self, error: Exception | None) -> None:
        if self._upstream is not None:
            self._upstream.forsake()

    def _next(self) -> None:
        at = self._input.find(b"\r\n\r\n")
        if self._busy or at < 0:
            return
        end = at + 4 + max(0, body_length(self._input[: at + 2]))
        if len(self._input) < end:
            return
        message, self._input = self._input[:end], self._input[end:]
        self._busy = True
        port = next(self._turn)
        idle = self._idle[port]
        if idle:
            self._ask(idle.pop(), message)
        else:
            self._dialling = asyncio.ensure_future(self._dial(port, idle, message))

    def _ask(self, upstream: Upstream, message: bytes) -> None:
        self._upstream = upstream
        upstream.ask(self, message)

    async def _dial(self, port: int, idle: list[Upstream], message: bytes) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, upstream = await loop.create_connection(lambda: Upstream(idle), LOOPBACK, port)
            self._ask(upstream, message)
        except OSError:
            self.transport.write(BAD_GATEWAY)
            self.answered()


async def serve(port: int, instances: list[int]) -> None:
    idle: dict[int, list[Upstream]] = {instance: [] for instance in instances}
    turn = itertools.cycle(instances)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Client(idle, turn), LOOPBACK, port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), [int(word) for word in sys.argv[2:]]))
