"""The HTTP/1.1 client: an exchange ends once, and its answer equals the one that llhttp reads."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import httptools

from rollout_sched.integrations.http import Pool
from rollout_sched.integrations.http.errors import AnswerBroken
from tests.fuzz.http_words import FIELDS, WORDS, chunked, field_lines
from tests.fuzz.laws import Messages, cuts, hold, packets
from tests.integrations.http.wires import Heard, Wire
from tests.virtual_loop import VirtualLoop


class Dialled(VirtualLoop):
    """Connections without the operating system: `wire` is the last one."""

    async def create_connection(  # type: ignore[override]
        self, factory: Callable[[], Any], host: str, port: int, **_: Any
    ) -> None:
        self.wire = Wire()
        self.wire.protocol = factory()
        self.wire.protocol.connection_made(self.wire)


def converse(sent: list[bytes]) -> tuple[Heard, bool, bool]:
    """Receive an answer in packets, then a close: (heard, ended before the close, kept)."""
    loop = Dialled()  # type: ignore[abstract]  # no I/O, on purpose
    try:
        return loop.run_until_complete(_converse(loop, sent))  # type: ignore[no-any-return]
    finally:
        loop.close()


async def _converse(loop: Dialled, sent: list[bytes]) -> tuple[Heard, bool, bool]:
    pool, heard = Pool("http://127.0.0.1:1"), Heard()
    pool.send("GET", "/", (), b"", heard)
    for _ in range(3):
        await asyncio.sleep(0)
    wire = loop.wire
    connection: Any = wire.protocol
    for packet in sent:
        if wire.is_closing():
            break
        connection.data_received(packet)
    early, kept = heard.over.is_set(), not wire.is_closing()
    connection.eof_received()
    connection.connection_lost(None)
    pool.close()
    wire.abort()
    return heard, early, kept


class Client:
    name = "http-client"
    words = WORDS
    corpus = (
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n"
        b"0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nTrailer: t\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\na: b\r\n\r\nHTTP/1.1 200 \r\n\r\nabc",
        b"HTTP/1.1 204 No Content\r\ncontent-length: 5\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 204\r\ncontent-length: 0\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 1\r\n\r\na",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nuntil the close",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 500 Oh\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\na",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na"
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffff\r\nabc",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 1500 + b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200 + b"content-length: 0\r\n\r\n",
    )

    def make(self, rng: random.Random) -> bytes:
        early = b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\n" * rng.choice((0, 0, 0, 1, 2))
        status = rng.choice((200, 200, 200, 204, 304, 404, 500, 101, 199))
        version = rng.choice((b"1.1", b"1.1", b"1.1", b"1.0", b"1.2"))
        line = b"HTTP/%b %d%b\r\n" % (version, status, rng.choice((b" OK", b"", b" ", b" \xff")))
        fields = field_lines(rng, FIELDS)
        body = b"x" * rng.choice((0, 0, 1, 5, 300))
        if rng.random() < 0.4:
            fields.append(b"content-length: %d\r\n" % len(body))
        elif rng.random() < 0.7:
            fields.append(b"transfer-encoding: chunked\r\n")
            body = chunked(rng, body)
        rng.shuffle(fields)
        return early + line + b"".join(fields) + b"\r\n" + body

    def check(self, data: bytes) -> None:
        said, early, kept = converse([data])
        for cut in cuts(data):
            heard, *rest = converse(cut)
            ends = [call for call in heard.calls if call in ("end", "error")]
            hold(
                "an exchange ends once, as its last call",
                len(ends) == heard.over.is_set() == 1,
                heard.calls,
            )
            hold("a head is reported once", heard.calls.count("head") <= 1, heard.calls)
            broken = heard.error is None or isinstance(heard.error, AnswerBroken)
            hold("an invalid answer raises AnswerBroken", broken, heard.error)
            same = (heard.status, heard.headers, heard.calls[-1]) == (
                *(said.status, said.headers, said.calls[-1]),
            )
            hold(
                "packet boundaries do not matter",
                same,
                (heard.calls, said.calls, heard.error, said.error),
            )
            if heard.error is None:
                hold(
                    "packet boundaries do not change a body",
                    heard.body == said.body,
                    (heard.body, said),
                )
                hold(
                    "packet boundaries do not change the connection's end",
                    rest == [early, kept],
                    (rest, kept),
                )
        if said.error is None:
            self._compare(said, early, kept, Messages(data, httptools.HttpResponseParser))

    def _compare(self, said: Heard, early: bool, kept: bool, theirs: Messages) -> None:
        """Ours is complete, so theirs must be, too, except for one that only the close ended."""
        finals = [message for message in theirs.whole if message[0] >= 200]
        if early:
            hold(f"llhttp accepts what we accept ({theirs.refusal})", bool(finals), said.status)
            status, _, headers, body = finals[0]
            hold("llhttp reads the same status", status == said.status, finals)
            hold("llhttp reads the same headers", headers == said.headers, (finals, said.headers))
            hold("llhttp reads the same body", body == said.body, (finals, said.body))
            if kept:
                more = len(finals) > 1 or theirs.open_body or theirs.refusal
                hold("a connection with more to read is not kept", not more, theirs.refusal)
        elif not theirs.refusal and not finals:
            hold("llhttp reads the same body", theirs.open_body == said.body, said.body)

    def spend(self, data: bytes) -> None:
        converse(packets(data, 64))
