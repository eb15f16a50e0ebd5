"""The error for a broken law, and the reference parsers that laws compare with."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator
from typing import Any

import httptools


class Broken(Exception):
    """A law does not hold; `law` names it with the same text for every input that breaks it."""

    def __init__(self, law: str, detail: object = "") -> None:
        super().__init__(f"{law}: {detail!r:.600}" if detail != "" else law)
        self.law = law


def hold(law: str, holds: bool, detail: object = "") -> None:
    if not holds:
        raise Broken(law, detail)


def packets(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def cuts(data: bytes) -> Iterator[list[bytes]]:
    """The same bytes in packets: whole, byte by byte, and cut at random, but always the same for
    the same data.

    Long data is not cut into single bytes, which would cost too much.
    """
    yield [data]
    yield packets(data, 1 if len(data) <= 1024 else 1 + len(data) // 1024)
    rng = random.Random(zlib.crc32(data))
    at = sorted(rng.randrange(len(data) + 1) for _ in range(3))
    yield [data[a:b] for a, b in zip([0, *at], [*at, len(data)], strict=True) if a < b]


class Unreadable(Exception):
    """Not JSON by the RFC."""


def plain_json(body: bytes) -> Any:
    """The body as the standard library reads it. Raises Unreadable, or RecursionError."""
    try:
        return json.loads(body.decode(), parse_constant=_no_constant, parse_int=_integer)
    except ValueError as error:
        raise Unreadable(str(error)) from None


def _integer(digits: str) -> int | str:
    """An integer; the digits if there are too many for Python, because JSON allows them."""
    return int(digits) if len(digits) <= 4000 else digits


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class Messages:
    """The messages that llhttp reads from a connection's bytes, up to the first refused one."""

    def __init__(self, data: bytes, kind: type) -> None:
        #: Each (method or status, target, headers, body); only complete ones.
        self.whole: list[tuple[Any, bytes, list[tuple[bytes, bytes]], bytes]] = []
        self.refusal = ""
        self._begin()
        parser = self._parser = kind(self)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.refusal = "an upgrade"
        except httptools.HttpParserError as error:
            self.refusal = str(error)

    @property
    def open_body(self) -> bytes:
        """The body of the incomplete message."""
        return bytes(self._body)

    def on_message_begin(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._in_head = True
        self._body = bytearray()

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes | None) -> None:
        if self._in_head:  # trailers come after it
            self._headers.append((name.lower(), (value or b"").strip(b" \t")))

    def on_headers_complete(self) -> None:
        self._in_head = False

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        parser = self._parser
        asks = isinstance(parser, httptools.HttpRequestParser)
        start = parser.get_method() if asks else parser.get_status_code()
        self.whole.append((start, self._target, self._headers, bytes(self._body)))
        self._begin()
