"""A client's HTTP/1.1 in a few lines, so that 300,000 calls leave the machine to the gateway.

A wrongly framed answer is a `WireError`; so is an answer that is followed by more data.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import NamedTuple

#: Maximum bytes of a line of an answer; a stream's chunk of many tokens is far smaller.
LONGEST_LINE = 2**20


class WireError(Exception):
    """The received data is not an HTTP answer, or not one answer."""


class Answer(NamedTuple):
    """A whole answer; of a stream, all events together."""

    status: int
    body: bytes


class Line:
    """One connection to the gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.keeps = True  # after the last answer

    @property
    def usable(self) -> bool:
        """Whether the next call may use it: the gateway closes connections that idle for long."""
        return self.keeps and not self._reader.at_eof()

    @staticmethod
    async def open(port: int, *, small_buffer: bool = False) -> Line:
        """`small_buffer`: unread data soon prevents the gateway from sending."""
        connection = socket.socket()
        connection.setblocking(False)
        if small_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        except BaseException:
            connection.close()
            raise
        reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST_LINE)
        return Line(reader, writer)

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self, enough: Callable[[bytes], bool] | None = None) -> Answer:
        """The answer to what was sent, or the part of a stream that is `enough`."""
        try:
            return await self._answer(enough)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            raise WireError(f"{type(error).__name__} {error}") from None

    async def _answer(self, enough: Callable[[bytes], bool] | None) -> Answer:
        head = await self._reader.readuntil(b"\r\n\r\n")
        first, *lines = head[:-4].lower().split(b"\r\n")
        fields = dict(line.split(b": ", 1) for line in lines)
        if not first.startswith(b"http/1.1 "):
            raise WireError(f"not an answer: {head[:200]!r}")
        status = int(first[9:12])
        if status == 100:
            return await self._answer(enough)
        self.keeps = fields.get(b"connection") != b"close"
        if b"content-length" in fields:
            return Answer(status, await self._reader.readexactly(int(fields[b"content-length"])))
        if fields.get(b"transfer-encoding") != b"chunked":
            raise WireError(f"no length: {head[:200]!r}")
        body = bytearray()
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            chunk = await self._reader.readexactly(size + 2)
            body += chunk[:-2]
            if enough is not None and enough(chunk):
                self.keeps = False
                return Answer(status, bytes(body))
        await self._reader.readexactly(2)
        return Answer(status, bytes(body))

    def drop(self) -> None:
        self.keeps = False
        self._writer.transport.abort()


def head(path: str, length: int, *fields: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", *fields]
    return "\r\n".join([*lines, f"content-length: {length}", "", ""]).encode()


def post(path: str, body: object, *fields: str) -> bytes:
    """A whole request; a body that is not bytes becomes JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    return head(path, len(data), *fields) + data
