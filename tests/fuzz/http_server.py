"""The HTTP/1.1 server: the app gets what llhttp reads, however the bytes are cut into packets."""

from __future__ import annotations

import random
import re
from typing import Any, NamedTuple

import httptools

from rollout_sched.integrations.http import ReceivedRequest
from rollout_sched.integrations.http.server import HttpServer
from rollout_sched.integrations.http.server_connection import ServerConnection
from tests import virtual_loop
from tests.fuzz.http_words import FIELDS, TARGETS, WORDS, chunked, field_lines
from tests.fuzz.laws import Messages, cuts, hold, packets
from tests.integrations.http.wires import Wire

_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"  # may be left out if the body is already there
_AUTHORITY = re.compile(rb"(?i)https?://[^/?]*")
HOT = (b"/a", b"/v1/completions")


class Said(NamedTuple):
    """The result of a connection's bytes."""

    requests: list[tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]]
    written: bytes
    handed_over: bytes
    closed: bool


def _alike(one: Said, other: Said) -> bool:
    """Whether both are alike. If a request reached the app and its body is invalid, the app may
    have got more or less of it."""
    a, b = one.handed_over, other.handed_over
    return one == other._replace(handed_over=a) and (a.startswith(b) or b.startswith(a))


class App:
    """Takes what is posted to HOT; answers at once, or `late`, after the packet that ended it."""

    def __init__(self, *, late: bool) -> None:
        self.heard: list[tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]] = []
        self.open: list[ReceivedRequest] = []
        self._late = late

    def wants(self, method: bytes, target: bytes) -> bool:
        return method == b"POST" and target.partition(b"?")[0] in HOT

    def handle(self, request: ReceivedRequest) -> None:
        self.heard.append((request.method, request.target, request.headers, request.body))
        self.open.append(request)
        if not self._late:
            self.answer()

    def answer(self) -> None:
        while self.open:
            self.open.pop().answer(200, (), b"%d" % len(self.heard))


class Fallback:
    def __init__(self) -> None:
        self.data = b""

    def connection_made(self, transport: Any) -> None: ...

    def data_received(self, data: bytes) -> None:
        self.data += data


def converse(sent: list[bytes], *, late: bool) -> Said:
    app, fallback, wire = App(late=late), Fallback(), Wire()
    make: Any = lambda: fallback  # noqa: E731
    connection: Any = ServerConnection(HttpServer(app, make))
    connection.connection_made(wire)
    for packet in sent:
        if wire.is_closing():
            break
        (wire.protocol or connection).data_received(packet)
        app.answer()
    closed = wire.is_closing()
    connection.connection_lost(None)
    wire.abort()
    written = bytes(wire.written).replace(_INTERIM, b"")
    return Said(app.heard, written, fallback.data, closed)


class Server:
    name = "http-server"
    words = WORDS
    corpus = (
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}",
        b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"POST /a HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        b"2;x=y\r\nab\r\n1 ; q\r\nc\r\n0;end\r\nTrailer: t\r\n\r\n",
        b"POST /a HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\nabc",
        b"POST /a HTTP/1.1\r\nhost: a\r\nexpect: something\r\ncontent-length: 3\r\n\r\nabc",
        b"POST http://b/a?d HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n"
        b"\r\nPOST /a HTTP/1.0\r\nconnection: keep-alive\r\n\r\nPOST /a HTTP/1.0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\n\r\nPOST /a HTTP/1.1\r\nhost: a\r\n\r\n",
        b"POST /a HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\nPOST /a HTTP/1.1\r\n\r\n",
        b"POST /a?\xff HTTP/1.1\r\nhost: a\r\nx: \xff\r\n\r\n",
        b"POST /a HTTP/1.1\r\nhost: a\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
        b"POST /a HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        b"fffffffffffffff\r\nabc\r\n0\r\n\r\n",
        b"POST /a HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        b"1;" + b"x" * 1100 + b"\r\na\r\n0\r\n\r\n",
        b"POST /a HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        b"0\r\ncontent-length: 1\r\n\r\n",
        b"POST /a HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n2;:\r\nab\r\n0\r\n\r\n",
        b"POST /a HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 200 + b"content-length: 1\r\n\r\na",
    )

    def make(self, rng: random.Random) -> bytes:
        return b"".join(self._message(rng) for _ in range(rng.choice((1, 1, 2, 3))))

    def _message(self, rng: random.Random) -> bytes:
        method = rng.choice((b"POST", b"POST", b"POST", b"POST", b"GET", b"post", b"PRI"))
        version = rng.choice((b"1.1", b"1.1", b"1.1", b"1.0", b"2.0"))
        line = b"%b %b HTTP/%b\r\n" % (method, rng.choice(TARGETS), version)
        fields = [b"host: a\r\n"] if rng.random() < 0.9 else []
        fields += field_lines(rng, FIELDS)
        body = b"x" * rng.choice((0, 0, 1, 5, 300))
        if rng.random() < 0.5:
            fields.append(b"content-length: %d\r\n" % len(body))
        elif rng.random() < 0.7:
            fields.append(b"transfer-encoding: chunked\r\n")
            body = chunked(rng, body)
        rng.shuffle(fields)
        return line + b"".join(fields) + b"\r\n" + body

    def check(self, data: bytes) -> None:
        virtual_loop.run(self._check(data))

    async def _check(self, data: bytes) -> None:
        said = converse([data], late=False)
        for cut in cuts(data):
            for late in (False, True):
                again = converse(cut, late=late)
                hold("packet boundaries do not matter", _alike(again, said), (again, said))
        theirs = Messages(data, httptools.HttpRequestParser)
        for number, ours in enumerate(said.requests):
            read = theirs.whole[number : number + 1]
            hold(f"llhttp accepts what we accept ({theirs.refusal})", bool(read), ours)
            method, target, headers, body = read[0]
            target = _AUTHORITY.sub(b"", target, count=1) or b"/"
            hold("llhttp reads the same start", (method, target) == ours[:2], (ours, read))
            hold("llhttp reads the same headers", headers == ours[2], (ours, read))
            hold("llhttp reads the same body", body == ours[3], (ours, read))
        answers = Messages(said.written, httptools.HttpResponseParser)
        statuses = [answer[0] for answer in answers.whole]
        asked = len(said.requests)
        hold("answers are HTTP", not answers.refusal, (said.written, answers.refusal))
        hold("each request gets its answer", statuses[:asked] == [200] * asked, statuses)
        refusals = statuses[asked:]
        hold("at most one refusal, then the close", len(refusals) <= said.closed, statuses)
        hold("a refusal blames the client", all(400 <= s < 506 for s in refusals), statuses)

    def spend(self, data: bytes) -> None:
        async def once() -> None:
            converse(packets(data, 64), late=False)

        virtual_loop.run(once())
