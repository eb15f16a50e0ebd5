"""The elements of HTTP/1.1 messages, for client and server."""

from __future__ import annotations

import random
from collections.abc import Sequence

TARGETS = (
    *(b"/a", b"/a", b"/v1/completions", b"/a?x=y", b"http://b/a", b"HTTPS://b?c", b"*", b"a"),
    *(b"/\xff", b"/a?\xff", b"/%00", b"//a"),
)

FIELDS = (
    b"x-a: b",
    b"X-A:\tb \t",
    b"connection: close",
    b"connection: keep-alive",
    b"connection: x , Close",
    b"content-length: 5",
    b"content-length: +5",
    b"transfer-encoding: chunked",
    b"transfer-encoding: gzip, chunked",
    b"expect: 100-continue",
    b"expect: else",
    b"upgrade: h2c",
    b"trailer: x",
    b"empty:",
    b"x: \xff\x80",
    b"host: b",
)

WORDS = (
    *FIELDS,
    b"\r\n",
    b"\n",
    b"\r",
    b"\r\n\r\n",
    b" ",
    b"\t",
    b":",
    b";",
    b",",
    b"POST /a HTTP/1.1\r\nhost: a\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"0\r\n\r\n",
    b"1\r\na\r\n",
    b"ffffffffffffffff\r\n",
    b"0;",
    b" folded",
)


def field_lines(rng: random.Random, fields: Sequence[bytes]) -> list[bytes]:
    return [rng.choice(fields) + b"\r\n" for _ in range(rng.choice((0, 0, 1, 2, 5)))]


def chunked(rng: random.Random, body: bytes) -> bytes:
    """The body in chunks, some with extensions; sometimes with a trailer."""
    framed = []
    while body:
        size = rng.randint(1, len(body))
        extension = rng.choice((b"", b"", b"", b";x=y", b' ;q="z"', b"\t"))
        framed.append(b"%x%b\r\n%b\r\n" % (size, extension, body[:size]))
        body = body[size:]
    trailer = rng.choice((b"", b"", b"trailer: t\r\n", b"content-length: 1\r\n"))
    return b"".join(framed) + rng.choice((b"0", b"0", b"00", b"0;e")) + b"\r\n" + trailer + b"\r\n"
